"""Give up the page that came first."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class FirstInFirstOut:
    """The frames in turn, from the clock's hand on; reading a page changes nothing."""

    reads_shares: ClassVar[bool] = False

    def rank(self, credit: Tensor, distance: Tensor) -> Tensor:
        return distance

    def swept(self, credit: Tensor, distance: Tensor, last: Tensor) -> Tensor:
        return credit

    def touched(self, credit: Tensor, now: Tensor, shares: Tensor) -> Tensor:
        return credit
