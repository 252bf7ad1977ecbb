"""Figures of drafts that are verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

Row = Mapping[str, Any]


def acceptance_by_context(rows: Sequence[Row]) -> Figure:
    """Drafts that were right, by context; a panel a kind of document, a line a drafter."""
    drawn = [row for row in rows if "acceptance" in row]
    tasks = list(dict.fromkeys(row["task"] for row in drawn)) or ["nothing was drafted"]
    figure = Figure(figsize=(1.5 + 4.5 * len(tasks), 4.2), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for method in dict.fromkeys(row["method"] for row in drawn):
            own = [row for row in drawn if (row["task"], row["method"]) == (task, method)]
            values = [row["acceptance"] for row in own]
            error = [
                [row["acceptance"] - row["acceptance_ci"][0] for row in own],
                [row["acceptance_ci"][1] - row["acceptance"] for row in own],
            ]
            axes.errorbar([row["length"] for row in own], values, yerr=error, fmt="o-", capsize=3, label=method)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("drafts that were right (%, 95 % interval)")
        axes.set_ylim(0, 103)
        axes.set_title(task)
        axes.grid(alpha=0.3)
    if drawn:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def speed_up_by_acceptance(rows: Sequence[Row]) -> Figure:
    """Measured speed-up over dense (points) and what the steps' times predict (lines), by forced acceptance; a panel a
    shape."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(1.5 + 4.5 * len(tasks), 4.2), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        own = [row for row in rows if row["task"] == task and row.get("forced_acceptance") is not None]
        for number, label in enumerate(dict.fromkeys(f"{row['method']} x {row['drafts']}" for row in own)):
            line = [row for row in own if f"{row['method']} x {row['drafts']}" == label]
            forced = [row["forced_acceptance"] for row in line]
            axes.plot(forced, [row["predicted_speed_up"] for row in line], "-", color=f"C{number}", alpha=0.5)
            axes.plot(forced, [row["speed_up"] for row in line], "o", color=f"C{number}", label=label)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xlabel("forced acceptance")
        axes.set_ylabel("x dense tokens/s (line: predicted)")
        axes.set_ylim(bottom=0)
        axes.set_title(task)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figure
