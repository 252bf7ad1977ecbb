"""Give up the page that was read least often."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

STEPS = 2.0**24
"""More steps than a sequence has, so that the last one fits beside a count: 2^29 reads are still told apart in fp64."""


@dataclass(frozen=True)
class LeastFrequentlyUsed:
    """Credit: reads since the page came, and among equals the step of the last."""

    reads_shares: ClassVar[bool] = False

    def rank(self, credit: Tensor, distance: Tensor) -> Tensor:
        return credit

    def swept(self, credit: Tensor, distance: Tensor, last: Tensor) -> Tensor:
        return credit

    def touched(self, credit: Tensor, now: Tensor, shares: Tensor) -> Tensor:
        return ((credit / STEPS).floor() + 1) * STEPS + now
