"""SparseVLM (arXiv 2410.04417): the words of the question that look at images rate their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.compression.interfaces import Context, LayerContext
from octavo.sparse.checks import check_integer, check_share
from octavo.sparse.text_attention import at_tokens, by_position, image_positions, text_attention
from octavo.sparse.token_scores import Rated
from octavo.sparse.visual_shares import check_keep_share, spread


def rater_attention(layer: LayerContext, context: Context) -> Tensor:
    """The attention of the *raters* to images, fp32 [raters, tokens of the sequence], 0 elsewhere: of the text tokens
    behind the last image, those that put at least as much of it on images as the average one."""
    attention = by_position(text_attention(layer, context), layer, context)  # [t, tokens]
    at = image_positions(context, attention.device)
    seen = torch.zeros_like(attention).index_copy(1, at, attention[:, at])
    mass = seen.sum(1)
    return seen[mass >= mass.mean() - 1e-9]


@dataclass(frozen=True)
class RaterAttention(Rated):
    """The mean attention of the raters in the layer itself, over all query heads (SparseVLM, arXiv 2410.04417,
    section 3).

    Of the text behind the last image the last ``window`` tokens may be raters. Deviations: the paper picks raters once,
    by the similarity of their embeddings with the images' in front of the first layer; pruned tokens are not clustered
    and recycled.
    """

    window: int = 64  # type: ignore[misc]
    behind_items: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer("scorer.window", self.window, 1)

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        return at_tokens(rater_attention(layer, context).mean(0), layer)


@dataclass(frozen=True)
class RankShares:
    """Layers keep shares in proportion to the rank of the raters' attention to images, none less than ``least`` of the
    average (SparseVLM, section 3: of L tokens, those that exceed the rank are redundant).

    Deviation: the paper drops a fixed ratio of L less the rank, so that ranks decide how much is kept in all; here
    ``share`` does, for comparisons at equal bytes, and ranks divide it.
    """

    share: float
    window: int = 64
    least: float = 0.1

    def __post_init__(self) -> None:
        check_keep_share(self.share)
        check_integer("budget.window", self.window, 1)
        check_share("budget.least", self.least)

    def of_layers(self, context: Context, layers: Sequence[int]) -> list[float]:
        ranks = [float(torch.linalg.matrix_rank(rater_attention(context.layer(n), context).double())) for n in layers]
        return spread(ranks, self.share, self.least * self.share)
