"""Budgets: how much each KV head may read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.interfaces import PageView


@dataclass(frozen=True)
class Uniform:
    """The same number of tokens for every layer and KV head, rounded up to whole pages."""

    tokens: int

    def __post_init__(self) -> None:
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"budget.tokens must be an integer of at least 1, got {self.tokens!r}")

    def max_pages(self, layer: int, page_tokens: int) -> int:
        return -(-self.tokens // page_tokens)

    def allocate(self, scores: Tensor, pages: PageView) -> Tensor:
        most = self.max_pages(pages.layer, pages.page_tokens)
        return torch.full(scores.shape[:2], most, dtype=torch.int64, device=scores.device)
