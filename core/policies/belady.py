"""Evict the page whose next use is farthest away: the bound for every other policy, on a recorded trace."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces import PageFacts

NEVER = np.iinfo(np.int64).max
"""The next use of a page that is not used again."""


@dataclass(frozen=True)
class Belady:
    """MIN (Belady, IBM Systems Journal 5(2), 1966): no policy has more hits where pages are of one size and cost and
    none needs another; with chains it is a very good one, but no proven bound.

    ``next_use`` gives, for pages int32 [n] that become idle now, the place of each one's next use in the trace, int64
    [n], or ``NEVER``. Until that use the answer does not change, so asking once is enough. Places are told apart up to
    2^53.
    """

    next_use: Callable[[NDArray[np.int32]], NDArray[np.int64]]
    history: ClassVar[int] = 1

    def rank(self, pages: NDArray[np.int32], facts: PageFacts) -> NDArray[np.float64]:
        return -self.next_use(pages).astype(np.float64)
