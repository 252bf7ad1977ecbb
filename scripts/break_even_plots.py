"""Figures of speed-up over context and batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

Row = Mapping[str, Any]


def surfaces(rows: Sequence[Row], gain: float) -> dict[str, Figure]:
    """``surface``: a column a method, batch x context, measured above and predicted below, cells that gain ``gain`` in
    bold. ``by_context``: a panel a method, a line a batch, predicted dashed."""
    own = [row for row in rows if "speedup" in row]
    if not own:
        return {}
    methods = list(dict.fromkeys(row["method"] for row in own))
    contexts, batches = (sorted({row[key] for row in own}) for key in ("context", "batch"))
    return {"surface": _maps(own, methods, contexts, batches, gain), "by_context": _lines(own, methods, batches, gain)}


def _maps(
    rows: Sequence[Row], methods: Sequence[str], contexts: Sequence[int], batches: Sequence[int], gain: float
) -> Figure:
    top = max(gain, *(row[key] for row in rows for key in ("speedup", "predicted_speedup")))
    width, height = 1.5 + 0.75 * len(contexts), 1.0 + 0.4 * len(batches)
    figure = Figure(figsize=(width * len(methods), 2 * height + 0.6), layout="constrained")
    panels = figure.subplots(2, len(methods), sharex=True, sharey=True, squeeze=False)
    for line, key in zip(panels, ("speedup", "predicted_speedup"), strict=True):
        for axes, method in zip(line, methods, strict=True):
            grid = np.full((len(batches), len(contexts)), np.nan)
            for row in rows:
                if row["method"] == method:
                    grid[batches.index(row["batch"]), contexts.index(row["context"])] = row[key]
            image = axes.imshow(grid, vmin=0.5, vmax=top, cmap="viridis", aspect="auto")
            for (y, x), value in np.ndenumerate(grid):
                if np.isfinite(value):
                    weight = "bold" if value >= gain else "normal"
                    ink = "black" if value > 0.5 + 0.6 * (top - 0.5) else "white"
                    axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink, weight=weight)
            axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts], rotation=45, fontsize=8)
            axes.set_yticks(range(len(batches)), [str(batch) for batch in batches])
            axes.set_title(f"{method}: {'measured' if key == 'speedup' else 'bytes say'}", fontsize=9)
        line[0].set_ylabel("batch")
    for axes in panels[-1]:
        axes.set_xlabel("context")
    figure.colorbar(image, ax=panels, label="x dense")
    return figure


def _lines(rows: Sequence[Row], methods: Sequence[str], batches: Sequence[int], gain: float) -> Figure:
    figure = Figure(figsize=(4.2 * len(methods), 3.8), layout="constrained")
    for axes, method in zip(figure.subplots(1, len(methods), sharey=True, squeeze=False)[0], methods, strict=True):
        for number, batch in enumerate(batches):
            own = sorted(
                (row["context"], row["speedup"], row["predicted_speedup"])
                for row in rows
                if (row["method"], row["batch"]) == (method, batch)
            )
            if own:
                contexts, measured, predicted = zip(*own, strict=True)
                axes.plot(contexts, measured, "o-", color=f"C{number}", label=f"batch {batch}")
                axes.plot(contexts, predicted, "--", color=f"C{number}", linewidth=1)
        axes.axhline(gain, color="0.4", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of context")
        axes.set_title(method, fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
        axes.set_ylabel("speed-up of a step (dashed: bytes)")
    return figure
