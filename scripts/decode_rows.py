"""What a race of decode steps has found: rows from samples, and their figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from octavo.scripts.decode_floor import Floor
from octavo.scripts.decode_shapes import StepShape
from octavo.scripts.run import Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

MIXED = "mixed"
"""Item of the samples of the batch; all others are of shapes, but for the first, which is the floor."""


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a shape, or batch ``mixed``, and contender: medians over its rounds, beside the floor of the run."""
    floor = floor_of(samples)
    keys = dict.fromkeys((s["item"], s["name"], s["execution"]) for s in samples[1:])
    order = {item: place for place, item in enumerate(dict.fromkeys(s["item"] for s in samples[1:]))}
    found = []
    for item, name, execution in sorted(keys, key=lambda key: order[key[0]]):
        own = [s for s in samples[1:] if (s["item"], s["name"], s["execution"]) == (item, name, execution)]
        figures = _batch_row(own, floor) if item == MIXED else _step_row(own, floor)
        found.append({"name": name, "execution": execution or None, "task": item, "rounds": len(own), **figures})
    return found


def _step_row(own: Sequence[Sample], floor: Floor) -> Row:
    first = own[0]
    shape = StepShape(first["batch"], first["context"], first["new_tokens"])
    steps = [sample["step_s"] for sample in own]
    step_s, floor_s = median(steps), floor.step_s(shape.batch, shape.kv_tokens)
    hosts = [(sample["host_s"], sample["wait_s"]) for sample in own if sample["host_s"] is not None]
    return {
        "batch": shape.batch,
        "context": shape.context,
        "floor_ms": 1e3 * floor_s,
        "byte_floor_ms": 1e3 * floor.byte_s(shape.kv_tokens),
        "percent_of_floor": 100 * floor_s / step_s,
        "ms_per_step": 1e3 * step_s,
        "ms_per_step_min": 1e3 * min(steps),
        "ms_per_step_max": 1e3 * max(steps),
        "tokens_per_s": shape.batch / step_s,
        "prefill_tokens_per_s": shape.batch * shape.context / median(sample["prefill_s"] for sample in own),
        "host_ms_per_step": 1e3 * median(host for host, _ in hosts) if hosts else None,
        "wait_ms_per_step": 1e3 * median(wait for _, wait in hosts) if hosts else None,
        "device_bytes_peak": max(
            (s["device_bytes_peak"] for s in own if s["device_bytes_peak"] is not None), default=None
        ),
    }


def _batch_row(own: Sequence[Sample], floor: Floor) -> Row:
    prompts, new = own[0]["prompt_lengths"], own[0]["new_lengths"]
    seconds, ceiling = median(sample["seconds"] for sample in own), sum(new) / floor.batch_s(prompts, new)
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(prompts),
        "new_tokens": sum(new),
        "ceiling_tokens_per_s": ceiling,
        "percent_of_ceiling": 100 * sum(new) / seconds / ceiling,
        "tokens_per_s": sum(new) / seconds,
        "seconds": seconds,
    }


def bars(rows: Sequence[Row]) -> Figure:
    """Milliseconds a step of every contender, shape by shape, with a line at the shape's floor; whiskers reach from the
    fastest round to the slowest."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    names = list(dict.fromkeys(_label(row) for row in rows))
    figure = Figure(figsize=(2 + 2.2 * len(tasks), 4), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        own = [row for row in rows if _label(row) == name]
        places = [tasks.index(row["task"]) + (number - (len(names) - 1) / 2) * width for row in own]
        heights = [row["ms_per_step"] for row in own]
        below = [row["ms_per_step"] - row["ms_per_step_min"] for row in own]
        above = [row["ms_per_step_max"] - row["ms_per_step"] for row in own]
        axes.bar_label(
            axes.bar(places, heights, width, yerr=[below, above], capsize=3, label=name), fmt="%.3g", fontsize=7
        )
    for place, task in enumerate(tasks):
        floor = next(row["floor_ms"] for row in rows if row["task"] == task)
        axes.hlines(floor, place - 0.45, place + 0.45, color="black", label="floor" if place == 0 else None)
    axes.set_xticks(range(len(tasks)), [task.replace(", ", "\n") for task in tasks])
    axes.set_ylabel("ms a decode step")
    axes.legend(ncols=len(names) + 1, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def _label(row: Row) -> str:
    return f"{row['name']} {row['execution'] or ''}".rstrip()


def floor_of(samples: Sequence[Sample]) -> Floor:
    """What the first sample of a run says."""
    return Floor(**{field.name: samples[0][field.name] for field in dataclasses.fields(Floor)})
