"""Budgets: how much each KV head may read."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.interfaces import PageView


def check_tokens(name: str, value: int) -> None:
    """Raises ValueError unless ``value`` is a whole number of tokens, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"budget.{name} must be an integer of at least 1, got {value!r}")


@dataclass(frozen=True)
class Uniform:
    """The same number of tokens for every layer and KV head, rounded up to whole pages."""

    tokens: int
    needs_shares: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_tokens("tokens", self.tokens)

    def pages(self, layer: int, layers: int, page_tokens: int) -> int:
        return -(-self.tokens // page_tokens)

    def most(self, layer: int, layers: int, page_tokens: int, heads: int) -> int:
        return self.pages(layer, layers, page_tokens)

    def allocate(self, scores: Tensor, keep: Tensor, pages: PageView) -> Tensor:
        budget = self.pages(pages.layer, pages.layers, pages.page_tokens)
        return torch.full(scores.shape[:2], budget, dtype=torch.int64, device=scores.device)
