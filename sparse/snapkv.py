"""SnapKV (arXiv 2404.14469): the end of the prompt says which tokens will be asked for."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from octavo.core.compression.interfaces import Context, LayerContext
from octavo.sparse.checks import check_integer
from octavo.sparse.ranking import grouped
from octavo.sparse.token_scores import Rated


def window_attention(layer: LayerContext, context: Context) -> Tensor:
    """The attention of the observed queries, fp32 [Hkv, g, w, N], each over what it sees; 0 in padding."""
    queries = grouped(layer.queries, len(layer.keys)).permute(1, 2, 0, 3)  # [Hkv, g, w, D]
    logits = (queries @ layer.keys.float().mT.unsqueeze(1)) * layer.traits.scale
    if layer.traits.softcap:
        logits = layer.traits.softcap * (logits / layer.traits.softcap).tanh()
    at = torch.arange(context.tokens - queries.shape[2], context.tokens, device=logits.device)[:, None]
    seen = (layer.positions[:, None] >= 0) & (layer.positions[:, None] <= at)  # [Hkv, w, N]
    return logits.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)


@dataclass(frozen=True)
class ObservedAttention(Rated):
    """What the last ``window`` tokens of the prompt attend to (SnapKV, arXiv 2404.14469, section 4):

    1. the attention of each of their queries to every token in front of the window, added up;
    2. pooled over ``kernel`` neighbouring tokens ("mean" or "max"), so that what stands beside a needle stays with it;
    3. the mean over the query heads of a KV head, as one cache serves them all; the paper's code keeps a copy of the
       cache for each.

    The window itself is what ``keep.recent_tokens`` keeps: give that the same number.
    """

    shares: ClassVar[bool] = True
    window: int = 32  # type: ignore[misc]
    kernel: int = 5
    pooling: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        check_integer("scorer.window", self.window, 1)
        check_integer("scorer.kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"scorer.kernel={self.kernel} must be odd, so that a token is in the middle of its pool")
        if self.pooling not in ("mean", "max"):
            raise ValueError(f"scorer.pooling must be 'mean' or 'max', got {self.pooling!r}")

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        attention = window_attention(layer, context)
        prefix = layer.positions < context.tokens - attention.shape[2]
        mass = attention.mean(2).masked_fill(~prefix.unsqueeze(1), 0.0)  # [Hkv, g, N]
        pool = avg_pool1d if self.pooling == "mean" else max_pool1d
        return pool(mass, self.kernel, stride=1, padding=self.kernel // 2).mean(1)
