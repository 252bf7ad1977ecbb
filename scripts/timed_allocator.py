"""An allocator under observation: its time, and how contiguous its answers are."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces import Allocator

Units = NDArray[np.int32]


class TimedAllocator:
    """Passes every call on (``octavo.core.interfaces.Allocator``).

    ``seconds`` spent in it; ``units`` given out, in ``runs`` of consecutive ids. Units that come right after ``near``
    continue its run.
    """

    looks_near = True  # to be told what continues a run

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self.seconds = 0.0
        self.units = 0
        self.runs = 0

    @property
    def total_units(self) -> int:
        return self._allocator.total_units

    @property
    def free_units(self) -> int:
        return self._allocator.free_units

    def allocate(self, units: int, near: int | None = None) -> Units:
        start = time.perf_counter()
        found = self._allocator.allocate(units, near)
        self.seconds += time.perf_counter() - start
        if len(found):
            self.units += len(found)
            self.runs += int(np.count_nonzero(np.diff(found) != 1)) + (near is None or int(found[0]) != near + 1)
        return found

    def free(self, units: Units) -> None:
        start = time.perf_counter()
        self._allocator.free(units)
        self.seconds += time.perf_counter() - start

    def grow(self, units: int) -> None:
        self._allocator.grow(units)

    def shrink(self, units: int) -> bool:
        return self._allocator.shrink(units)

    def check(self) -> Units:
        return self._allocator.check()
