"""Figures of a comparison of methods. Drawn without pyplot, whose global state two jobs of a process would share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Row = Mapping[str, Any]

LENGTH_EDGES = (0, 2000, 4000, 7500, 1 << 30)
"""Context lengths, in tokens, that ``by_length`` tells apart."""

MARKERS = "osD^v"


def pareto(rows: Sequence[Row], quality: str = "edit_similarity") -> Figure:
    """Quality against the bytes that a decoded token reads, what was read to choose included."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, row in enumerate(rows):
        megabytes = (row["kv_bytes_per_token"] + row.get("digest_bytes_per_token", 0)) / 1e6
        low, high = row.get(f"{quality}_ci") or (row[quality], row[quality])
        error = [[row[quality] - low], [high - row[quality]]]
        style = {"fmt": "o", "color": f"C{number}", "capsize": 3, "alpha": 0.9}
        axes.errorbar(megabytes, row[quality], yerr=error, label=row["method"], **style)
    axes.set_ylabel(f"{quality.replace('_', ' ')} (points, 95 % interval)")
    _over_bytes(axes)
    _legend(axes, len(rows))
    return figure


def by_level(rows: Sequence[Row], quality: str) -> Figure:
    """Quality against the bytes that a decoded token reads, a line a composition over its levels, and beside it
    perplexity, where there is one: it tells methods apart on fewer items. What ``oracle`` reads to choose is left out,
    so that it is a bar (dashed); dense is a line over all bytes."""
    shown = [row for row in rows if row["kv_bytes_per_token"] is not None]
    measures = [key for key in (quality, "perplexity") if shown and all(row.get(key) is not None for row in shown)]
    figure = Figure(figsize=(3 + 5.5 * len(measures), 5.5), layout="constrained")
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for axes, key in zip(panels, measures, strict=True):
        _levels(axes, shown, key)
        _over_bytes(axes)
    panels[0].set_ylabel(f"{quality.replace('_', ' ')} (points, 95 % interval)")
    if measures[1:]:
        panels[1].set_yscale("log")
        panels[1].set_ylabel("perplexity (95 % interval)")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    return figure


def _over_bytes(axes: Axes) -> None:
    axes.set_xlabel("MB read a decoded token (K, V and what is read to choose)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)


def _levels(axes: Axes, rows: Sequence[Row], key: str) -> None:
    """Lines of ``by_level`` for one measure. More than ten compositions share colours, and not their markers."""
    for number, name in enumerate(dict.fromkeys(row["composition"] for row in rows)):
        own = [row for row in rows if row["composition"] == name]
        bar = name in ("oracle", "random")
        choosing = 0 if name == "oracle" else 1
        places = [(row["kv_bytes_per_token"] + choosing * row["digest_bytes_per_token"]) / 1e6 for row in own]
        values = [row[key] for row in own]
        if "level_percent" not in own[0]:
            axes.axhline(values[0], color="0.4", linewidth=1, label=name)
            continue
        colour = "black" if bar else f"C{number % 10}"
        ends = [row.get(f"{key}_ci") or (row[key], row[key]) for row in own]
        axes.vlines(places, *zip(*ends, strict=True), color=colour, alpha=0.25, linewidth=1)
        marker = "x" if name == "random" else "+" if bar else MARKERS[number // 10 % len(MARKERS)]
        line = "--" if bar else "-"
        axes.plot(places, values, line, marker=marker, color=colour, label=name, alpha=0.8, markersize=5, linewidth=1)


def by_length(samples: Sequence[Row], methods: Sequence[str], quality: str = "edit_similarity") -> Figure:
    """Mean quality by the length of the context, methods side by side; the number of items below each group."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    bins = list(pairwise(LENGTH_EDGES))
    inside = [[s for s in samples if low <= s["prompt_tokens"] < high] for low, high in bins]
    used = [(bounds, members) for bounds, members in zip(bins, inside, strict=True) if members]
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        scores = [[s[quality] for s in members if s["method"] == method] for _, members in used]
        heights = [float(np.mean(values)) if values else 0.0 for values in scores]
        axes.bar(np.arange(len(used)) + (number - (len(methods) - 1) / 2) * width, heights, width, label=method)
    counts = [len({s["item"] for s in members}) for _, members in used]
    labels = [
        f"{_bounds(*bounds)}\n{count} item{'s' * (count > 1)}" for (bounds, _), count in zip(used, counts, strict=True)
    ]
    axes.set_xticks(range(len(used)), labels)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel(f"{quality.replace('_', ' ')} (points)")
    _legend(axes, len(methods))
    return figure


def per_item(samples: Sequence[Row], methods: Sequence[str], quality: str = "edit_similarity") -> Figure:
    """Every score as a dot: a row a method, items from left to right by length, so that a mean hides nothing."""
    items = sorted({(s["prompt_tokens"], s["item"]) for s in samples})
    place = {item: number for number, (_, item) in enumerate(items)}
    figure = Figure(figsize=(max(7.0, 0.25 * len(items)), 1.2 + 0.6 * len(methods)), layout="constrained")
    axes = figure.add_subplot()
    for number, method in enumerate(methods):
        own = [s for s in samples if s["method"] == method]
        dots = axes.scatter(
            [place[s["item"]] for s in own],
            [number] * len(own),
            c=[s[quality] for s in own],
            vmin=0,
            vmax=100,
            cmap="viridis",
            s=60,
        )
    axes.set_yticks(range(len(methods)), methods)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("item, from short to long context")
    figure.colorbar(dots, ax=axes, label=quality.replace("_", " "))
    return figure


def _legend(axes: Axes, columns: int) -> None:
    axes.legend(ncols=min(columns, 6), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _bounds(low: int, high: int) -> str:
    if low == 0:
        return f"under {high:,}"
    return f"{low:,} and more" if high == LENGTH_EDGES[-1] else f"{low:,} to {high:,}"
