"""Evict the page that is cheapest to make again."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces import PageFacts


@dataclass(frozen=True)
class RecomputeCost:
    """By the seconds of recomputation that each byte saves; among equals the least recently used."""

    history: ClassVar[int] = 1

    def rank(self, pages: NDArray[np.int32], facts: PageFacts) -> NDArray[np.float64]:
        return facts.recompute_s[pages] / facts.nbytes[pages]
