"""What prefill patterns capture of the attention that they leave out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from octavo.core.engine import Engine
    from octavo.core.interfaces import PrefillPattern


@dataclass
class Captured:
    """Sums over the queries and query heads of one layer under one pattern. Chunks in which every block reads all pages
    are not among them, since nothing is chosen there."""

    rows: int = 0
    mass: float = 0.0
    least_mass: float = 1.0
    error: float = 0.0


@dataclass
class PatternWatch:
    """Watches every chunk of an engine under a prefill pattern: each layer is computed a second time, densely, from the
    same queries, keys and values, and the first result is what goes on. End it with ``close``.

    The log-sum-exp of what was read over that of all pages is the softmax mass that a pattern captured, exactly; the
    error is that of the attention's output, relative to the dense one, as an L2 norm over a head.
    """

    engine: Engine
    layers: dict[tuple[str, int], Captured] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine._runner.block_watch = self._see

    def close(self) -> None:
        self.engine._runner.block_watch = None

    def facts(self, pattern: PrefillPattern) -> dict[str, float]:
        """Means over layers, queries and heads: ``prefill_captured_mass`` (1 is all), its least, and
        ``prefill_output_error``; empty if the pattern has not chosen yet."""
        seen = [found for (name, _), found in self.layers.items() if name == pattern.provenance]
        rows = sum(found.rows for found in seen)
        if not rows:
            return {}
        return {
            "prefill_captured_mass": sum(found.mass for found in seen) / rows,
            "prefill_captured_mass_least": min(found.least_mass for found in seen),
            "prefill_output_error": sum(found.error for found in seen) / rows,
        }

    def _see(
        self, pattern: PrefillPattern, layer: int, out: Tensor, lse: Tensor, whole: Tensor, all_lse: Tensor
    ) -> None:
        found = self.layers.setdefault((pattern.provenance, layer), Captured())
        mass = torch.exp(lse - all_lse)
        apart = (out.float() - whole.float()).norm(dim=2) / whole.float().norm(dim=2).clamp(min=1e-12)
        total, least, error = torch.stack([mass.sum(), mass.min(), apart.sum()]).tolist()
        found.rows += mass.numel()
        found.mass += total
        found.least_mass = min(found.least_mass, least)
        found.error += error
