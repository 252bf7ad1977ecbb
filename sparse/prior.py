"""Priors: what a request knows of its own tokens joins what a scorer says of pages."""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from octavo.core.interfaces import PageView
from octavo.sparse.checks import check_share


@dataclass(frozen=True)
class Favoured:
    """Pages with a prior are lifted by ``weight`` times their prior times the range of the row's scores: with 1, a page
    of prior 1 comes before all pages of none, so it is as good as pinned; with less, it is favoured. That needs no
    scale of the scores, so it goes with any scorer.

    At most ``share`` of a head's budget goes to lifted pages: those of the largest prior, the later page first where it
    is equal. The kept pages come first all the same, and the budget stays what it is.
    """

    weight: float = 1.0
    share: float = 0.5

    def __post_init__(self) -> None:
        check_share("prior.share", self.share)
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not 0 < self.weight < inf:
            raise ValueError(f"prior.weight must be a number above 0, got {self.weight!r}")

    def favour(self, scores: Tensor, budget: Tensor, keep: Tensor, pages: PageView) -> Tensor:
        if pages.prior is None:
            return scores
        page = torch.arange(scores.shape[2], device=scores.device)
        free = (page < pages.n_pages[:, None] - 1) & ~keep  # [b, P]
        prior = pages.prior.masked_fill(~free, 0.0)
        order = prior.flip(1).argsort(dim=1, descending=True, stable=True)
        place = (
            torch.empty_like(order).scatter_(1, order, page.expand_as(order)).flip(1)
        )  # 0 for the first to be lifted
        most = (budget * self.share).long()[..., None]
        known = free[:, None] & scores.isfinite()
        high = scores.masked_fill(~known, -torch.inf).amax(2, keepdim=True)
        low = scores.masked_fill(~known, torch.inf).amin(2, keepdim=True)
        lift = (self.weight * prior)[:, None] * (high - low)
        return torch.where(known & (place[:, None] < most), scores + lift, scores)
