"""Figures of quality over long contexts: by place, by turn, and by bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

Row = Mapping[str, Any]


def heat_maps(samples: Sequence[Row], methods: Sequence[str], quality: str) -> Figure:
    """A panel a method: mean ``quality`` by length of the prompt and depth of the needle. Samples without a depth are
    left out."""
    placed = [sample for sample in samples if sample["depth"] is not None]
    lengths, depths = (sorted({sample[key] for sample in placed}) for key in ("length", "depth"))
    grids = {method: _means(placed, method, lengths, depths, quality) for method in methods}
    known = [value for grid in grids.values() for value in grid[np.isfinite(grid)]]
    points = quality == "accuracy"
    low, high = (0.0, 100.0) if points else (min(known, default=0.0), max(known, default=0.0))
    width = max(3.5, 1.0 + 0.6 * len(lengths)) * len(methods)
    figure = Figure(figsize=(width, 1.8 + 0.4 * len(depths)), layout="constrained")
    panels = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
    for axes, (method, grid) in zip(panels, grids.items(), strict=True):
        image = axes.imshow(grid, vmin=low, vmax=high, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set_xlabel("tokens")
        axes.set_title(method)
        for (y, x), value in np.ndenumerate(grid):
            ink = "black" if value > low + 0.6 * (high - low) else "white"
            axes.text(x, y, f"{value:.0f}" if points else f"{value:.2f}", ha="center", va="center", color=ink)
    panels[0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=list(panels), label=quality.replace("_", " "))
    return figure


def by_turn(rows: Sequence[Row]) -> Figure:
    """Accuracy of each turn, a line a method."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    turns = list(dict.fromkeys(row["task"] for row in rows))
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        axes.plot([turns.index(row["task"]) for row in own], [row["accuracy"] for row in own], "o-", label=method)
    axes.set_xticks(range(len(turns)), turns)
    axes.set_ylabel("accuracy (points)")
    axes.set_ylim(-3, 103)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def gains(rows: Sequence[Row]) -> Figure:
    """What a change does to each method: the mean paired difference in edit similarity, with its interval."""
    figure = Figure(figsize=(7, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        mean, (low, high) = row["edit_similarity_gain"], row["edit_similarity_gain_ci"]
        axes.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", capsize=3, color=f"C{place}")
    axes.axvline(0, color="grey", linewidth=1)
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("edit similarity, points won (95 % interval)")
    axes.grid(alpha=0.3, axis="x")
    return figure


def perplexity_over_bytes(rows: Sequence[Row]) -> Figure:
    """Perplexity against the bytes that are predicted to be read a token, a panel a kind of document."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(4.5 * len(tasks), 4.2), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for number, row in enumerate(row for row in rows if row["task"] == task):
            megabytes = (row["predicted_kv_bytes_per_token"] + row["predicted_digest_bytes_per_token"]) / 1e6
            low, high = row["perplexity_ci"]
            error = [[row["perplexity"] - low], [high - row["perplexity"]]]
            style = {"fmt": "o", "color": f"C{number}", "capsize": 3, "alpha": 0.9}
            axes.errorbar(megabytes, row["perplexity"], yerr=error, label=row["method"], **style)
        axes.set_xlabel("MB read a token (predicted; K, V and what is read to choose)")
        axes.set_ylabel("perplexity (95 % interval)")
        axes.set_xlim(left=0)
        axes.set_title(task)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figure


def _means(
    samples: Sequence[Row], method: str, lengths: Sequence[int], depths: Sequence[float], quality: str
) -> np.ndarray:
    """[depths, lengths]; NaN where there is no sample."""
    grid = np.full((len(depths), len(lengths)), np.nan)
    for y, depth in enumerate(depths):
        for x, length in enumerate(lengths):
            cell = [s[quality] for s in samples if (s["method"], s["length"], s["depth"]) == (method, length, depth)]
            if cell:
                grid[y, x] = np.mean(cell)
    return grid


def kept_by_layer(percent: Sequence[float]) -> Figure:
    """What a calibrated basis keeps of each layer."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(range(len(percent)), percent)
    axes.set_xlabel("layer")
    axes.set_ylabel("kept (%)")
    axes.set_ylim(0, 100)
    return figure


def by_protocol(rows: Sequence[Row]) -> Figure:
    """What each switch changes: a panel a switch and setting, a bar a method, with its interval. In log-likelihood
    where there is one, in points of accuracy for turns."""
    moved = [row for row in rows if {"log_likelihood_vs_base", "accuracy_vs_base"} & row.keys()]
    settings = list(dict.fromkeys((row["switch"], row["setting"]) for row in moved))
    figure = Figure(figsize=(1.5 + 2.6 * max(1, len(settings)), 3.6), layout="constrained")
    panels = figure.subplots(1, max(1, len(settings)), squeeze=False)[0]
    for axes, (switch, setting) in zip(panels, settings, strict=False):
        own = [row for row in moved if (row["switch"], row["setting"]) == (switch, setting)]
        key = "log_likelihood_vs_base" if "log_likelihood_vs_base" in own[0] else "accuracy_vs_base"
        for place, row in enumerate(own):
            low, high = row.get(f"{key}_ci") or (row[key], row[key])
            axes.bar(place, row[key], yerr=[[row[key] - low], [high - row[key]]], capsize=3, color=f"C{place}")
        axes.set_xticks(range(len(own)), [row["method"] for row in own], rotation=60, ha="right", fontsize=8)
        axes.axhline(0, color="0.3", linewidth=1)
        axes.set_title(f"{switch}: {setting}", fontsize=9)
        axes.set_ylabel("nats a token" if key.startswith("log") else "points of accuracy", fontsize=8)
    return figure
