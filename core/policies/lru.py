"""Evict the page that has been idle longest."""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class LeastRecentlyUsed:
    """Idle pages in the order in which they became idle.

    A table releases its pages tail first, and whoever uses a page uses all pages before it in the chain, so in this
    order a page always comes after the pages that can only be reached through it: taking from the front never breaks
    a chain.
    """

    def __init__(self) -> None:
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def add(self, pages: Iterable[int]) -> None:
        """Pages that became idle, in the order in which they may go."""
        for page in pages:
            self._idle[page] = None

    def remove(self, pages: Iterable[int]) -> None:
        """Pages that are in use again."""
        for page in pages:
            del self._idle[page]

    def evict(self, count: int) -> list[int]:
        """The ``count`` pages to give up, which are forgotten here."""
        return [self._idle.popitem(last=False)[0] for _ in range(count)]

    def check(self) -> NDArray[np.int32]:
        """The idle pages."""
        return np.fromiter(self._idle, np.int32, len(self._idle))
