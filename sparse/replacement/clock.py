"""Give up the first page behind the clock's hand that was not read since the hand passed it."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Clock:
    """CLOCK, or second chance (Corbato, MIT Project MAC, 1968): the hand passes a page that was read, and forgets that
    it was; the next time round it is given up.

    Credit: 1 if the page was read since. Several pages that are given up at once are those that one after the other
    would be: first the unread ones in the order of their distance, then, the second time round, the others.
    """

    reads_shares: ClassVar[bool] = False

    def rank(self, credit: Tensor, distance: Tensor) -> Tensor:
        return distance + credit * distance.shape[-1]

    def swept(self, credit: Tensor, distance: Tensor, last: Tensor) -> Tensor:
        return credit.masked_fill(distance <= last, 0.0)

    def touched(self, credit: Tensor, now: Tensor, shares: Tensor) -> Tensor:
        return credit.new_ones(()).expand_as(credit)
