"""What all allocators share: the map of free units, and the refusal of what cannot be given back."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

Units = NDArray[np.int32]

SHOWN = 8
"""Ids that an error names at most."""


class UnitAllocator(ABC):
    """Deals in the units 1 to ``total_units`` (``octavo.core.interfaces.Allocator``); a policy says which ones.

    ::

        _is_free [total_units + 1]    bool    unit 0 is nobody's
        _place   [total_units + 1]    int32   where in a call of ``free`` a unit is listed; means nothing afterwards

    The map is the truth that a double free is caught by, and that ``check`` compares a policy's own structure with.
    A policy reads it and does not write it.

    Raises:
        ValueError: ``total_units`` is not a whole number, or below 1.
    """

    looks_near = True
    """Whether a policy heeds ``near``."""

    def __init__(self, total_units: int) -> None:
        self.total_units = _count("total_units", total_units)
        self.free_units = self.total_units
        self._is_free = np.ones(self.total_units + 1, np.bool_)
        self._is_free[0] = False
        self._place = np.zeros(self.total_units + 1, np.int32)

    def allocate(self, units: int, near: int | None = None) -> Units:
        """``units`` unit ids, int32, as the policy finds them; ``near`` is the unit that they should follow."""
        assert 0 <= units <= self.free_units, f"{units} units asked for, {self.free_units} free"
        if units == 0:
            return np.empty(0, np.int32)
        # Python's own integers, as ``near`` comes out of an int32 table more often than not.
        found = self._take(int(units), None if near is None else int(near))
        self._is_free[found.astype(np.intp)] = False
        self.free_units -= units
        return found

    def free(self, units: Units) -> None:
        """Take back ``units``, in any order and from any number of allocations.

        Raises:
            ValueError: a unit is free already, is listed twice, or is none of this pool's; nothing has changed.
        """
        if len(units) == 0:
            return
        at = units.astype(np.intp)  # numpy converts other index types far more slowly itself
        if at.min() < 1 or at.max() > self.total_units:
            strange = np.sort(units[(units < 1) | (units > self.total_units)])
            raise ValueError(f"units {_some(strange)} are none of this pool's, which are 1 to {self.total_units}")
        # Each unit is marked with its place in the call: one that is listed twice keeps the later mark only.
        places = np.arange(len(at), dtype=np.int32)
        self._place[at] = places
        if np.count_nonzero(twice := self._place.take(at) != places):
            raise ValueError(
                f"units {_some(np.unique(units[twice]))} are listed more than once among {len(units)} to free; "
                "each can be freed once"
            )
        if np.count_nonzero(already := self._is_free.take(at)):
            raise ValueError(
                f"units {_some(np.sort(units[already]))} are free already; "
                f"{self.total_units - self.free_units} of {self.total_units} units are held"
            )
        self._is_free[at] = True
        self.free_units += len(units)
        self._put(units)

    def grow(self, units: int) -> None:
        """Add ``units`` free units at the end.

        Raises:
            ValueError: ``units`` is not a whole number, or below 1.
        """
        first = self.total_units + 1
        self.total_units += _count("units to grow by", units)
        self.free_units += units
        self._is_free = np.concatenate([self._is_free, np.ones(units, np.bool_)])
        self._place = np.zeros(self.total_units + 1, np.int32)
        self._add(np.arange(first, first + units, dtype=np.int32))

    def shrink(self, units: int) -> bool:
        """Take the last ``units`` units away if all of them are free; otherwise change nothing and say False.

        Raises:
            ValueError: ``units`` is not a whole number, is below 1, or would leave none.
        """
        if _count("units to shrink by", units) >= self.total_units:
            raise ValueError(f"units to shrink by: {units} of {self.total_units}; at least 1 unit must remain")
        first = self.total_units - units + 1
        if not self._is_free[first:].all():
            return False
        self._drop(first)
        self.total_units -= units
        self.free_units -= units
        self._is_free = self._is_free[:first].copy()
        self._place = self._place[:first].copy()
        return True

    def check(self) -> Units:
        """All free units, ascending.

        Raises:
            AssertionError: the policy's own structure lists others, or the count is wrong.
        """
        free = np.flatnonzero(self._is_free).astype(np.int32)
        listed = np.sort(self._listed())
        if not np.array_equal(listed, free):
            differing = np.setxor1d(listed, free)
            raise AssertionError(
                f"{len(listed)} units are listed as free, {len(free)} are free; not the same: {_some(differing)}"
            )
        if len(free) != self.free_units or len(self._is_free) != self.total_units + 1 or self._is_free[0]:
            raise AssertionError(
                f"{len(free)} of {len(self._is_free) - 1} units are free, counted: {self.free_units} "
                f"of {self.total_units}"
            )
        return free

    @abstractmethod
    def _take(self, units: int, near: int | None) -> Units:
        """Choose at least one and at most ``free_units`` units, and list them no more."""

    @abstractmethod
    def _put(self, units: Units) -> None:
        """List units that were held until now, in the order in which they were given back."""

    @abstractmethod
    def _add(self, new: Units) -> None:
        """List the units that the pool has grown by."""

    @abstractmethod
    def _drop(self, first: int) -> None:
        """Forget the units from ``first`` to the end, all of them free."""

    @abstractmethod
    def _listed(self) -> Units:
        """The units that the policy could give out, in any order."""


def _count(what: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{what}: {value!r}; must be a whole number, at least 1")
    if value < 1:
        raise ValueError(f"{what}: {value}; must be at least 1")
    return int(value)


def _some(units: NDArray[np.integer]) -> str:
    more = f" and {len(units) - SHOWN} more" if len(units) > SHOWN else ""
    return f"{units[:SHOWN].tolist()}{more}"
