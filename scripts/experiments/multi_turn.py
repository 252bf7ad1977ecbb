"""Ask several questions about one long text, one after the other: does a sparse turn harm the turns after it?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import budgets, build, instruments, long_context, quality_plots, report
from octavo.scripts.instruments import Instruments
from octavo.scripts.long_context import Methods
from octavo.scripts.progress import waiting
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import MultiTurn
from octavo.scripts.tasks.conversation import Conversation, Turn, conversation
from octavo.scripts.tasks.question_prompts import QuestionPrompt, longest, question_prompt
from octavo.scripts.tasks.ruler import string_match

if TYPE_CHECKING:
    from octavo.core import Engine, SamplingParams, Session
    from octavo.core import Sample as Answer
    from octavo.core.interfaces import SparseMethod

DENSE_TURN = "dense turn"

NOTES = (
    "Each question is computed densely and answered under the method, in one session; then comes a dense question to "
    "the same history. Accuracy: whether the answer holds the code that was asked for.",
    "dense turn as dense: the dense turn's tokens are those of a request that shares no page with anybody. It may use "
    "the pages that are exact, and must not use those that the method has shaped. Low precision may decide a near tie "
    "otherwise; margin: by how many nats the two most likely tokens were apart where the first difference is.",
    "Intervals: 95 %, bootstrap over conversations; vs dense: paired over the same conversations.",
)


def run(config: MultiTurn, run: Run) -> None:
    """One sample a conversation and method, with all its turns; one row a turn and method."""
    methods = build.methods(config.sparse)
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
        engine = build.engine(config, model, tokenizer)
        methods = budgets.matched(methods, engine, config.sparse)
    long_context.refuse_longer("length", config.length, engine)
    long_context.refuse_without_template(tokenizer, config.chat)
    engine.watch = PageWatch() if config.page_map else None
    tools = Instruments.of(engine, model, config.sparse)

    def measure(item: str, missing: Methods) -> list[Sample]:
        talk = conversation(config.length, config.turns + 1, f"{config.seed} {item}")
        text = fitted_text(talk, config, tokenizer)
        return [
            converse(engine, config, tools, item, text, talk.turns, name, method) for name, method in missing.items()
        ]

    def rows(samples: Sequence[Sample], intervals: bool) -> list[dict[str, Any]]:
        return _rows(config, samples, intervals)

    items = {f"conversation {number}": {} for number in range(config.conversations)}
    items = dict(list(items.items())[: config.limit])
    final = long_context.work_through(config, run, items, methods, measure, rows, tools)
    turns = [{**sample, **turn} for sample in run.samples for turn in sample.get("turns", ())]
    figures = {"turns": quality_plots.by_turn(final)} | instruments.figures(turns, list(methods))
    maps = [("all conversations, one after another", engine.watch)]
    report.publish(run, config, final, plots=figures, notes=[*NOTES, *tools.notes()], maps=maps)


def fitted_text(talk: Conversation, config: MultiTurn, tokenizer: Any) -> str:
    """The text of a conversation, so long that it fills the length with the first question and its answer.

    Raises:
        ValueError: the length has no room for the question.
    """

    def text(words: int) -> str:
        return f"{talk.intro}\n\n{talk.text(words)}"

    first = talk.turns[0]

    def prompt(words: int) -> QuestionPrompt:
        return question_prompt(tokenizer, text(words), first.question, first.cue, chat=config.chat)

    _, words = longest(prompt, talk.text.least_words, config.length, config.length - config.max_new_tokens)
    return text(words)


def converse(
    engine: Engine,
    config: MultiTurn,
    tools: Instruments,
    item: str,
    text: str,
    turns: Sequence[Turn],
    name: str,
    method: SparseMethod | None,
) -> Sample:
    """All turns but the last under the method, in one session, and the last one dense: as a request that may find what
    the session has left, beside one that finds nothing."""
    from octavo.core import SamplingParams

    # A model that goes on after its answer would write questions of its own into the history.
    params = SamplingParams(max_tokens=config.max_new_tokens, seed=config.seed, stop=("\n",))
    session = engine.session(method=method)
    try:
        answered = []
        for number, turn in enumerate(turns[:-1]):
            _ask(session, turn, config.chat, before="" if number else text)
            answered.append(_sparse_turn(engine, session, params, f"turn {number + 1}", turn) | tools.taken(method))
        _ask(session, turns[-1], config.chat)
        answered.append(_dense_turn(engine, session.tokens, params, f"{item} {name}", turns[-1]))
    finally:
        session.close()
    return {
        "method": name,
        "prompt_tokens": answered[0]["prompt_tokens"],
        "accuracy": sum(turn["accuracy"] for turn in answered) / len(answered),
        "turns": answered,
    }


def _ask(session: Session, turn: Turn, chat: bool, before: str = "") -> None:
    asked = f"{before}\n\nQuestion: {turn.question}"
    if chat:
        session.append(asked, role="user")
        session.append(turn.cue)
    else:
        session.append(f"{asked}\nAnswer: {turn.cue}")


def _sparse_turn(engine: Engine, session: Session, params: SamplingParams, task: str, turn: Turn) -> Sample:
    start = time.perf_counter()
    sample = long_context.generated(engine, session.generate(params), time.perf_counter() - start)
    return {"task": task, "accuracy": string_match(sample["output"], [turn.answer]), **sample}


def _dense_turn(engine: Engine, history: list[int], params: SamplingParams, salt: str, turn: Turn) -> Sample:
    params = dataclasses.replace(params, logprobs=2)
    start = time.perf_counter()
    ids = [engine.submit(history, params), engine.submit(history, params, salt=salt)]
    completions = engine.finish(ids)
    after, alone = (completions[request] for request in ids)
    sample = long_context.generated(engine, after, time.perf_counter() - start)
    accuracy = string_match(sample["output"], [turn.answer])
    margin = _margin_nats(after.samples[0], alone.samples[0])
    return {"task": DENSE_TURN, "accuracy": accuracy, "same_tokens": margin is None, "margin_nats": margin, **sample}


def _margin_nats(after: Answer, alone: Answer) -> float | None:
    """How far apart the two most likely tokens of ``alone`` are where ``after`` first differs; None if it does not."""
    assert alone.logprobs is not None
    for one, other, logprobs in zip(after.token_ids, alone.token_ids, alone.logprobs, strict=False):
        if one != other:
            first, second, *_ = sorted(logprobs.values(), reverse=True)
            return first - second
    return None


def _rows(config: MultiTurn, samples: Sequence[Sample], intervals: bool) -> list[dict[str, Any]]:
    """A conversation that could not be served counts as failed in every turn."""
    tasks = [*(f"turn {number + 1}" for number in range(config.turns)), DENSE_TURN]
    turns = [{**s, **turn} for s in samples for turn in s.get("turns", [{"task": task} for task in tasks])]
    turns.sort(key=lambda turn: tasks.index(turn["task"]))
    found = long_context.grouped_rows(turns, ("task",), config.seed, intervals)
    for row in found:
        if row["task"] == DENSE_TURN:
            own = [turn for turn in turns if turn["method"] == row["method"] and "same_tokens" in turn]
            row["same_tokens_percent"] = 100.0 * sum(turn["same_tokens"] for turn in own) / len(own)
            row["margin_nats_max"] = max((t["margin_nats"] for t in own if not t["same_tokens"]), default=None)
    return found
