"""Give up the page that was not read for longest."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """Credit: the step that read the page last."""

    reads_shares: ClassVar[bool] = False

    def rank(self, credit: Tensor, distance: Tensor) -> Tensor:
        return credit

    def swept(self, credit: Tensor, distance: Tensor, last: Tensor) -> Tensor:
        return credit

    def touched(self, credit: Tensor, now: Tensor, shares: Tensor) -> Tensor:
        return now.expand_as(credit)
