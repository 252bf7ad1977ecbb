"""An array of free units used as a stack: O(1) a unit, one vector operation for many."""

from __future__ import annotations

import numpy as np

from octavo.core.policies.unit_allocator import UnitAllocator, Units


class StackAllocator(UnitAllocator):
    """The units freed last are given out first, since their memory is warm; those freed together come back together.

    ::

        _stack [total_units]    [ . . . | 7 8 3 4 9 10 ]
                                     _top ^ next to give out; nothing is searched, split or merged

    Units that were freed in one call keep their order, so that while all pages have one size, a page that was one run
    stays one. ``near`` is ignored: a stack cannot look by address.
    """

    looks_near = False

    def __init__(self, total_units: int) -> None:
        super().__init__(total_units)
        self._stack = np.arange(1, self.total_units + 1, dtype=np.int32)
        self._top = 0

    def _take(self, units: int, near: int | None) -> Units:
        found = self._stack[self._top : self._top + units].copy()
        self._top += units
        return found

    def _put(self, units: Units) -> None:
        self._stack[self._top - len(units) : self._top] = units
        self._top -= len(units)

    def _add(self, new: Units) -> None:
        self._stack = np.concatenate([self._stack, new])  # below all others: given out last

    def _drop(self, first: int) -> None:
        free = self._listed()
        kept = free[free < first]
        self._top = first - 1 - len(kept)
        self._stack = np.concatenate([np.zeros(self._top, np.int32), kept])

    def _listed(self) -> Units:
        return self._stack[self._top :]
