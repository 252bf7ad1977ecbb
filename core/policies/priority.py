"""Evict what the least important requests have used."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces import PageFacts


@dataclass(frozen=True)
class PriorityClasses:
    """Four classes by the highest priority of the requests that used a page; within one, least recently used.

    Low: below ``low_below``. High: from ``high_from``. Pinned: from ``pinned_from``, never evicted. Else normal.
    """

    low_below: int = 0
    high_from: int = 1
    pinned_from: int = 100
    history: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not self.low_below <= self.high_from <= self.pinned_from:
            raise ValueError(
                f"the classes overlap: low_below {self.low_below}, high_from {self.high_from} and pinned_from "
                f"{self.pinned_from} must not fall"
            )

    def rank(self, pages: NDArray[np.int32], facts: PageFacts) -> NDArray[np.float64]:
        bounds = [self.low_below, self.high_from, self.pinned_from]
        ranks = np.array([0.0, 1.0, 2.0, np.inf])
        return ranks[np.searchsorted(bounds, facts.priority[pages], side="right")]
