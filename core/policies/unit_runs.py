"""Runs of consecutive free units in order of address, and the allocators that search them in that order."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from octavo.core.policies.unit_allocator import UnitAllocator, Units


def runs_of(ascending: Units) -> tuple[Units, Units]:
    """First unit of each maximal run, and the unit after its last, of at least one unit."""
    breaks = np.flatnonzero(ascending[1:] != ascending[:-1] + 1)
    starts = ascending[np.concatenate([[0], breaks + 1])]
    ends = ascending[np.concatenate([breaks, [len(ascending) - 1]])] + 1
    return starts, ends


def units_of(starts: Units, ends: Units) -> Units:
    """The units of all runs, one run after the other; the inverse of ``runs_of``."""
    lengths = ends - starts
    before = np.cumsum(lengths) - lengths
    units: Units = (np.arange(lengths.sum()) + np.repeat(starts - before, lengths)).astype(np.int32)
    return units


def toggled(edges: Units, starts: Units, ends: Units) -> Units:
    """Edges after runs have changed sides: free ones are taken, or held ones are freed.

    ::

        units    1 2 3 4 5 6 7 8 9
        free     x x . . x x x . .      edges [1 3 5 8]: at each, free turns into held or held into free
        + 3 4    x x x x x x x . .      toggle 3 and 5: both were edges and are none now; two runs have merged
        - 2      x . x x x x x . .      toggle 2 and 3: neither was an edge; a run was split
    """
    edges = np.sort(np.concatenate([edges, starts, ends]))
    twice = edges[1:] == edges[:-1]
    once = np.ones(len(edges), np.bool_)
    once[1:] &= ~twice
    once[:-1] &= ~twice
    return edges[once]


class RunAllocator(UnitAllocator):
    """Takes the front of one free run where it can. Which run is the policy's choice; how runs are kept, too."""

    def _take(self, units: int, near: int | None) -> Units:
        """
        1. The run that begins right after ``near``, if it is long enough.
        2. Else the one that the policy chooses among those that are.
        3. If none is, the longest runs whole, as few as leave a rest that fits one more; that one as in 2.
        """
        edges = self._edges()
        starts, ends = edges[0::2], edges[1::2]
        lengths = ends - starts
        whole: NDArray[np.intp] = np.empty(0, np.intp)
        rest = units
        last = None if near is None else _beginning_at(near + 1, starts, lengths, units)
        if last is None:
            last = self._choose(starts, lengths, units)
        if last is None:
            longest_first = np.argsort(-lengths, kind="stable")
            sums = np.cumsum(lengths[longest_first])
            count = int(np.searchsorted(sums, units))
            whole = longest_first[:count]
            rest = units - int(sums[count - 1])
            lengths[whole] = 0
            last = self._choose(starts, lengths, rest)
            assert last is not None
        taken = np.append(starts[whole], starts[last]), np.append(ends[whole], starts[last] + rest)
        for side in taken:
            side.sort()
        self._toggle(*taken)
        return units_of(*taken)

    def _put(self, units: Units) -> None:
        self._toggle(*runs_of(np.sort(units)))

    def _add(self, new: Units) -> None:
        self._toggle(new[:1], new[-1:] + 1)

    def _drop(self, first: int) -> None:
        self._toggle(np.array([first], np.int32), np.array([self.total_units + 1], np.int32))

    def _listed(self) -> Units:
        edges = self._edges()
        return units_of(edges[0::2], edges[1::2])

    @abstractmethod
    def _edges(self) -> Units:
        """First unit of each free run and the unit after its last, in turn, ascending."""

    @abstractmethod
    def _toggle(self, starts: Units, ends: Units) -> None:
        """Runs change sides; see ``toggled``."""

    @abstractmethod
    def _choose(self, starts: Units, lengths: Units, units: int) -> int | None:
        """Index of a run with ``lengths >= units``, the runs ascending by address; None if there is none."""


def lowest_fit(lengths: Units, units: int) -> int | None:
    """Index of the first run that is long enough, or None."""
    fits = lengths >= units
    index = int(fits.argmax())
    return index if fits[index] else None


def _beginning_at(unit: int, starts: Units, lengths: Units, units: int) -> int | None:
    index = int(np.searchsorted(starts, unit))
    found = index < len(starts) and starts[index] == unit and lengths[index] >= units
    return index if found else None
