"""Blocks of a power of two units, split into halves and merged with their other half (Knowlton 1965)."""

from __future__ import annotations

import numpy as np

from octavo.core.policies.unit_allocator import UnitAllocator, Units


class BuddyAllocator(UnitAllocator):
    """Splits and merges in at most log2(``total_units``) steps.

    ::

        unit        1 2 3 4 5 6 7 8 9
        _free[2]    [.......] [.......]         _free[order] bool [total_units >> order]: block i, the 2**order units
        _free[1]    [...] [x] [.] [...]         from 1 + i * 2**order on, is free and in no larger free block.
        _free[0]    . . . . x . . . x           Here 3, 4, 5 and 9 are free: blocks of 2, 1 and 1 units

    A request is rounded up to a block for the search alone: what the block has beyond the units asked for is listed
    again as smaller blocks, so that no unit is held that nobody asked for. The price is paid in runs instead: free
    units that lie side by side but across a block's border do not count as one run.
    """

    def __init__(self, total_units: int) -> None:
        super().__init__(total_units)
        self._list_all(np.arange(1, self.total_units + 1, dtype=np.int32), self.total_units)

    def _take(self, units: int, near: int | None) -> Units:
        """
        1. The blocks that lie one after the other from ``near`` + 1 on, if they are long enough together.
        2. Else the lowest of the smallest blocks that are.
        3. If none is, the largest block whole; and so on with the rest.
        """
        blocks = [] if near is None else self._in_a_row(near + 1, units)
        parts: list[Units] = []
        while units:
            order, index = blocks.pop(0) if blocks else self._choose(units)
            used = min(units, 1 << order)
            self._cut(order, index, used)
            first = 1 + (index << order)
            parts.append(np.arange(first, first + used, dtype=np.int32))
            units -= used
        return parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))

    def _put(self, units: Units) -> None:
        """List the units as blocks of one; then, order by order, make one of every two halves that are both free."""
        index = np.sort(units).astype(np.intp) - 1
        self._free[0][index] = True
        for halves, wholes in zip(self._free, self._free[1:], strict=False):
            index = index >> 1
            index = index[np.append(True, index[1:] != index[:-1])]  # once where both halves were among them
            index = index[index < len(wholes)]  # the last half may have no other
            index = index[halves[2 * index] & halves[2 * index + 1]]
            if len(index) == 0:
                break
            halves[2 * index] = halves[2 * index + 1] = False
            wholes[index] = True

    def _add(self, new: Units) -> None:
        self._list_all(np.concatenate([self._listed(), new]), self.total_units)

    def _drop(self, first: int) -> None:
        free = self._listed()
        self._list_all(free[free < first], first - 1)

    def _listed(self) -> Units:
        parts = [
            (1 + (np.flatnonzero(free)[:, None] << order) + np.arange(1 << order)).ravel()
            for order, free in enumerate(self._free)
        ]
        return np.concatenate(parts).astype(np.int32)

    def _list_all(self, units: Units, total_units: int) -> None:
        """Begin anew with these free units in a pool of so many."""
        self._free = [np.zeros(total_units >> order, np.bool_) for order in range(total_units.bit_length())]
        self._put(units)

    def _choose(self, units: int) -> tuple[int, int]:
        """Order and index of the lowest of the smallest blocks that hold ``units``, else of the largest blocks."""
        fitting = (units - 1).bit_length()
        larger = range(fitting, len(self._free))
        smaller = reversed(range(min(fitting, len(self._free))))
        for order in (*larger, *smaller):
            index = int(self._free[order].argmax())
            if self._free[order][index]:
                return order, index
        raise AssertionError(f"no block is free, and {self.free_units} units are")

    def _in_a_row(self, first: int, units: int) -> list[tuple[int, int]]:
        """Order and index of free blocks that hold ``units`` from ``first`` on without a gap; none if there is one."""
        blocks = []
        offset = first - 1
        while offset < first - 1 + units:
            for order, free in enumerate(self._free):
                index = offset >> order
                if index << order == offset and index < len(free) and free[index]:
                    break
            else:
                return []
            blocks.append((order, index))
            offset += 1 << order
        return blocks

    def _cut(self, order: int, index: int, used: int) -> None:
        """Take the front of a block; the rest is listed as the largest blocks that it holds."""
        self._free[order][index] = False
        offset, end = (index << order) + used, (index + 1) << order
        while offset < end:
            size = offset & -offset  # the largest block that may begin here
            self._free[size.bit_length() - 1][offset // size] = True
            offset += size
