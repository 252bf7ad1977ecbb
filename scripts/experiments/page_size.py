"""How large should a page be: what do pages of each size waste and cost, and what do the formulas say?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.scripts import build, report, workloads
from octavo.scripts.machine_load import busy_rounds, watch
from octavo.scripts.page_costs import Facts, host_seconds, measure, memory, serve
from octavo.scripts.page_waste import waste_rows
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Config, PageSize
from octavo.scripts.watched_pass import watched_pass
from octavo.scripts.workloads import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from octavo.core import Engine
    from octavo.core.inspection.page_watch import PageWatch
    from octavo.core.policies.page_sqrt import QuotedPages, SqrtPages

Row = dict[str, Any]

WORKLOAD = "ragged"
GRAIN = 8
LARGER = 1.3
"""The page that is claimed to be faster still: "a 30 % larger page"."""

NOTES = (
    "waste is empty slots in % of slots held: in layout rows over all prompts, else over all decode steps; predicted "
    "by the closed form, -n mod P a segment.",
    "host time is a step's CPU time outside the model's forward pass; p99 is of decode steps.",
    "m, what a page costs, is the slope of host seconds over pages, times the read rate of the memory, and 36 bytes.",
    "formula is what a rule says before it is rounded to 8 tokens and clamped; + 30 % is compared with the rule's own "
    "row, round by round.",
)


def run(config: PageSize, run: Run) -> None:
    """From arithmetic to a machine:

    1. Offline: what each page policy wastes on given lengths, counted in layouts and predicted (no samples).
    2. ``sweep``: rounds of a decode workload, in each of which all page sizes take their turn. The slope of host
       seconds over pages says what a page costs.
    3. ``formulas``: the sizes that the rules give with that cost, and 30 % larger ones, take turns in further rounds.

    One sample a round and page size.
    """
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
    workload = workloads.build(WORKLOAD, tokenizer, config.seed, config.limit)
    workload = workload.cut(config.requests, workload.longest, workload.longest)
    workloads.refuse_too_long(workload, model)

    offline = waste_rows(config)
    with counting("sweep", _repeats(config)) as advance:
        for line in _rounds(config, run, model, workload, "sweep", config.page_sizes):
            run.write_rows([*offline, *sweep_rows(run.samples)])
            advance(line)
    facts = measure(run.samples, workload)
    rules = page_rules(facts, config.largest_page)
    with counting("formulas", _repeats(config)) as advance:
        for line in _rounds(config, run, model, workload, "formulas", sorted({size for _, size in rules.values()})):
            advance(line)

    chosen = formula_rows(run.samples, rules)
    found = [*sweep_rows(run.samples), *chosen, *offline]
    said = [_cost(facts), *_claims(chosen)]
    for line in said:
        console.print(line, style="bold", markup=False, highlight=False)
    plots = {"page_size": speed_plot(found), "page_cost": cost_plot(run.samples), "page_waste": waste_plot(found)}
    ends = (min(config.page_sizes), max(config.page_sizes))
    maps = [_map(config, model, workload, size) for size in ends] if config.page_map else []
    notes = (*said, *NOTES, *busy_rounds(run.samples, "item", "round"))
    report.publish(run, config, found, plots=plots, notes=notes, maps=maps)


def _rounds(
    config: PageSize, run: Run, model: Any, workload: Workload, item: str, sizes: Sequence[int]
) -> Iterator[str]:
    """All rounds of some page sizes. A round that an interrupted run has begun is finished, as it has begun."""
    done = run.done("item", "round", "page_tokens")
    for number in range(_repeats(config)):
        load = watch()
        for size in sizes[:: -1 if number % 2 else 1]:  # back and forth, so that a drift favours no size
            if (item, number, size) in done:
                continue
            engine = _engine(config, model, workload, size)
            # Loads, allocates and compiles; its pages must not be found again.
            serve(engine, model, workload.cut(requests=2, prompt=64, new=4), salt="warm-up")
            served = serve(engine, model, workload, salt="timed")
            where = {"item": item, "round": number, "page_tokens": size}
            run.add({**where, **served, **memory(engine, model), **dataclasses.asdict(load)})
        own = [s for s in run.samples if (s["item"], s["round"]) == (item, number)]
        yield "tokens/s: " + "  ".join(f"{s['page_tokens']}: {s['new_tokens'] / s['seconds']:.0f}" for s in own)


def _repeats(config: PageSize) -> int:
    return config.repeats if config.limit is None else 1  # a smoke test


def _engine(config: PageSize, model: Any, workload: Workload, page_tokens: int) -> Engine:
    """An engine with room for all requests at once. One at a time, since each packs the weights for itself."""
    sized = dataclasses.replace(
        config.engine, page_tokens=page_tokens, page_policies={}, pool_tokens=workload.slots(page_tokens)
    )
    # Not a changed copy of ``config``, which refuses a text page, as it is not the user's to set there.
    return build.engine(Config(config.experiment, engine=sized), model, None)


def _map(config: PageSize, model: Any, workload: Workload, page_tokens: int) -> tuple[str, PageWatch]:
    """The pool while the workload is served in pages of one size."""
    engine = _engine(config, model, workload, page_tokens)
    shows = f"the workload in pages of {page_tokens} tokens"
    return shows, watched_pass(engine, lambda: serve(engine, model, workload, salt="watched"))


def page_rules(facts: Facts, largest: int) -> dict[str, tuple[float, int]]:
    """Name -> what the rule says in tokens, and the page that comes of it: rounded, clamped, or 30 % larger."""
    from octavo.core.policies.page_sqrt import QuotedPages, SqrtPages

    common = {"mean_tokens": facts.mean_tokens, "grain": GRAIN, "largest": largest}
    rules: dict[str, SqrtPages | QuotedPages] = {
        "sqrt": SqrtPages.from_bytes(facts.page_bytes, facts.token_bytes, **common),
        "quoted": QuotedPages(facts.token_bytes, facts.sequences, **common),
        "quoted in bytes": QuotedPages(facts.token_bytes, facts.sequences, calibration=1 / facts.token_bytes, **common),
    }
    found: dict[str, tuple[float, int]] = {}
    for name, rule in rules.items():
        raw, page = rule.optimum(facts.mean_tokens), rule.page_tokens(None)
        larger = max(page + GRAIN, round(LARGER * page / GRAIN) * GRAIN)
        found |= {name: (raw, page), f"{name} + 30 %": (LARGER * raw, larger)}
    return found


def sweep_rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a page size."""
    own = [s for s in samples if s["item"] == "sweep"]
    return [_row("fixed", [s for s in own if s["page_tokens"] == size]) for size in _sizes(own)]


