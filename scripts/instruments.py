"""What a run says of every choice of pages: how much it left out, by layer and KV head, and from where on it pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.scripts import byte_model
from octavo.scripts.byte_model import ByteModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core import Engine
    from octavo.core.interfaces import SparseMethod
    from octavo.scripts.schema_groups import SparseSettings
    from octavo.sparse.probe import Probe

Sample = dict[str, Any]

METRICS = {
    "page_recall": "page recall",
    "captured_mass": "captured mass",
    "removal_error": "removal error",
    "output_error": "output error",
}

NOTE = (
    "Recall: of the pages that the oracle would choose with the same budget; mass: share of the softmax that the read "
    "pages hold; output error: relative L2 distance of the attention output from the dense one; removal error: the "
    "most that a single page left out changes it. Means over decode steps 1, 1 + {every}, ... of a request, layers and "
    "KV heads (octavo.sparse.probe). Measuring is part of the seconds, of which probe_seconds are its own; bytes that "
    "it reads are in probe_bytes alone."
)


@dataclass(frozen=True)
class Instruments:
    """Of one engine: a probe, if one looks on, and the model of its bytes."""

    every: int
    probe: Probe | None
    bytes: ByteModel

    @classmethod
    def of(cls, engine: Engine, model: Any, settings: SparseSettings) -> Instruments:
        """Instruments, attached to the engine; ``settings.probe_every=0`` lets nobody look on."""
        from octavo.core.inspection import probing
        from octavo.sparse.probe import Probe

        probe = Probe(settings.probe_every) if settings.probe_every else None
        probing.attach(engine, probe)
        return cls(settings.probe_every, probe, ByteModel.of(engine, model))

    def taken(self, method: SparseMethod | None) -> Sample:
        """What a sample says of a method's choices since the last one."""
        found = None if self.probe is None else self.probe.take(method)
        return {} if found is None else {"probe": found}

    def rows(
        self, rows: Sequence[Mapping[str, Any]], methods: Mapping[str, SparseMethod | None]
    ) -> list[dict[str, Any]]:
        """Final rows, with the contexts from which methods pay."""
        return byte_model.with_break_even(rows, methods, self.bytes)

    def notes(self) -> list[str]:
        return [*self.probe_notes(), byte_model.NOTE]

    def probe_notes(self) -> list[str]:
        return [] if self.probe is None else [NOTE.format(every=self.every)]


def figures(samples: Sequence[Sample], methods: Sequence[str]) -> dict[str, Figure]:
    """``choices``: a row of panels a metric, a panel a method, a cell a layer and KV head. Nothing if nothing was
    measured."""
    from matplotlib.figure import Figure

    grids = {name: _means([s["probe"] for s in samples if s["method"] == name and s.get("probe")]) for name in methods}
    grids = {name: grid for name, grid in grids.items() if grid}
    if not grids:
        return {}
    layers, heads = next(iter(grids.values()))["page_recall"].shape
    figure = Figure(figsize=(2 + 1.9 * len(grids), len(METRICS) * (1 + 0.1 * layers)), layout="constrained")
    panels = figure.subplots(len(METRICS), len(grids), sharex=True, sharey=True, squeeze=False)
    for line, (key, title) in zip(panels, METRICS.items(), strict=True):
        top = 1.0 if key in ("page_recall", "captured_mass") else max(_highest(grid[key]) for grid in grids.values())
        for axes, (name, grid) in zip(line, grids.items(), strict=True):
            image = axes.imshow(grid[key], vmin=0, vmax=top, cmap="viridis", aspect="auto", interpolation="nearest")
            axes.set_facecolor("0.85")  # a layer that chose nothing
            axes.set_xticks(range(heads))
            if line is panels[0]:
                axes.set_title(name, fontsize=9)
            if line is panels[-1]:
                axes.set_xlabel("KV head")
        line[0].set_ylabel("layer")
        figure.colorbar(image, ax=list(line), label=title)
    return {"choices": figure}


def _means(probes: Sequence[Sample]) -> dict[str, np.ndarray[Any, Any]]:
    """By metric, [L, Hkv]: the mean over all measured queries; NaN where a layer has none."""
    if not probes:
        return {}
    rows = np.array([probe["rows"] for probe in probes], float)[..., None]  # [probes, L, 1]
    heads = max(len(layer) for probe in probes for layer in probe["page_recall"] if layer is not None)
    found = {}
    for key in METRICS:
        values = np.array([[layer or [0.0] * heads for layer in probe[key]] for probe in probes])
        with np.errstate(invalid="ignore"):
            found[key] = (values * rows).sum(0) / rows.sum(0)
    return found


def _highest(grid: np.ndarray[Any, Any]) -> float:
    return float(np.nanmax(grid)) or 1.0
