"""Does the structure of code help a method choose? Each method with and without the prior, on the same lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import benchmarks, build, instruments, long_context, plots, quality_plots, report, summary
from octavo.scripts.experiments.code_completion import complete
from octavo.scripts.instruments import Instruments
from octavo.scripts.long_context import Methods
from octavo.scripts.progress import waiting
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Structure
from octavo.scripts.schema_groups import PROJECT_LINES
from octavo.scripts.tasks.statistics import paired_bootstrap

if TYPE_CHECKING:
    from octavo.core.interfaces import SparseMethod

SUFFIX = " + structure"
PAYS = ("break_even_tokens", "plus_30_percent_tokens")
"""From which context on a method pays, in rows."""
QUALITIES = ("edit_similarity", "gold_log_likelihood_per_token")
NOTES = (
    "The prior: imports, heads of functions and classes, those around the cursor, and what the lines before it name, "
    "by the syntax tree of the prompt (octavo/sparse/code_structure.py). It costs no bytes: budgets are the same.",
    "Intervals: 95 %, bootstrap over items; vs dense, and with against without the prior: paired over the same items.",
)


def run(config: Structure, run: Run) -> None:
    """One sample an item and method; one row a method, with the prior and without, and one a pair.

    As the main job, with every method twice in each item's batch. A pair's row has what the prior changes.
    """
    made = config.task.name == PROJECT_LINES
    items = [] if made else benchmarks.load(config.task, config.limit)
    methods = twice(config)
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
        engine = build.engine(config, model, tokenizer)
        build.fit(methods, engine)
    if made:
        items = benchmarks.load(config.task, config.limit, tokenizer, config.seed)
    engine.watch = PageWatch() if config.page_map else None
    tools = Instruments.of(engine, model, config.sparse)
    by_id = {item.id: item for item in items}

    def rebuild(budget: int) -> Methods:
        sparse = dataclasses.replace(config.sparse, budget_tokens=budget)
        return twice(dataclasses.replace(config, sparse=sparse))

    def measure(item: str, missing: Methods) -> list[Sample]:
        return complete(by_id[item], missing, engine, config, tokenizer, rebuild, tools.taken)

    def rows(samples: Sequence[Sample], intervals: bool) -> list[dict[str, Any]]:
        found = summary.rows(samples, task=config.task.name, seed=config.seed, intervals=intervals)
        return [*found, *(pairs(samples, config) if intervals else [])]

    final = long_context.work_through(
        config, run, {item: by_id[item].facts for item in by_id}, methods, measure, rows, tools
    )
    if config.budget_share is not None:  # there is no one budget whose context could be told
        final = [{key: row[key] for key in row if not key.startswith(PAYS)} for row in final]
    good = [sample for sample in run.samples if "error" not in sample]
    measured = [row for row in final if "kv_bytes_per_token" in row]
    figures = {
        "pareto": plots.pareto(measured),
        "gain": quality_plots.gains([row for row in final if row not in measured]),
        "by_length": plots.by_length(good, list(methods)),
        **instruments.figures(good, list(methods)),
    }
    maps = [("all items, one after another", engine.watch)]
    report.publish(run, config, final, plots=figures, notes=[*NOTES, *tools.notes()], maps=maps)


def twice(config: Structure) -> dict[str, SparseMethod | None]:
    """Dense, and every method without and with the prior."""
    from octavo.sparse.prior import Favoured

    found: dict[str, SparseMethod | None] = {"dense": None}
    for name, method in build.methods(config.sparse).items():
        found[name] = method
        prior = Favoured(config.weight, config.share)
        found[name + SUFFIX] = dataclasses.replace(method, prior=prior)  # type: ignore[type-var]
    return found


def pairs(samples: Sequence[Sample], config: Structure) -> list[dict[str, Any]]:
    """What the prior changes, a row a method: the mean paired difference over the items that both have."""
    good = [sample for sample in samples if "error" not in sample]
    scores = {(s["method"], s["item"]): s for s in good}
    found = []
    for name in build.methods(config.sparse):
        both = [item for method, item in scores if method == name and (name + SUFFIX, item) in scores]
        row: dict[str, Any] = {"name": "octavo", "method": f"{name}: with against without", "task": config.task.name}
        row["items"] = len(both)
        for key in QUALITIES if both else ():
            own, plain = ([_quality(scores[method, i], key) for i in both] for method in (name + SUFFIX, name))
            estimate = paired_bootstrap(own, plain, seed=config.seed)
            row[f"{key}_gain"], row[f"{key}_gain_ci"] = estimate.mean, [estimate.low, estimate.high]
        found.append(row)
    return found


def _quality(sample: Sample, key: str) -> float:
    if key in sample:
        return float(sample[key])
    return float(sum(sample["gold_logprobs"]) / len(sample["gold_logprobs"]))
