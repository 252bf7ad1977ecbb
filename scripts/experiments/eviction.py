"""Which idle page should go first: hit rates of all policies by pool size, with Belady as the bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.core.inspection.trace import Trace
from octavo.scripts import report, traces
from octavo.scripts.arrivals import Bursty, Lengths, Poisson, PrefixTree, Traffic
from octavo.scripts.paged_trace import PagedTrace
from octavo.scripts.progress import console, counting
from octavo.scripts.replay import BELADY, replay
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Eviction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

ARRIVALS: dict[str, Poisson | Bursty] = {
    "poisson": Poisson(2.0),
    "bursty": Bursty(calm_per_s=0.5, burst_per_s=8.0, calm_s=20.0, burst_s=5.0),
}
"""Two conversations a second on average, either way."""

NOTES = (
    "The pool holds what must be held at once, and so many per cent of the pages that an endless one would keep.",
    "hit rate: tokens found in the prefix cache, of those looked up by requests as they begin; a failure is a request "
    "that did not fit.",
    "belady knows the trace and evicts the page that is looked for last; with chains of pages it is a very good bound, "
    "and no proven one. cost prices attention as the embedded model would.",
)


def run(config: Eviction, run: Run) -> None:
    """One sample a trace, room for idle pages and policy; one row a trace and room.

    Each trace is replayed once on a pool that never evicts, which says how many units are held at most, and how many
    would be kept. Then every policy replays it on pools in between.
    """
    names = config.traces[: config.limit]
    done = run.done("item", "cache_percent", "eviction")
    turns = len(names) * len(config.cache_percent) * len(config.evictions)
    with counting(config.experiment, turns, len(done)) as advance:
        for name in names:
            paged = PagedTrace(load(name, config), {"text": config.engine.page_tokens})
            ample = replay(paged, pool_tokens=room(paged), allocator=config.engine.allocator)
            for percent in config.cache_percent:
                units = ample.units_held_peak + -(-(ample.units_used_peak - ample.units_held_peak) * percent // 100)
                for eviction in config.evictions:
                    if (name, percent, eviction) in done:
                        continue
                    sample = measure(paged, units * paged.unit_tokens, config.engine.allocator, eviction)
                    run.add({"item": name, "cache_percent": percent, "eviction": eviction, **sample})
                    run.write_rows(rows(run.samples))
                    advance(f"{name}, {percent} % kept: {eviction} finds {sample['hit_rate_percent']:.1f} %")

    found = rows(run.samples)
    for line in findings(found, config.evictions):
        console.print(line, style="bold", markup=False, highlight=False)
    report.publish(run, config, found, plots={"eviction": figure(run.samples)}, notes=NOTES)


def load(name: str, config: Eviction) -> Trace:
    """A shipped trace, or conversations of three turns on average whose system prompts share their beginnings; a fifth
    of them is urgent."""
    if name in traces.SHIPPED:
        return traces.load_shipped(name)
    prefixes = PrefixTree(depth=3, branches=4, tokens=128)
    traffic = Traffic(
        config.requests,
        ARRIVALS[name],
        Lengths(200),
        Lengths(150, most=1024),
        prefixes,
        turns=3,
        think_s=20,
        urgent=0.2,
    )
    return traffic.trace(config.seed)


def room(paged: PagedTrace) -> int:
    """Slots that hold every sequence by itself."""
    return int(paged.trace.lengths().sum()) + paged.trace.sequences * paged.page_tokens


def measure(paged: PagedTrace, pool_tokens: int, allocator: str, eviction: str) -> Sample:
    result = replay(paged, pool_tokens=pool_tokens, allocator=allocator, eviction=eviction)
    return {
        "pool_tokens": result.units_total * paged.unit_tokens,
        "requests": paged.trace.sequences,
        "hit_tokens": result.hit_tokens,
        "query_tokens": result.query_tokens,
        "hit_rate_percent": 100 * result.hit_rate,
        "evictions": result.evictions,
        "failures": result.failures,
    }


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a trace and room for idle pages, with a hit rate a policy; ``best`` is the best that sees no future."""
    found = []
    for name, percent in dict.fromkeys((s["item"], s["cache_percent"]) for s in samples):
        own = [s for s in samples if (s["item"], s["cache_percent"]) == (name, percent)]
        online = [s for s in own if s["eviction"] != BELADY]
        row: Row = {"name": "replay", "task": name, "cache_percent": percent, "pool_tokens": own[0]["pool_tokens"]}
        row |= {f"{s['eviction']}_hit_rate_percent": s["hit_rate_percent"] for s in own}
        row |= {"best": max(online, key=lambda s: s["hit_tokens"])["eviction"] if online else None}
        row |= {"evictions": sum(s["evictions"] for s in own), "failures": sum(s["failures"] for s in own)}
        found.append(row)
    return found


def findings(found: Sequence[Row], evictions: Sequence[str]) -> list[str]:
    """Of each trace: the policies by their mean hit rate over the pool sizes."""
    lines = []
    for name in dict.fromkeys(row["task"] for row in found):
        own = [row for row in found if row["task"] == name]
        means = {e: sum(row[f"{e}_hit_rate_percent"] for row in own) / len(own) for e in evictions}
        order = sorted(means, key=lambda eviction: -means[eviction])
        lines.append(f"{name}: " + ", ".join(f"{eviction} {means[eviction]:.1f} %" for eviction in order))
    return lines


def figure(samples: Sequence[Sample]) -> Figure:
    """Hit rate by pool size, a panel a trace and a line a policy."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(s["item"] for s in samples))
    drawn = Figure(figsize=(5 * len(names), 4.2), layout="constrained")
    for axes, name in zip(drawn.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        own = [s for s in samples if s["item"] == name]
        for eviction in dict.fromkeys(s["eviction"] for s in own):
            line = sorted((s["pool_tokens"], s["hit_rate_percent"]) for s in own if s["eviction"] == eviction)
            style = {"color": "black", "linestyle": "--"} if eviction == BELADY else {"marker": "o", "alpha": 0.8}
            axes.plot(*zip(*line, strict=True), label=eviction, **style)
        axes.set(title=name, xscale="log", xlabel="tokens of the pool", ylabel="tokens found (%)", ylim=(0, 100))
    drawn.axes[0].legend(fontsize="small", loc="lower right")
    return drawn