def formula_rows(samples: Sequence[Sample], rules: Mapping[str, tuple[float, int]]) -> list[Row]:
    """One row a rule; changes compare a 30 % larger page with the rule's own, as medians over rounds."""
    own = [s for s in samples if s["item"] == "formulas"]
    found = []
    for name, (raw, page) in rules.items():
        row = _row(name, [s for s in own if s["page_tokens"] == page]) | {"formula_tokens": raw}
        if name.endswith(" + 30 %"):
            base = {s["round"]: s for s in own if s["page_tokens"] == rules[name.removesuffix(" + 30 %")][1]}
            pairs = [(base[s["round"]], s) for s in own if s["page_tokens"] == page]
            row["tokens_per_s_change_percent"] = _change([(b["seconds"], s["seconds"]) for b, s in pairs], inverse=True)
            row["step_p99_change_percent"] = _change([(b["step_p99_seconds"], s["step_p99_seconds"]) for b, s in pairs])
        found.append(row)
    return found


def _change(pairs: Sequence[tuple[float, float]], *, inverse: bool = False) -> float:
    """Median change in percent from the first of each pair to the second; of their inverses on request."""
    return 100 * (median(before / after if inverse else after / before for before, after in pairs) - 1)


def _row(policy: str, own: Sequence[Sample]) -> Row:
    speeds = [s["new_tokens"] / s["seconds"] for s in own]
    held = sum(s["held_slot_steps"] for s in own) or 1  # 0 if no step did nothing but decode
    return {
        "name": "octavo",
        "task": WORKLOAD,
        "policy": policy,
        "page_tokens": own[0]["page_tokens"],
        "requests": own[0]["requests"],
        "new_tokens": own[0]["new_tokens"],
        "rounds": len(own),
        "pages_per_sequence": own[0]["pages"] / own[0]["requests"],
        "waste_percent": 100 * sum(s["waste_slot_steps"] for s in own) / held,
        "predicted_waste_percent": 100 * sum(s["predicted_waste_slot_steps"] for s in own) / held,
        "tokens_per_s": median(speeds),
        "tokens_per_s_min": min(speeds),
        "tokens_per_s_max": max(speeds),
        "host_ms_per_step": 1e3 * median(s["host_seconds"] / s["steps"] for s in own),
        "step_p99_ms": 1e3 * median(s["step_p99_seconds"] for s in own),
        "free_cores_min": min(s["free_cores"] for s in own),
    }


