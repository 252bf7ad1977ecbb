"""An array of free pages used as a stack: O(1) a page, one vector operation for many."""

import numpy as np
from numpy.typing import NDArray


class StackAllocator:
    """Pages of one size, ``page_units`` units each, in frames that start at unit 1.

    ::

        stack  [ 9 7 5 | 3 1 ]      frames by their first unit
                 free ^ top           the last page freed is the first one given out: its memory is warm

    With one size every free page is as good as any other, so nothing is searched, split or merged.
    """

    def __init__(self, total_units: int, page_units: int) -> None:
        frames = total_units // page_units
        self._stack = np.arange(1, 1 + frames * page_units, page_units, dtype=np.int32)[::-1].copy()
        self._top = frames

    @property
    def free_pages(self) -> int:
        return self._top

    def allocate(self, count: int) -> NDArray[np.int32]:
        """First units of ``count`` pages; at most ``free_pages`` may be asked for."""
        assert count <= self._top, f"{count} pages asked for, {self._top} free"
        self._top -= count
        return self._stack[self._top : self._top + count][::-1].copy()

    def free(self, pages: NDArray[np.int32]) -> None:
        """Give pages back; the last of them is given out first."""
        self._stack[self._top : self._top + len(pages)] = pages
        self._top += len(pages)

    def check(self) -> NDArray[np.int32]:
        """The free pages, after making sure that none is listed twice."""
        free = self._stack[: self._top]
        if len(np.unique(free)) != len(free):
            raise AssertionError("a page is on the free stack twice")
        return free
