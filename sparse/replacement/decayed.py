"""Give up the page whose part of what was chosen is least, older steps counting less."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class DecayedShare:
    """The sum of a page's shares of the scores, times ``decay`` for every step since (InfLLM, arXiv 2402.04617, section
    2.2, which adds up shares of attention).

    Credit: its logarithm, plus -log(decay) for every step of the sequence. That keeps the order, and a page that is not
    read needs no update; fp64 does not overflow. A page that comes has credit 0, which soon is nothing.

    Deviations: shares are a softmax over the scores of the chosen pages, whatever the scorer is.
    """

    decay: float = 0.9
    reads_shares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise ValueError(f"replacement.decay={self.decay} must be between 0 and 1")

    def rank(self, credit: Tensor, distance: Tensor) -> Tensor:
        return credit

    def swept(self, credit: Tensor, distance: Tensor, last: Tensor) -> Tensor:
        return credit

    def touched(self, credit: Tensor, now: Tensor, shares: Tensor) -> Tensor:
        return credit.logaddexp(shares.log() - now * math.log(self.decay))
