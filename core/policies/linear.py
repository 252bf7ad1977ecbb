"""The baseline: look at the map of free units from its start, every time."""

from __future__ import annotations

import numpy as np

from octavo.core.policies.unit_allocator import Units
from octavo.core.policies.unit_runs import RunAllocator, lowest_fit


class LinearAllocator(RunAllocator):
    """Gives out what ``first_fit`` does, and keeps nothing but the map: each allocation costs O(``total_units``)."""

    def _edges(self) -> Units:
        bounded = np.append(self._is_free, False)
        return (np.flatnonzero(bounded[1:] != bounded[:-1]) + 1).astype(np.int32)

    def _toggle(self, starts: Units, ends: Units) -> None:
        """The map is all there is."""

    def _choose(self, starts: Units, lengths: Units, units: int) -> int | None:
        return lowest_fit(lengths, units)
