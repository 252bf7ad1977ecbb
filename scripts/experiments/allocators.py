"""What does each allocator cost, and how do pages of one or two sizes come to lie in its pool?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.scripts import allocator_traffic as traffic
from octavo.scripts import report
from octavo.scripts.allocator_traffic import MIXES, VLLM, Octavo, Traffic, Waste
from octavo.scripts.machine_load import watch
from octavo.scripts.progress import console, counting
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Allocators

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]

POOL_PAGES = 65_536
"""Pages of the pool in the two tasks that vLLM takes part in."""

SMOKE_STEPS, SMOKE_CALLS = 64, 4  # if only some sequences are run

NOTES = (
    "An operation is one page allocated or released, reference counts kept. p99: of the calls of one step together.",
    "vllm_ratio and linear_ratio: how many times as fast as they, median over the rounds, in which all take turns.",
    "split: not one run of units. External waste: free units in no run that holds a whole page of the largest size.",
)


@dataclass(frozen=True)
class Task:
    """One piece of traffic. mix: a key of MIXES. fill: percent of the pool that is held at the peak; None is a pool of
    ``POOL_PAGES``. bulk: pages by the thousand instead of sequences that grow."""

    name: str
    mix: str = "1"
    fill: int | None = None
    bulk: bool = False

    def total_units(self, load: Traffic) -> int:
        return POOL_PAGES if self.fill is None else -(-load.peak_units * 100 // self.fill)


def run(config: Allocators, run: Run) -> None:
    """One sample a task, round and allocator; one row a task and allocator.

    The traffic of a task is drawn first, the same for all. Then the allocators, and vLLM's pool where every page is
    one unit and the pool is large, take turns, round after round, in one process. The load is noted before each round.
    """
    tasks = [Task("growth"), Task("bulk", bulk=True)]
    tasks += [Task(f"{mix} at {fill} %", mix, fill) for mix in config.mixes for fill in config.fills]
    steps = config.steps if config.limit is None else min(config.steps, SMOKE_STEPS)
    sequences = config.sequences if config.limit is None else min(config.sequences, config.limit)
    draw = cache(lambda mix: traffic.traffic(MIXES[mix], sequences, steps, config.seed))
    missing = traffic.vllm_is_missing() if VLLM in config.rivals else None
    rivals = [] if missing else config.rivals

    done = run.done("item", "round", "name")
    rounds = [(task, number) for task in tasks for number in range(config.repeats)]
    with counting(config.experiment, len(rounds)) as advance:
        for task, number in rounds:
            names = [*config.allocators, *(rivals if task.fill is None else [])]
            if any((task.name, number, name) not in done for name in names):
                # Handed in together: half a round in one process and half in another would be no comparison.
                for sample in _round(task, number, names, draw(task.mix), config):
                    if (task.name, number, sample["name"]) not in done:
                        run.add(sample)
                run.write_rows(rows(run.samples))
            own = [s for s in run.samples if (s["item"], s["round"]) == (task.name, number)]
            advance(f"{task.name}: " + "  ".join(f"{s['name']} {_speed(s) / 1e6:.2f} M/s" for s in own))

    found = rows(run.samples)
    for line in _ratios(found):
        console.print(line, style="bold", markup=False, highlight=False)
    notes = [*NOTES, *([f"{VLLM} did not run: {missing}."] if missing else [])]
    figures = {"speed": speed(found)} | ({"layout": layout(found)} if config.mixes and config.fills else {})
    report.publish(run, config, found, plots=figures, notes=notes)


def _round(task: Task, number: int, names: Sequence[str], load: Traffic, config: Allocators) -> list[Sample]:
    machine = dataclasses.asdict(watch())
    return [
        {"item": task.name, "round": number, "name": name, **_outing(task, name, load, config), **machine}
        for name in names
    ]


def _outing(task: Task, name: str, load: Traffic, config: Allocators) -> Sample:
    who = traffic.contender(name, task.total_units(load))
    waste = None
    if task.bulk:
        outing = traffic.bulk(who) if config.limit is None else traffic.bulk(who, config.limit, SMOKE_CALLS)
    else:
        if isinstance(who, Octavo) and task.fill is not None:
            waste = Waste(who.allocator, load)
        outing = traffic.replay(who, load, waste.look if waste else None)
    return {
        "mix": task.mix,
        "fill": task.fill,
        "total_units": task.total_units(load),
        "operations": outing.operations,
        "seconds": sum(outing.call_seconds),
        "p99_us": 1e6 * float(np.percentile(outing.call_seconds, 99)),
        **(waste.found() if waste else {}),
    }


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a task and allocator: medians over rounds for what is timed; where units lie is the same in each.

    ``run_units_mean`` is the mean length of the runs that calls were given.
    """
    found = []
    for task, name in dict.fromkeys((sample["item"], sample["name"]) for sample in samples):
        own = [s for s in samples if (s["item"], s["name"]) == (task, name)]
        speeds = {s["round"]: _speed(s) for s in own}
        row: Row = {"name": name, "task": task, **{key: own[0][key] for key in ("mix", "fill", "total_units")}}
        row |= {
            "rounds": len(own),
            "operations_per_s": median(speeds.values()),
            "operations_per_s_min": min(speeds.values()),
            "operations_per_s_max": max(speeds.values()),
            "p99_us": median(s["p99_us"] for s in own),
        }
        for other in (VLLM, "linear"):
            theirs = {s["round"]: _speed(s) for s in samples if (s["item"], s["name"]) == (task, other)}
            ratios = [speeds[n] / theirs[n] for n in speeds if n in theirs]
            row[f"{other}_ratio"] = median(ratios) if ratios else None
        row |= _layout(own[0])
        row["free_cores_min"] = min(s["free_cores"] for s in own)
        found.append(row)
    return found


