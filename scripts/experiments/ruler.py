"""Find what is planted in long texts, dense and sparse: what does each method lose, at which length and depth?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import budgets, build, instruments, long_context, plots, quality_plots, report, summary
from octavo.scripts.instruments import Instruments
from octavo.scripts.long_context import Methods
from octavo.scripts.progress import waiting
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Ruler
from octavo.scripts.tasks import ruler
from octavo.scripts.tasks.question_prompts import QuestionPrompt, answer_ids, longest, question_prompt

if TYPE_CHECKING:
    from octavo.core import Engine
    from octavo.core.interfaces import SparseMethod

NOTES = (
    "Accuracy: share of the answers that the output holds (RULER's string match). Perplexity: of a right answer.",
    "Intervals: 95 %, bootstrap over puzzles; vs dense: paired over the same puzzles.",
    "The methods of a puzzle run in one batch on one shared prompt: seconds overlap, and the peaks are the batch's.",
)
QUESTION_NOTES = {
    "dense": "Question dense: the whole prompt is computed densely, as nearly all papers do; methods choose from the "
    "first token of the answer on.",
    "sparse": "Question sparse: question and answer are fed token by token, each with its own choice of pages. Both "
    "are given, so the quality is the answer's likelihood; bytes are predicted, not counted.",
    "unseen": "Question unseen: methods that drop tokens decide when the text is computed and before the question is; "
    "question and answer read what they have kept. For methods that drop none it is as with question=dense.",
}


@dataclass(frozen=True)
class Spec:
    """One puzzle, before it is made."""

    task: str
    length: int
    depth: float | None
    number: int

    @property
    def id(self) -> str:
        place = "" if self.depth is None else f"/depth {self.depth:g}"
        return f"{self.task}/{self.length}{place}/{self.number}"


def run(config: Ruler, run: Run) -> None:
    """One sample a puzzle and method; one row a task, length and method.

    Every puzzle is made to fill its length with the model's tokenizer. Its prompt enters one batch under all methods
    at once, where the first computes it and the others find its pages. Then a right answer is scored under each.
    """
    methods = _methods(config)
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
        engine = build.engine(config, model, tokenizer)
        methods = budgets.matched(methods, engine, config.sparse)
    for length in config.lengths:
        long_context.refuse_longer("lengths", length, engine)
    long_context.refuse_without_template(tokenizer, config.chat)
    engine.watch = PageWatch() if config.page_map else None
    tools = Instruments.of(engine, model, config.sparse)

    puzzles = {spec.id: spec for spec in specs(config)[: config.limit]}

    def measure(item: str, missing: Methods) -> list[Sample]:
        puzzle, prompt = make(puzzles[item], config, tokenizer)
        gold = answer_ids(tokenizer, puzzle.gold)
        return QUESTIONS[config.question](engine, config, puzzle, prompt, gold, missing)

    def rows(samples: Sequence[Sample], intervals: bool) -> list[dict[str, Any]]:
        return long_context.grouped_rows(samples, ("task", "length"), config.seed, intervals)

    about = {item: {"task": s.task, "length": s.length, "depth": s.depth} for item, s in puzzles.items()}
    final = long_context.work_through(config, run, about, methods, measure, rows, tools)
    notes = [*NOTES, QUESTION_NOTES[config.question], *tools.notes()]
    maps = [("all puzzles, one after another", engine.watch)]
    report.publish(run, config, final, plots=_figures(config, run.samples, methods), notes=notes, maps=maps)


def specs(config: Ruler) -> list[Spec]:
    """All puzzles, in an order in which any first few are of different tasks."""
    cells = product(range(config.repeats), enumerate(config.depths), config.lengths, config.tasks)
    return [
        Spec(task, length, None if task in ruler.WITHOUT_DEPTH else depth, repeat * len(config.depths) + place)
        for repeat, (place, depth), length, task in cells
    ]


def make(spec: Spec, config: Ruler, tokenizer: Any) -> tuple[ruler.Puzzle, QuestionPrompt]:
    """A puzzle and its prompt, which with ``max_new_tokens`` fills the length but for a few tokens.

    Raises:
        ValueError: the length has no room for the question.
    """
    puzzle = ruler.puzzle(spec.task, spec.length, spec.depth, f"{config.seed} {spec.id}")

    def prompt(words: int) -> QuestionPrompt:
        text = f"{puzzle.intro}\n\n{puzzle.text(words)}"
        return question_prompt(tokenizer, text, puzzle.question, puzzle.cue, chat=config.chat)

    least = puzzle.text.least_words
    fitted, _ = longest(prompt, least, max(least, spec.length), spec.length - config.max_new_tokens)
    return puzzle, fitted


def _methods(config: Ruler) -> Methods:
    """All methods with all budgets; a budget is part of a name where there are several."""
    if config.budgets is None:
        return build.methods(config.sparse)
    found: dict[str, SparseMethod | None] = {}
    for budget in config.budgets:
        for name, method in build.methods(dataclasses.replace(config.sparse, budget_tokens=budget)).items():
            found[name if method is None or len(config.budgets) == 1 else f"{name} {budget}"] = method
    return found


def answered(
    engine: Engine, config: Ruler, puzzle: ruler.Puzzle, prompt: QuestionPrompt, gold: list[int], methods: Methods
) -> list[Sample]:
    """The prompt dense, but for what reads dropped text, the answer under each method."""
    from octavo.core import SamplingParams
    from octavo.core.serving.scoring import score_many

    params = SamplingParams(max_tokens=config.max_new_tokens, seed=config.seed)
    unseen = len(prompt.question) if config.question == "unseen" else 0
    start = time.perf_counter()
    ids = {
        name: engine.submit(prompt.ids, params, method=method, unseen_tokens=unseen) for name, method in methods.items()
    }
    completions = engine.finish(list(ids.values()))
    seconds = time.perf_counter() - start
    likelihoods = score_many(engine, [(prompt.ids, gold, method) for method in methods.values()], unseen)
    samples = []
    for (name, method), logprobs in zip(methods.items(), likelihoods, strict=True):
        sample = long_context.generated(engine, completions[ids[name]], seconds)
        samples.append(
            {
                "method": name,
                "answers": puzzle.answers,
                "accuracy": ruler.string_match(sample["output"], puzzle.answers),
                "gold_logprobs": logprobs,
                **sample,
                **long_context.predicted(engine, method, len(prompt.ids), sample["new_tokens"], unseen_tokens=unseen),
            }
        )
    return samples


def scored(
    engine: Engine, config: Ruler, puzzle: ruler.Puzzle, prompt: QuestionPrompt, gold: list[int], methods: Methods
) -> list[Sample]:
    """The text dense, question and answer under each method."""
    given = prompt.question + gold
    start = time.perf_counter()
    likelihoods = engine.score_many([(prompt.context, given, method) for method in methods.values()])
    seconds = time.perf_counter() - start
    return [
        {
            "method": name,
            "answers": puzzle.answers,
            "gold_logprobs": logprobs[len(prompt.question) :],
            **long_context.forced(engine, method, len(prompt.context), len(given), seconds=seconds),
        }
        for (name, method), logprobs in zip(methods.items(), likelihoods, strict=True)
    ]


QUESTIONS = {"dense": answered, "unseen": answered, "sparse": scored}
"""How the question is computed, and what asks it so."""


def _figures(config: Ruler, samples: Sequence[Sample], methods: Mapping[str, Any]) -> dict[str, Any]:
    """Where needles are found; and where answers were decoded, at which cost."""
    good: list[Sample] = [sample for sample in samples if "error" not in sample]
    figures = {}
    if config.question != "sparse":
        figures["pareto"] = plots.pareto(summary.rows(good, task="all", seed=config.seed), "accuracy")
        quality = "accuracy"
    else:
        quality = "log_likelihood_per_token"
        good = [{**s, quality: sum(s["gold_logprobs"]) / len(s["gold_logprobs"])} for s in good]
    if any(sample["depth"] is not None for sample in good):
        figures["depths"] = quality_plots.heat_maps(good, list(methods), quality)
    return figures | instruments.figures(good, list(methods))