def _sizes(samples: Sequence[Sample]) -> list[int]:
    return sorted({s["page_tokens"] for s in samples})


def _cost(facts: Facts) -> str:
    if not facts.page_seconds:
        return "the host's time a page is lost in noise, so that m is the metadata alone: take the figures again"
    return (
        f"a page costs the host {facts.page_seconds * 1e6:.1f} us, m = {facts.page_bytes:,.0f} bytes; a token is "
        f"b = {facts.token_bytes:,} bytes, L = {facts.mean_tokens:.0f} tokens, N = {facts.sequences} sequences"
    )


def _claims(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row['policy']}, {row['page_tokens']} tokens: {row['tokens_per_s_change_percent']:+.1f} % tokens/s and "
        f"{row['step_p99_change_percent']:+.1f} % p99 step (claimed: +19 % and -31 %)"
        for row in rows
        if "tokens_per_s_change_percent" in row
    ]


def speed_plot(rows: Sequence[Row]) -> Figure:
    """Tokens/s and p99 of decode steps by page size; stars are the rules' pages, in rounds of their own."""
    from matplotlib.figure import Figure

    swept = [row for row in rows if row["policy"] == "fixed" and row["name"] == "octavo"]
    said: dict[int, list[str]] = {}
    for row in rows:
        if "formula_tokens" in row:
            said.setdefault(row["page_tokens"], []).append(row["policy"])
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2), ("tokens_per_s", "step_p99_ms"), ("new tokens a second", "p99 decode step (ms)"),
        strict=True,
    ):  # fmt: skip
        axes.plot([row["page_tokens"] for row in swept], [row[key] for row in swept], "o-", label="fixed")
        for number, (page, names) in enumerate(said.items(), 1):
            value = next(row[key] for row in rows if row["policy"] in names)
            axes.plot(page, value, "*", color=f"C{number}", markersize=12, label=", ".join(names))
        axes.set(ylabel=label, ylim=(0, None))
        _page_axis(axes, [*(row["page_tokens"] for row in swept), *said])
    figure.axes[0].legend(fontsize="small")
    return figure


def cost_plot(samples: Sequence[Sample]) -> Figure:
    """Host seconds of a pass by its pages: every round as a dot, and the line whose slope is what a page costs."""
    from matplotlib.figure import Figure

    own = [s for s in samples if s["item"] == "sweep"]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([s["pages"] for s in own], [s["host_seconds"] for s in own], "o", alpha=0.6)
    pages, seconds = map(np.array, zip(*host_seconds(own), strict=True))
    if len(pages) > 1:
        axes.plot(pages, np.polyval(np.polyfit(pages, seconds, 1), pages))
    axes.set(xlabel="pages of the workload", ylabel="host seconds", ylim=(0, None))
    return figure


def waste_plot(rows: Sequence[Row]) -> Figure:
    """Waste by page size: measured as dots, predicted as lines, one colour a task."""
    from matplotlib.figure import Figure

    fixed = [row for row in rows if row["policy"] == "fixed"]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, task in enumerate(dict.fromkeys(row["task"] for row in fixed)):
        own = [row for row in fixed if row["task"] == task]
        sizes = [row["page_tokens"] for row in own]
        axes.plot(sizes, [row["predicted_waste_percent"] for row in own], color=f"C{number}")
        axes.plot(sizes, [row["waste_percent"] for row in own], "o", color=f"C{number}", label=task)
    axes.set(ylabel="empty slots (%)", ylim=(0, None))
    _page_axis(axes, [row["page_tokens"] for row in fixed])
    axes.legend(fontsize="small")
    return figure


def _page_axis(axes: Axes, sizes: Sequence[int]) -> None:
    ticks = sorted(set(sizes))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.set_xlabel("tokens of a page")
