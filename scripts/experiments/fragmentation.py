"""What does it waste to reserve memory for each request in one piece, and what do pages waste?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core.inspection.trace import Trace
from octavo.scripts import report
from octavo.scripts.arrivals import Poisson, Traffic, mix
from octavo.scripts.paged_trace import PagedTrace
from octavo.scripts.progress import console, counting
from octavo.scripts.replay import replay
from octavo.scripts.reservations import RULES, largest_batch, reserve
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Fragmentation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

LONGEST = "longest"
PAGED = "paged"
RATE_PER_S = 2.0

NOTES = (
    "waste is empty slots in % of the slots held, over all steps; predicted by the closed form, -n mod P a request. "
    "utilisation is used over held slots, weighted by time.",
    "contiguous servers reserve when a request begins: for the longest that may come, for the next power of two of the "
    "length that it will have, or for exactly that length, which nobody knows.",
    "largest batch: requests in their order of arrival that fit into memory_tokens slots at their full length.",
)


def run(config: Fragmentation, run: Run) -> None:
    """One sample and one row a mix of lengths and way to hold memory, all on the same Poisson arrivals; nothing is
    shared."""
    done = run.done("item", "policy", "page_tokens")
    ways = [*((rule, 0) for rule in RULES), *((PAGED, size) for size in config.page_sizes)]
    with counting(config.experiment, len(config.mixes) * len(ways), len(done)) as advance:
        for name in config.mixes:
            trace = traffic(name, config)
            for policy, page_tokens in ways:
                if (name, policy, page_tokens) in done:
                    continue
                measured = paged(trace, page_tokens, config) if policy == PAGED else contiguous(trace, policy, config)
                run.add({"item": name, "policy": policy, "page_tokens": page_tokens, **measured})
                run.write_rows(rows(run.samples))
                advance(f"{name}, {policy}: {measured['utilisation_percent']:.1f} % used")

    found = rows(run.samples)
    for line in findings(found):
        console.print(line, style="bold", markup=False, highlight=False)
    report.publish(run, config, found, plots={"fragmentation": figure(found)}, notes=NOTES)


def traffic(name: str, config: Fragmentation) -> Trace:
    prompts, answers = mix(name, config.longest)
    requests = min(config.requests, 10 * config.limit) if config.limit else config.requests
    return Traffic(requests, Poisson(RATE_PER_S), prompts, answers).trace(config.seed)


def paged(trace: Trace, page_tokens: int, config: Fragmentation) -> Sample:
    """Pages of one size, in a pool with room for all."""
    lengths = trace.lengths()
    slots = -(-lengths // page_tokens) * page_tokens
    laid_out = PagedTrace(trace, {"text": page_tokens})
    result = replay(laid_out, pool_tokens=int(slots.sum()), allocator=config.engine.allocator)
    return {
        "requests": trace.sequences,
        "held_slot_steps": result.held_slot_steps,
        "waste_slot_steps": result.waste_slot_steps,
        "predicted_waste_slot_steps": result.predicted_waste_slot_steps,
        "utilisation_percent": 100 * result.utilisation,
        "largest_batch": largest_batch(slots, config.memory_tokens),
    }


def contiguous(trace: Trace, rule: str, config: Fragmentation) -> Sample:
    """One reservation a request."""
    result = reserve(trace, rule, config.longest)
    slots = np.array([RULES[rule](tokens, config.longest) for tokens in trace.lengths().tolist()])
    return {
        "requests": trace.sequences,
        "held_slot_steps": result.held_slot_steps,
        "waste_slot_steps": result.waste_slot_steps,
        "predicted_waste_slot_steps": None,
        "utilisation_percent": 100 * result.utilisation,
        "largest_batch": largest_batch(slots, config.memory_tokens),
    }


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a sample; ``batch_ratio`` compares with reservations for the longest request."""
    base = {s["item"]: s["largest_batch"] for s in samples if s["policy"] == LONGEST}
    found = []
    for s in samples:
        predicted = s["predicted_waste_slot_steps"]
        found.append(
            {
                "name": "octavo" if s["policy"] == PAGED else "contiguous",
                "task": s["item"],
                "policy": s["policy"],
                "page_tokens": s["page_tokens"] or None,
                "requests": s["requests"],
                "waste_percent": 100 * s["waste_slot_steps"] / s["held_slot_steps"],
                "predicted_waste_percent": None if predicted is None else 100 * predicted / s["held_slot_steps"],
                "utilisation_percent": s["utilisation_percent"],
                "largest_batch": s["largest_batch"],
                "batch_ratio": s["largest_batch"] / base[s["item"]],
            }
        )
    return found


def findings(found: Sequence[Row]) -> list[str]:
    """Of each mix: reservations for the longest request against pages of 16, or the nearest size."""
    lines = []
    for row in found:
        if row["policy"] == LONGEST:
            pages = [r for r in found if r["task"] == row["task"] and r["policy"] == PAGED]
            near = min(pages, key=lambda r: abs(r["page_tokens"] - 16))
            lines.append(
                f"{row['task']}: reservations waste {row['waste_percent']:.1f} %, pages of {near['page_tokens']} "
                f"{near['waste_percent']:.1f} %, and {near['batch_ratio']:.1f}x the batch fits "
                "(claimed: 32-38 %, 2.1 % and 7.8x)"
            )
    return lines


def figure(found: Sequence[Row]) -> Figure:
    """Left: empty slots of each way to hold memory. Right: the largest batch. One colour a mix."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 4.2), layout="constrained")
    tasks = list(dict.fromkeys(row["task"] for row in found))
    width = 0.8 / len(tasks)
    for axes, key, label in zip(
        drawn.subplots(1, 2), ("waste_percent", "largest_batch"), ("empty slots (%)", "requests at once"), strict=True
    ):
        for number, task in enumerate(tasks):
            own = [row for row in found if row["task"] == task]
            places = [at + (number - (len(tasks) - 1) / 2) * width for at in range(len(own))]
            axes.bar(places, [row[key] for row in own], width, label=task)
            names = [f"pages of {row['page_tokens']}" if row["policy"] == PAGED else row["policy"] for row in own]
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axes.set_ylabel(label)
    drawn.axes[0].legend(fontsize="small")
    return drawn
