"""What is each method worth when all read equally many bytes, digests and dense layers included?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import benchmarks, budgets, build, instruments, long_context, plots, report, summary
from octavo.scripts.experiments import code_completion, ruler
from octavo.scripts.instruments import Instruments
from octavo.scripts.long_context import Methods
from octavo.scripts.progress import waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Pareto
from octavo.scripts.tasks.question_prompts import answer_ids

if TYPE_CHECKING:
    from octavo.core import Engine
    from octavo.core.interfaces import SparseMethod

BOUND = "oracle"
"""Methods of this name, or one that begins with it, are bars: what they read to choose is not counted."""

NOTES = (
    "level: share of the bytes that dense attention reads for a token, which a method may read of K, V and to choose, "
    "dense layers included. Every item and method has a budget of its own, the largest in whole pages that stays "
    "within it (budget: the mean). An adaptive budget may read less.",
    "oracle chooses with all keys, which are not counted against its level: it bounds the quality of any choice of "
    "pages. random is the lower bar. Where a method cannot read so little, the item counts as failed.",
    "Intervals: 95 %, bootstrap over items; vs dense: paired over the same items.",
)


@dataclass(frozen=True)
class Benchmark:
    """Items by id with what their samples say, and how one is asked.

    Attributes:
        prompt_tokens: of an item.
        measure: samples of an item under methods.
        most_new: tokens that an answer may have, for which bytes are predicted.
    """

    items: Mapping[str, Mapping[str, Any]]
    prompt_tokens: Callable[[str], int]
    measure: Callable[[str, Methods], list[Sample]]
    most_new: int
    quality: str


def run(config: Pareto, run: Run) -> None:
    """One sample an item, level and method; one row a level and method, over all items.

    Dense runs once. For each item, each level and each method the budget is solved from the closed form, and all of
    them enter one batch on one shared prompt.
    """
    methods = build.methods(config.sparse)
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
        engine = build.engine(config, model, tokenizer)
        build.fit(methods, engine)
    engine.watch = PageWatch() if config.page_map else None
    tools = Instruments.of(engine, model, config.sparse)
    make = _puzzles if config.benchmark == "ruler" else _lines
    benchmark = make(config, engine, tokenizer)
    levels = named_levels(methods, config.levels)

    def measure(item: str, missing: Methods) -> list[Sample]:
        tokens = benchmark.prompt_tokens(item)
        solved: dict[str, SparseMethod | None] = {}
        samples: list[Sample] = []
        for name in missing:
            method, level = levels[name]
            try:
                solved[name] = at_level(name, method, level, engine, tokens, benchmark.most_new)
            except ConfigError as error:
                samples.append({"method": name, "level_percent": 100 * level, "error": str(error)})
        for sample in benchmark.measure(item, solved) if solved else []:
            method, level = levels[sample["method"]]
            own = tools.taken(solved[sample["method"]])
            samples.append({**sample, **({} if method is None else {"level_percent": 100 * level}), **own})
        return samples

    def rows(samples: Sequence[Sample], intervals: bool) -> list[dict[str, Any]]:
        return level_rows(summary.rows(samples, task=config.benchmark, seed=config.seed, intervals=intervals), levels)

    bases = {name: method for name, (method, _) in levels.items()}
    final = long_context.work_through(config, run, benchmark.items, bases, measure, rows)
    good = [sample for sample in run.samples if "error" not in sample]
    figures = {"pareto": plots.by_level(final, benchmark.quality)} | instruments.figures(good, list(levels))
    maps = [("all items, one after another", engine.watch)]
    notes = [*NOTES, *tools.probe_notes()]
    if absent := sorted(levels.keys() - {row["method"] for row in final}):
        notes.append(
            "Not in the table, since they cannot read so little of any item (samples.jsonl says how much they do): "
            f"{', '.join(absent)}."
        )
    report.publish(run, config, final, plots=figures, notes=notes, maps=maps)


def named_levels(methods: Methods, levels: Sequence[float]) -> dict[str, tuple[SparseMethod | None, float]]:
    """By name, each method with each level; dense has none."""
    found: dict[str, tuple[SparseMethod | None, float]] = {
        name: (None, 1.0) for name, method in methods.items() if method is None
    }
    for level in levels:
        for name, method in methods.items():
            if method is not None:
                found[f"{name} {100 * level:g} %"] = method, level
    return found


def at_level(
    name: str, method: SparseMethod | None, level: float, engine: Engine, prompt_tokens: int, new_tokens: int
) -> SparseMethod | None:
    """The method with the largest budget at which an answer of ``new_tokens`` reads at most ``level`` of what dense
    attention does.

    Raises:
        ConfigError: none is small enough.
    """
    if method is None:
        return None
    choosing_counts = not method.name.startswith(BOUND)

    def nbytes(one: SparseMethod | None) -> int:
        cost = build.predicted_cost(engine, one, prompt_tokens, new_tokens)
        return cost.kv_bytes + choosing_counts * cost.digest_bytes

    return budgets.within(name, method, engine, level * nbytes(None), nbytes, prompt_tokens + new_tokens)


def level_rows(
    rows: Sequence[Mapping[str, Any]], levels: Mapping[str, tuple[SparseMethod | None, float]]
) -> list[dict[str, Any]]:
    """Rows with their level, the composition's name, and the share of dense's bytes that was read."""
    dense = next((row["kv_bytes_per_token"] for row in rows if row["method"] == "dense"), None)
    found = []
    for row in rows:
        method, level = levels[row["method"]]
        read, choosing = row["kv_bytes_per_token"], row["digest_bytes_per_token"]
        row = {**row, "composition": row["method"] if method is None else method.name}
        if method is not None:
            row["level_percent"] = 100 * level
            if dense and read is not None:
                counted = read if method.name.startswith(BOUND) else read + choosing
                row["read_percent"] = 100 * counted / dense
        found.append(row)
    return found


def _lines(config: Pareto, engine: Engine, tokenizer: Any) -> Benchmark:
    items = {item.id: item for item in benchmarks.load(config.task, config.limit, tokenizer, config.seed)}

    def measure(item: str, methods: Methods) -> list[Sample]:
        return code_completion.complete(items[item], methods, engine, config, tokenizer)

    def tokens(item: str) -> int:
        return len(code_completion.prompt_and_gold(items[item], engine, config.task, tokenizer)[0])

    return Benchmark({item: {} for item in items}, tokens, measure, config.task.max_new_tokens, "edit_similarity")


def _puzzles(config: Pareto, engine: Engine, tokenizer: Any) -> Benchmark:
    for length in config.lengths:
        long_context.refuse_longer("lengths", length, engine)
    long_context.refuse_without_template(tokenizer, config.chat)
    puzzles = {spec.id: spec for spec in ruler.specs(config)[: config.limit]}

    def measure(item: str, methods: Methods) -> list[Sample]:
        puzzle, prompt = ruler.make(puzzles[item], config, tokenizer)
        return ruler.answered(engine, config, puzzle, prompt, answer_ids(tokenizer, puzzle.gold), methods)

    def tokens(item: str) -> int:
        return len(ruler.make(puzzles[item], config, tokenizer)[1].ids)

    about = {item: {"task": s.task, "length": s.length, "depth": s.depth} for item, s in puzzles.items()}
    return Benchmark(about, tokens, measure, config.max_new_tokens, "accuracy")
