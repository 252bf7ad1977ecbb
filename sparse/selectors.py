"""Selectors: from scores to pages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.interfaces import PageView, Selection
from octavo.sparse.ranking import kept_first


@dataclass(frozen=True)
class TopK:
    """The kept pages, then the best scores, until the budget is spent; equal scores go to the lower page."""

    def select(self, scores: Tensor, budget: Tensor, keep: Tensor, pages: PageView, most: int) -> Selection:
        return pages.top(scores, budget, keep, most)


@dataclass(frozen=True)
class Unified:
    """One list for all heads of a layer: the first choices of all heads, then the second choices, and so on, until the
    budget is spent (LessIsMore, arXiv 2508.07101, section 3.2). A page is read for all heads or for none.

    Deviations: pages instead of tokens, and KV heads choose, where the paper lets query heads choose. The share of the
    budget for recent tokens (a quarter in the paper) is the method's ``keep``.
    """

    def select(self, scores: Tensor, budget: Tensor, keep: Tensor, pages: PageView, most: int) -> Selection:
        heads, width = scores.shape[1:]
        order = kept_first(scores, keep, pages).argsort(dim=2, descending=True, stable=True)
        choice = torch.empty_like(order).scatter_(2, order, torch.arange(width, device=order.device).expand_as(order))
        turn = choice * heads + torch.arange(heads, device=order.device)[:, None]
        earliest = -turn.amin(1, keepdim=True).float()  # [b, 1, P]
        return pages.top(earliest, budget.amax(1, keepdim=True), keep, most)
