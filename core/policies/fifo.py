"""Evict the page that was published first."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces import PageFacts


@dataclass(frozen=True)
class FirstInFirstOut:
    """By the step in which the page became findable; later uses do not count."""

    history: ClassVar[int] = 1

    def rank(self, pages: NDArray[np.int32], facts: PageFacts) -> NDArray[np.float64]:
        return facts.published[pages].astype(np.float64)
