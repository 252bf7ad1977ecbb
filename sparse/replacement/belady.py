"""Give up the page that is read farthest in the future: the bound for every other policy, on a recorded trace."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Belady:
    """MIN (Belady, IBM Systems Journal 5(2), 1966): no policy that fetches what is missing, and nothing else, misses
    less.

    In place of its share a page brings the step of its next use (``octavo.sparse.resident_trace``). Credit: minus that.
    """

    reads_shares: ClassVar[bool] = True

    def rank(self, credit: Tensor, distance: Tensor) -> Tensor:
        return credit

    def swept(self, credit: Tensor, distance: Tensor, last: Tensor) -> Tensor:
        return credit

    def touched(self, credit: Tensor, now: Tensor, shares: Tensor) -> Tensor:
        return -shares
