"""Figures of waiting times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from octavo.scripts.latency_rows import gaps

Row = Mapping[str, Any]

PANELS = (("ttft", "ms", "time to first token"), ("itl", "ms", "between two tokens"), ("e2e", "s", "whole request"))


def who(name: str, method: str) -> str:
    """A contender as figures and lines call it: by its name, and by its method unless that is dense."""
    return name if method == "dense" else f"{name} {method}"


def percentiles_over_rate(rows: Sequence[Row]) -> Figure:
    """The median (line) and the 99th percentile (dashes) of each waiting time over the rates, by contender."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    rates = list(dict.fromkeys(row["task"] for row in rows))
    names = list(dict.fromkeys(map(_label, rows)))
    for axes, (what, unit, title) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for number, name in enumerate(names):
            own = [row for row in rows if _label(row) == name]
            places = [rates.index(row["task"]) for row in own]
            for percent, style in ((50, "o-"), (99, "o--")):
                heights = [np.nan if (v := row[f"{what}_p{percent}_{unit}"]) is None else v for row in own]
                axes.plot(places, heights, style, color=f"C{number}", label=name if percent == 50 else None)
        axes.set_xticks(range(len(rates)), rates)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_title(f"{title}: p50, and p99 dashed", fontsize="medium")
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False)
    return figure


def gaps_cdf(samples: Sequence[Row]) -> Figure:
    """The share of inter-token times up to a length, a panel a rate; the slow end is drawn out."""
    rates = list(dict.fromkeys(sample["item"] for sample in samples))
    names = list(dict.fromkeys(map(_label, samples)))
    figure = Figure(figsize=(1 + 4 * len(rates), 4), layout="constrained")
    for axes, rate in zip(figure.subplots(1, len(rates), squeeze=False)[0], rates, strict=True):
        for sample in (s for s in samples if s["item"] == rate):
            between = 1e3 * np.sort(gaps(sample["requests"]))
            above = 1 - np.arange(len(between)) / max(1, len(between))
            name = _label(sample)
            axes.step(between, above, where="post", color=f"C{names.index(name)}", label=name)
        axes.set_xscale("symlog", linthresh=0.1)
        axes.set_yscale("log")
        axes.invert_yaxis()
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * (1 - share):.6g} %")
        axes.set_title(rate, fontsize="medium")
        axes.set_xlabel("ms between two tokens")
        axes.set_ylabel("share that is shorter")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False)
    return figure


def _label(row: Row) -> str:
    return who(row["name"], row["method"])
