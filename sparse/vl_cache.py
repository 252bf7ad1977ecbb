"""VL-Cache (arXiv 2410.23317): the attention of the text behind the images rates tokens, and its sparsity layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.compression.interfaces import Context, LayerContext
from octavo.sparse.checks import check_integer, check_share
from octavo.sparse.text_attention import text_attention
from octavo.sparse.token_scores import Rated
from octavo.sparse.visual_shares import check_keep_share, spread


@dataclass(frozen=True)
class PostVisionAttention(Rated):
    """Post-vision attention: what the text behind the last image attends to, added up over its tokens, the mean over
    the query heads of a KV head (VL-Cache, arXiv 2410.23317, section 4). The last ``window`` of them count."""

    window: int = 64  # type: ignore[misc]
    behind_items: ClassVar[bool] = True
    shares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer("scorer.window", self.window, 1)

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        return text_attention(layer, context).sum(2).mean(1)


@dataclass(frozen=True)
class SparsityShares:
    """Layers keep shares in proportion to how dense post-vision attention is there: the part of it that is at least
    ``threshold`` of the largest of its row, the mean over heads and rows; none keeps less than ``least`` (VL-Cache,
    section 4).

    Deviations: the paper divides a budget of all tokens, of which a part is for recent ones; here it is one of images,
    and text is kept.
    """

    share: float
    window: int = 64
    threshold: float = 0.01
    least: float = 0.01

    def __post_init__(self) -> None:
        check_keep_share(self.share)
        check_integer("budget.window", self.window, 1)
        for name in ("threshold", "least"):
            check_share(f"budget.{name}", getattr(self, name))

    def of_layers(self, context: Context, layers: Sequence[int]) -> list[float]:
        return spread([self._density(context.layer(n), context) for n in layers], self.share, self.least)

    def _density(self, layer: LayerContext, context: Context) -> float:
        attention = text_attention(layer, context)  # [Hkv, g, t, N]
        rows = torch.arange(context.tokens - attention.shape[2], context.tokens, device=attention.device)[:, None]
        seen = (layer.positions[:, None] >= 0) & (layer.positions[:, None] <= rows)  # [Hkv, t, N]
        large = (attention >= self.threshold * attention.amax(3, keepdim=True)) & seen.unsqueeze(1)
        return float((large.sum(3) / seen.sum(2).unsqueeze(1)).mean())
