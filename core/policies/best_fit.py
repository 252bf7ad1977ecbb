"""The smallest free run that is long enough, found in an ordered index."""

from __future__ import annotations

import numpy as np
from sortedcontainers import SortedList

from octavo.core.policies.unit_allocator import UnitAllocator, Units
from octavo.core.policies.unit_runs import runs_of, units_of


class BestFitAllocator(UnitAllocator):
    """Keeps long runs whole. O(log free runs) for each run that is taken or given back.

    ::

        units          1 2 3 4 5 6 7 8 9
        free           x x . . x x x . .
        _by_length     (2, 1) (3, 5)            ordered by length, then by first unit
        _length_from   2 . . . 3 . . . .        of the free run that begins at a unit
        _length_to     . 2 . . . . 3 . .        of the free run that ends with a unit; 0 where none does

    The two arrays ``[total_units + 2]`` tell a run that is given back at once which neighbours to merge with.
    """

    def __init__(self, total_units: int) -> None:
        super().__init__(total_units)
        self._by_length = SortedList()
        self._length_from = np.zeros(self.total_units + 2, np.int32)
        self._length_to = np.zeros(self.total_units + 2, np.int32)
        self._list(1, self.total_units)

    def _take(self, units: int, near: int | None) -> Units:
        """
        1. The run that begins right after ``near``, if it is long enough.
        2. Else the longest runs whole while none is long enough for the rest, then the shortest that is.
        """
        if near is not None and (length := int(self._length_from[near + 1])) >= units:
            return self._cut(near + 1, length, units)
        parts = []
        while (longest := self._by_length[-1])[0] < units:
            length, start = longest
            parts.append(self._cut(start, length, length))
            units -= length
        length, start = self._by_length[self._by_length.bisect_left((units, 0))]
        parts.append(self._cut(start, length, units))
        return parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))

    def _put(self, units: Units) -> None:
        starts, ends = runs_of(np.sort(units))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            before, after = int(self._length_to[start - 1]), int(self._length_from[end])
            if before:
                self._unlist(start - before, before)
            if after:
                self._unlist(end, after)
            self._list(start - before, before + end - start + after)

    def _add(self, new: Units) -> None:
        more = np.zeros(len(new), np.int32)
        self._length_from = np.concatenate([self._length_from, more])
        self._length_to = np.concatenate([self._length_to, more])
        self._put(new)

    def _drop(self, first: int) -> None:
        length = int(self._length_to[self.total_units])
        start = self.total_units + 1 - length
        self._unlist(start, length)
        if start < first:
            self._list(start, first - start)
        self._length_from = self._length_from[: first + 1].copy()
        self._length_to = self._length_to[: first + 1].copy()

    def _listed(self) -> Units:
        lengths, starts = np.array(list(self._by_length), np.int32).reshape(-1, 2).T
        length_from, length_to = np.zeros_like(self._length_from), np.zeros_like(self._length_to)
        length_from[starts] = length_to[starts + lengths - 1] = lengths
        if not np.array_equal([length_from, length_to], [self._length_from, self._length_to]):
            raise AssertionError("the index by length and the lengths by unit tell of different free runs")
        return units_of(starts, starts + lengths)

    def _cut(self, start: int, length: int, units: int) -> Units:
        """Take the front of a free run."""
        self._unlist(start, length)
        if length > units:
            self._list(start + units, length - units)
        return np.arange(start, start + units, dtype=np.int32)

    def _list(self, start: int, length: int) -> None:
        self._by_length.add((length, start))
        self._length_from[start] = self._length_to[start + length - 1] = length

    def _unlist(self, start: int, length: int) -> None:
        self._by_length.remove((length, start))
        self._length_from[start] = self._length_to[start + length - 1] = 0
