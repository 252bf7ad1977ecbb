"""The lowest free run that is long enough."""

from __future__ import annotations

import numpy as np

from octavo.core.policies.unit_allocator import Units
from octavo.core.policies.unit_runs import RunAllocator, lowest_fit, toggled


class FirstFitAllocator(RunAllocator):
    """Packs towards unit 1, which leaves the end of the pool free to be given back. Every call costs O(free runs), in
    vector operations."""

    def __init__(self, total_units: int) -> None:
        super().__init__(total_units)
        self._kept_edges = np.array([1, self.total_units + 1], np.int32)

    def _edges(self) -> Units:
        return self._kept_edges

    def _toggle(self, starts: Units, ends: Units) -> None:
        self._kept_edges = toggled(self._kept_edges, starts, ends)

    def _choose(self, starts: Units, lengths: Units, units: int) -> int | None:
        return lowest_fit(lengths, units)
