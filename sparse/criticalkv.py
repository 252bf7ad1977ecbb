"""CriticalKV (arXiv 2502.03805): a token counts by what it adds to the layer's output."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.compression.interfaces import Context, LayerContext, TokenScorer
from octavo.sparse.checks import check_integer, check_number
from octavo.sparse.token_scores import Rated

EPSILON = 1e-4
"""Of attention, so that a token without any is rated by its value."""


@dataclass(frozen=True)
class OutputNorm(Rated):
    """Two stages (CriticalKV, arXiv 2502.03805, algorithm 1):

    1. ``first_share`` of the budget goes to the tokens with most ``attention``;
    2. the rest are rated by attention times the L1 norm of their value behind the output projection, |W_o v|, the mean
       over the query heads of a KV head.

    ``budget_tokens`` is the average budget of a head, which says how many the first stage takes.
    """

    attention: TokenScorer
    budget_tokens: int
    first_share: float = 0.5
    shares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer("scorer.budget_tokens", self.budget_tokens, 1)
        check_number("scorer.first_share", self.first_share, 0, 1)

    @property
    def window(self) -> int:  # type: ignore[override]
        return self.attention.window

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        attention = self.attention.score(layer, context)
        recent = layer.positions >= context.tokens - self.window  # the window is kept, and counts
        attention = attention.masked_fill(recent, torch.inf)
        sure = int(self.first_share * self.budget_tokens)
        first = attention.argsort(dim=1, descending=True, stable=True)[:, :sure]
        rated = (attention.masked_fill(recent, 0.0) + EPSILON) * output_norms(layer)
        return rated.scatter(1, first, torch.finfo(torch.float32).max)


def output_norms(layer: LayerContext) -> Tensor:
    """|W_o v|_1 of every token, fp32 [Hkv, N], the mean over the query heads of each KV head."""
    heads, _, dim = layer.values.shape
    weight: Tensor = layer.module.o_proj.weight  # type: ignore[union-attr, assignment]
    by_head = weight.float().view(weight.shape[0], heads, -1, dim)  # [hidden, Hkv, g, D]
    norms = [
        torch.stack([(layer.values[h].float() @ by_head[:, h, i].mT).abs().sum(1) for i in range(by_head.shape[2])])
        for h in range(heads)
    ]
    return torch.stack(norms).mean(1)
