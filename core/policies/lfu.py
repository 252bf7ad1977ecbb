"""Evict the page that was used least often."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces import PageFacts


@dataclass(frozen=True)
class LeastFrequentlyUsed:
    """By the number of uses since publication, which is the first; among equals the least recently used."""

    history: ClassVar[int] = 1

    def rank(self, pages: NDArray[np.int32], facts: PageFacts) -> NDArray[np.float64]:
        return facts.uses[pages].astype(np.float64)
