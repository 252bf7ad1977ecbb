"""Tokens are kept by the attention that they have got: H2O (arXiv 2306.14048) and TOVA (arXiv 2401.06104)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.compression.interfaces import Context, LayerContext
from octavo.sparse.checks import check_integer
from octavo.sparse.snapkv import window_attention
from octavo.sparse.token_scores import Rated


@dataclass(frozen=True)
class AccumulatedAttention(Rated):
    """All the attention that a token has got until now, added up over queries, the mean over the query heads of a KV
    head (H2O, arXiv 2306.14048, section 4).

    Queries that ran before the method decided last are in the sum already, with what they saw then. Of the prompt the
    last ``window`` queries count; the paper counts all. The paper keeps half of the budget for recent tokens, which is
    what ``keep`` is for.
    """

    shares: ClassVar[bool] = True
    carries: ClassVar[bool] = True
    window: int = 512  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_integer("scorer.window", self.window, 1)

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        return layer.carried + window_attention(layer, context).sum(2).mean(1)


@dataclass(frozen=True)
class LastAttention(Rated):
    """What the last query attends to, the mean over all query heads of the layer, so that all KV heads keep the same
    tokens (TOVA, arXiv 2401.06104, section 4)."""

    window: ClassVar[int] = 1

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        attention = window_attention(layer, context)[:, :, -1]  # [Hkv, g, N]
        return torch.broadcast_to(attention.mean((0, 1)), layer.positions.shape)
