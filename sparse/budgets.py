"""Budgets: how much each KV head may read."""

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from octavo.core.interfaces import PageView
from octavo.sparse.checks import check_integer


@runtime_checkable
class JointBudget(Protocol):
    """What a budget also has that the heads of all layers share, which goes with methods that drop tokens."""

    def divide(self, scores: Tensor, page_tokens: int) -> Tensor:
        """int64 [L, H] pages that each head of each layer gets, for scores fp32 [L, H, P], infinite for those that are
        kept in any case, minus infinite for what is no page."""
        ...


@dataclass(frozen=True)
class Uniform:
    """The same number of tokens for every layer and KV head, rounded up to whole pages."""

    tokens: int
    needs_shares: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_integer("budget.tokens", self.tokens, 1)

    def pages(self, layer: int, layers: int, page_tokens: int) -> int:
        return -(-self.tokens // page_tokens)

    def most(self, layer: int, layers: int, page_tokens: int, heads: int) -> int:
        return self.pages(layer, layers, page_tokens)

    def allocate(self, scores: Tensor, keep: Tensor, pages: PageView) -> Tensor:
        budget, rows = self.pages(pages.layer, pages.layers, pages.page_tokens), scores.shape[:2]
        return pages.once(("budget", budget, rows), lambda: torch.full(rows, budget, device=scores.device))
