"""Ada-KV (arXiv 2407.11550): one budget over all heads of a layer."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from octavo.core.interfaces import PageView
from octavo.sparse.budgets import Uniform
from octavo.sparse.checks import check_number
from octavo.sparse.ranking import kept_first


@dataclass(frozen=True)
class AdaHeads(Uniform):
    """The KV heads of a layer share ``tokens`` each on average: the best pages of all heads are read, whosever they are
    (Ada-KV, arXiv 2407.11550, algorithm 1), and every head gets at least ``floor`` of the average (section 3.4).

    Deviations: pages instead of tokens, chosen at every step and kept in the pool; the paper drops tokens once, by
    SnapKV's scores. The pages that ``keep`` names count as won by every head.
    """

    floor: float = 0.2
    needs_shares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("budget.floor", self.floor, 0, 1)

    def _floor(self, pages: int) -> int:
        """Pages that a head gets for sure; the open one is always read."""
        return max(1, int(self.floor * pages))

    def most(self, layer: int, layers: int, page_tokens: int, heads: int) -> int:
        pages = self.pages(layer, layers, page_tokens)
        return heads * pages - (heads - 1) * self._floor(pages)

    def allocate(self, scores: Tensor, keep: Tensor, pages: PageView) -> Tensor:
        heads = scores.shape[1]
        budget = self.pages(pages.layer, pages.layers, pages.page_tokens)
        ranked = kept_first(scores, keep, pages).sort(2, descending=True).values  # [b, H, P]
        ranked[..., : self._floor(budget)] = torch.inf
        # Stable, so that equal scores go to the same head on every backend.
        order = ranked.flatten(1).argsort(dim=1, descending=True, stable=True)
        winners = order[:, : heads * budget] // pages.max_pages
        return one_hot(winners, heads).sum(1)
