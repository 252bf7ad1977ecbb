"""Evict the page whose K-th last use is the oldest."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces import PageFacts


@dataclass(frozen=True)
class LruK:
    """LRU-K (O'Neil, O'Neil and Weikum, SIGMOD 1993): pages with fewer than ``k`` uses first, the least recently used
    of them in front; then by the ``k``-th last use, so that one passing use does not make a page look popular.

    All steps of a request that read a page are one use (the paper's correlated references). Nothing is remembered of
    a page that was evicted (its retained information).
    """

    k: int = 2

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"lru_k needs k of at least 1, not {self.k}; 2 is usual, and 1 is by the latest use alone")

    @property
    def history(self) -> int:
        return self.k

    def rank(self, pages: NDArray[np.int32], facts: PageFacts) -> NDArray[np.float64]:
        kth_last: NDArray[np.int64] = facts.history[pages, self.k - 1]
        return kth_last.astype(np.float64)
