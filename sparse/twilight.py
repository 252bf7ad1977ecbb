"""Twilight (arXiv 2502.02770): a budget in attention mass."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from octavo.core.interfaces import PageView
from octavo.sparse.budgets import Uniform
from octavo.sparse.ranking import kept_first, sealed


@dataclass(frozen=True)
class TopP(Uniform):
    """As few pages as are estimated to hold ``mass`` of a head's attention, ``tokens`` at most (Twilight, arXiv
    2502.02770, section 4.1).

    Deviations: whole pages, and the scorer's estimate of their shares; the paper prunes tokens by an estimate from an
    int4 copy of the keys. The open page is read in any case and counts for nothing, since it has no estimate.
    """

    mass: float = 0.95
    needs_shares: ClassVar[bool] = True
    adaptive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mass <= 1:
            raise ValueError(f"budget.mass must be above 0 and at most 1, got {self.mass!r}")

    def allocate(self, scores: Tensor, keep: Tensor, pages: PageView) -> Tensor:
        order = kept_first(scores, keep, pages).argsort(dim=2, descending=True, stable=True)
        shares = scores.nan_to_num(nan=0.0).where(sealed(pages), 0.0)
        held = (shares / shares.sum(2, keepdim=True)).gather(2, order).cumsum(2)
        needed = (held < self.mass).sum(2) + 1  # the page with which the mass is reached
        kept = (keep & (sealed(pages)[:, 0])).sum(1)[:, None] + 1  # the open page is not part of `held`
        budget = self.pages(pages.layer, pages.layers, pages.page_tokens)
        return needed.maximum(kept).clamp(max=budget)