def _layout(sample: Mapping[str, Any]) -> Row:
    if "pages" not in sample:
        return {}
    return {
        "split_pages_percent": 100 * sample["split_pages"] / sample["pages"],
        "split_calls_percent": 100 * sample["split_calls"] / sample["calls"],
        "run_units_mean": sample["units"] / sample["runs"],
        "external_waste_percent": 100 * sample["external_waste_units"] / max(1, sample["free_units"]),
        "internal_waste_units": sample["internal_waste_units"],
    }


def _speed(sample: Mapping[str, Any]) -> float:
    """Operations a second."""
    speed: float = sample["operations"] / sample["seconds"]
    return speed


def _ratios(found: Sequence[Row]) -> list[str]:
    """What a reader wants to know first."""
    stacks = [row for row in found if row["name"] == "stack" and row["vllm_ratio"] is not None]
    return [f"{row['task']}: stack is {row['vllm_ratio']:.2f}x as fast as vLLM's BlockPool" for row in stacks]


def speed(found: Sequence[Row]) -> Figure:
    """Operations a second of growth and of bulk, on a logarithmic axis; whiskers from the slowest round to the
    fastest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, task in zip(figure.subplots(1, 2), ("growth", "bulk"), strict=True):
        own = [row for row in found if row["task"] == task]
        middle, low, high = (
            np.array([row[f"operations_per_s{end}"] for row in own]) / 1e6 for end in ("", "_min", "_max")
        )
        colours = [f"C{number}" for number in range(len(own))]
        drawn = axes.bar(
            [row["name"] for row in own], middle, yerr=[middle - low, high - middle], color=colours, capsize=4
        )
        axes.bar_label(drawn, fmt="%.1f", label_type="center")
        axes.set_yscale("log")
        axes.set_title(task, fontsize="medium")
        axes.set_ylabel("million pages a second")
        axes.tick_params(axis="x", rotation=30)
    return figure


def layout(found: Sequence[Row]) -> Figure:
    """Against fill, a column a mix: split pages, length of runs, external waste, and the time of a step's calls."""
    from matplotlib.figure import Figure

    measures = {
        "split_pages_percent": "pages not in one run (%)",
        "run_units_mean": "mean run of a call (units)",
        "external_waste_percent": "external waste (% of free)",
        "p99_us": "p99 of a step's calls (µs)",
    }
    filled = [row for row in found if row["fill"] is not None]
    mixes = list(dict.fromkeys(row["mix"] for row in filled))
    names = list(dict.fromkeys(row["name"] for row in filled))
    figure = Figure(figsize=(2 + 4 * len(mixes), 3 * len(measures)), layout="constrained")
    grid = figure.subplots(len(measures), len(mixes), squeeze=False, sharex=True)
    for line, (key, label) in zip(grid, measures.items(), strict=True):
        for axes, mix in zip(line, mixes, strict=True):
            _lines(axes, [row for row in filled if row["mix"] == mix], names, key)
            axes.set_title(f"page sizes {mix}", fontsize="medium")
        line[0].set_ylabel(label)
    for axes in grid[-1]:
        axes.set_xlabel("pool held at the peak (%)")
    figure.legend(*grid[0][0].get_legend_handles_labels(), ncols=6, loc="outside upper center", frameon=False)
    return figure


def _lines(axes: Axes, own: Sequence[Row], names: Sequence[str], key: str) -> None:
    for number, name in enumerate(names):
        points = sorted((row["fill"], row[key]) for row in own if row["name"] == name)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=f"C{number}", label=name)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
