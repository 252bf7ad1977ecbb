"""Selectors: from scores to pages."""

from dataclasses import dataclass

from torch import Tensor

from octavo.core.interfaces import PageView, Selection


@dataclass(frozen=True)
class TopK:
    """The kept pages, then the best scores, until the budget is spent; equal scores go to the lower page."""

    def select(self, scores: Tensor, budget: Tensor, keep: Tensor, pages: PageView, most: int) -> Selection:
        return pages.top(scores, budget, keep, most)
