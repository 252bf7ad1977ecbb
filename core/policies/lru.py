"""Evict the page that has not been used for longest."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces import PageFacts


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """By the last step in which somebody held the page; of one chain the tail first."""

    history: ClassVar[int] = 1

    def rank(self, pages: NDArray[np.int32], facts: PageFacts) -> NDArray[np.float64]:
        return facts.last_used[pages].astype(np.float64)
