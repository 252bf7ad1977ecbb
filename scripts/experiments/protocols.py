"""How much of a method's figure is the protocol: question, dense layers, what budgets are equal in, several turns?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import budgets, build, long_context, quality_plots, report
from octavo.scripts.experiments import multi_turn, ruler
from octavo.scripts.instruments import Instruments
from octavo.scripts.long_context import Methods
from octavo.scripts.progress import waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import MultiTurn, Protocols
from octavo.scripts.tasks.conversation import conversation
from octavo.scripts.tasks.question_prompts import answer_ids
from octavo.scripts.tasks.statistics import paired_bootstrap

if TYPE_CHECKING:
    from octavo.core import Engine
    from octavo.core.interfaces import SparseMethod

Row = dict[str, Any]
TURNS = "turn"

COLUMNS = (
    "method", "switch", "setting", "items", "budget_tokens", "accuracy", "accuracy_vs_base", "perplexity",
    "log_likelihood_vs_base", "read_bytes_per_token",
)  # fmt: skip

NOTES = (
    "base: question dense, dense layers as composed, budgets equal in tokens. Every other row changes one thing; vs "
    "base is its mean paired difference to the method's own base, over the same puzzles (95 %, bootstrap).",
    "question sparse: question and answer are fed token by token under the method. Both are given, so that there is a "
    "likelihood (of a right answer, nats a token) and no accuracy. Question unseen: methods that drop tokens do so "
    "before the question is computed; to others it is the base.",
    "budget bytes: each method may read as many bytes as one that reads nothing to choose and has the same dense "
    "layers does with budget_tokens; what it reads to choose comes out of its budget.",
    "turn n: accuracy of the n-th answer in one session, against the first; a session's texts are of their own. Bytes "
    "are predicted.",
)


@dataclass(frozen=True)
class Variant:
    """A method under a protocol that differs from the base in one switch, "" for the base."""

    composed: str
    method: SparseMethod | None
    switch: str
    setting: str
    question: str

    @property
    def name(self) -> str:
        return f"{self.composed} | {self.switch} {self.setting}" if self.switch else self.composed


def run(config: Protocols, run: Run) -> None:
    """One sample a puzzle, method and protocol, and one a conversation and method; one row a method and protocol."""
    methods = build.methods(config.sparse)
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
        engine = build.engine(config, model, tokenizer)
        build.fit(methods, engine)
    long_context.refuse_longer("length", config.length, engine)
    engine.watch = PageWatch() if config.page_map else None
    found = {variant.name: variant for variant in variants(config, methods, engine)}
    asked = config.as_ruler()
    puzzles = {spec.id: spec for spec in ruler.specs(asked)[: config.limit]}

    def measure(item: str, missing: Methods) -> list[Sample]:
        puzzle, prompt = ruler.make(puzzles[item], asked, tokenizer)
        gold, samples = answer_ids(tokenizer, puzzle.gold), []
        for question, ask in ruler.QUESTIONS.items():
            own = {name: method for name, method in missing.items() if found[name].question == question}
            samples += ask(engine, config.as_ruler(question), puzzle, prompt, gold, own) if own else []
        return [{**sample, **_about(found[sample["method"]])} for sample in samples]

    def rows(samples: Sequence[Sample], intervals: bool) -> list[Row]:
        return protocol_rows(samples, config.seed, intervals)

    about = {item: {"task": spec.task, "length": spec.length, "depth": spec.depth} for item, spec in puzzles.items()}
    asking = {name: variant.method for name, variant in found.items()}
    final = long_context.work_through(config, run, about, asking, measure, rows)
    if config.turns > 1:
        nobody = Instruments.of(engine, model, dataclasses.replace(config.sparse, probe_every=0))
        final = _converse(config, run, engine, tokenizer, methods, rows, nobody)
    figures = {"protocols": quality_plots.by_protocol(final)}
    maps = [("all puzzles and conversations", engine.watch)]
    tables = [(final, [key for key in COLUMNS if any(key in row for row in final)])]
    report.publish(run, config, final, plots=figures, notes=NOTES, maps=maps, tables=tables)


def variants(config: Protocols, methods: Methods, engine: Engine) -> list[Variant]:
    """The base of every method, and with each other setting of each switch. Dense has no dense layers to change and no
    budget.

    Raises:
        ConfigError: a method that a switch cannot be applied to.
    """
    found = []
    for name, method in methods.items():
        found.append(Variant(name, method, "", "", "dense"))
        found += [Variant(name, method, "question", q, q) for q in config.questions if q != "dense"]
        if method is None:
            continue
        for layers in config.dense_layers:
            if list(layers) != list(cast(Any, method).dense_layers):
                changed = _with_dense_layers(name, method, layers, engine)
                shown = ",".join(map(str, layers)) or "none"
                found.append(Variant(name, changed, "dense layers", shown, "dense"))
        for match in config.matches:
            if match != "tokens":
                changed = _matched(name, method, match, config, engine)
                found.append(Variant(name, changed, "budget", match, "dense"))
    return found


def _with_dense_layers(name: str, method: SparseMethod, layers: Sequence[int], engine: Engine) -> SparseMethod:
    if not dataclasses.is_dataclass(method) or not hasattr(method, "dense_layers"):
        raise ConfigError(f"method {name}: it has no dense_layers to change; give dense_layers=[]")
    changed = cast("SparseMethod", dataclasses.replace(cast(Any, method), dense_layers=tuple(layers)))
    build.fit({name: changed}, engine)
    return changed


def _matched(name: str, method: SparseMethod, match: str, config: Protocols, engine: Engine) -> SparseMethod:
    """The method with its budget equal to others' in pages or bytes, at the length of the puzzles."""
    page, tokens = engine.config.text_page_tokens, config.sparse.budget_tokens
    if match == "pages":
        return budgets.with_tokens(name, method, -(-tokens // page) * page)

    def nbytes(one: SparseMethod) -> int:
        return budgets.step_bytes(engine, one, config.length)

    free = build.method("streaming", budget_tokens=tokens, dense_layers=list(cast(Any, method).dense_layers))
    return budgets.within(name, method, engine, nbytes(cast("SparseMethod", free)), nbytes, config.length)


def _about(variant: Variant) -> Sample:
    return {"composed": variant.composed, "switch": variant.switch, "setting": variant.setting}


def _converse(
    config: Protocols,
    run: Run,
    engine: Engine,
    tokenizer: Any,
    methods: Methods,
    rows: long_context.Rows,
    tools: Instruments,
) -> list[Row]:
    """The sessions of several turns; gives all rows."""
    asked = MultiTurn(
        experiment="multi_turn", length=config.length, turns=config.turns, chat=config.chat, seed=config.seed,
        sparse=config.sparse,
    )  # fmt: skip

    def measure(item: str, missing: Methods) -> list[Sample]:
        talk = conversation(config.length, config.turns + 1, f"{config.seed} {item}")
        text = multi_turn.fitted_text(talk, asked, tokenizer)
        taken = [
            multi_turn.converse(engine, asked, tools, item, text, talk.turns, name, method)
            for name, method in missing.items()
        ]
        return [{**sample, "composed": sample["method"], "switch": TURNS, "setting": ""} for sample in taken]

    items: dict[str, Mapping[str, Any]] = {f"conversation {number}": {} for number in range(config.conversations)}
    items = dict(list(items.items())[: config.limit])
    return long_context.work_through(config, run, items, methods, measure, rows)


def protocol_rows(samples: Sequence[Sample], seed: int, intervals: bool) -> list[Row]:
    """A row a method and protocol, each with its paired difference to the method's base; turns to the first one."""
    good = [sample for sample in samples if "error" not in sample]
    puzzles = [sample for sample in good if sample["switch"] != TURNS]
    found: list[Row] = []
    for composed in dict.fromkeys(sample["composed"] for sample in good):
        own = [sample for sample in puzzles if sample["composed"] == composed]
        base = {sample["item"]: _scores(sample) for sample in own if not sample["switch"]}
        for switch, setting in dict.fromkeys((sample["switch"], sample["setting"]) for sample in own):
            members = [s for s in own if (s["switch"], s["setting"]) == (switch, setting)]
            row: Row = {"name": "octavo", "method": composed, "switch": switch or "base", "setting": setting}
            row |= {"items": len(members), "perplexity": _perplexity(members)}
            row["read_bytes_per_token"] = _read(members)
            if "budget_tokens" in members[0]:
                row["budget_tokens"] = members[0]["budget_tokens"]
            pairs = [(_scores(s), base[s["item"]]) for s in members if s["item"] in base]
            found.append(row | _differences(members, pairs if switch else [], seed, intervals))
        turns = [sample["turns"][:-1] for sample in good if sample["composed"] == composed and "turns" in sample]
        for number in range(len(turns[0]) if turns else 0):
            members = [talk[number] for talk in turns]
            row = {"name": "octavo", "method": composed, "switch": TURNS, "setting": str(number + 1)}
            pairs = [(_scores(talk[number]), _scores(talk[0])) for talk in turns] if number else []
            found.append(row | {"items": len(members)} | _differences(members, pairs, seed, intervals))
    return found


def _scores(sample: Sample) -> dict[str, float]:
    found = {"accuracy": sample["accuracy"]} if "accuracy" in sample else {}
    if "gold_logprobs" in sample:
        found["log_likelihood"] = sum(sample["gold_logprobs"]) / len(sample["gold_logprobs"])
    return found


def _differences(
    members: Sequence[Sample], pairs: Sequence[tuple[dict[str, float], dict[str, float]]], seed: int, intervals: bool
) -> Row:
    """Means of what all members have, and the mean differences of pairs (own, base)."""
    row: Row = {}
    if all("accuracy" in sample for sample in members):
        row["accuracy"] = sum(sample["accuracy"] for sample in members) / len(members)
    for key in ("accuracy", "log_likelihood"):
        both = [(one[key], base[key]) for one, base in pairs if key in one and key in base]
        if not both or len(both) < len(pairs):
            continue
        ours, bases = zip(*both, strict=True)
        if intervals:
            estimate = paired_bootstrap(ours, bases, seed=seed)
            row[f"{key}_vs_base"], row[f"{key}_vs_base_ci"] = estimate.mean, [estimate.low, estimate.high]
        else:
            row[f"{key}_vs_base"] = sum(a - b for a, b in both) / len(both)
    return row


def _perplexity(members: Sequence[Sample]) -> float:
    return math.exp(-sum(_scores(sample)["log_likelihood"] for sample in members) / len(members))


def _read(members: Sequence[Sample]) -> float | None:
    """Predicted bytes a token, of K and V and to choose."""
    steps = sum(sample["decode_steps"] for sample in members)
    read = sum(sample["predicted_kv_bytes"] + sample["predicted_digest_bytes"] for sample in members)
    return read / steps if steps else None
