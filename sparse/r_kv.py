"""R-KV (arXiv 2505.24133): important and not redundant, for long generations that repeat themselves."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

from octavo.core.compression.interfaces import Context, LayerContext
from octavo.sparse.checks import check_integer, check_number
from octavo.sparse.ranking import grouped
from octavo.sparse.token_scores import Rated

KEYS_AT_ONCE = 256


@dataclass(frozen=True)
class ImportantAndDistinct(Rated):
    """``weight`` I - (1 - ``weight``) R (R-KV, arXiv 2505.24133, section 3):

    1. importance I: softmax over tokens of the largest logit of a group, the mean over the last ``window`` queries, and
       the largest of ``kernel`` neighbours;
    2. redundancy R: softmax over tokens of a key's mean cosine with all others. Of the keys that another is like (above
       ``threshold``) the latest is spared, so that of a repetition the last is kept.
    """

    shares: ClassVar[bool] = False
    window: int = 8  # type: ignore[misc]
    kernel: int = 7
    weight: float = 0.1
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_integer("scorer.window", self.window, 1)
        check_integer("scorer.kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"scorer.kernel={self.kernel} must be odd, so that a token is in the middle of its pool")
        check_number("scorer.weight", self.weight, 0, 1)
        check_number("scorer.threshold", self.threshold, -1, 1)

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        exists = layer.positions >= 0
        importance = max_pool1d(self._attention(layer, context), self.kernel, stride=1, padding=self.kernel // 2)
        redundancy = self._likeness(layer.keys, exists).masked_fill(~exists, -torch.inf).softmax(1)
        return self.weight * importance - (1 - self.weight) * redundancy

    def _attention(self, layer: LayerContext, context: Context) -> Tensor:
        """fp32 [Hkv, N]."""
        queries = grouped(layer.queries, len(layer.keys)).permute(1, 2, 0, 3)  # [Hkv, g, w, D]
        logits = (queries @ layer.keys.float().mT.unsqueeze(1)).amax(1) * layer.traits.scale  # [Hkv, w, N]
        at = torch.arange(context.tokens - logits.shape[1], context.tokens, device=logits.device)[:, None]
        seen = (layer.positions[:, None] >= 0) & (layer.positions[:, None] <= at)
        return logits.masked_fill(~seen, -torch.inf).softmax(-1).mean(1)

    def _likeness(self, keys: Tensor, exists: Tensor) -> Tensor:
        """Mean cosine of each key with the others, fp32 [Hkv, N], some spared."""
        directions = normalize(keys.float(), dim=-1)
        total = torch.zeros(exists.shape, device=keys.device)
        token = torch.arange(keys.shape[1], device=keys.device)
        for start in range(0, keys.shape[1], KEYS_AT_ONCE):
            rows = slice(start, start + KEYS_AT_ONCE)
            cosines = directions[:, rows] @ directions.mT  # [Hkv, rows, N]
            cosines = cosines.masked_fill(token[rows, None] == token, 0.0)
            alike = (cosines > self.threshold) & exists[:, None]
            latest = torch.where(alike, token, -1).amax(2, keepdim=True)  # [Hkv, rows, 1]
            total += cosines.masked_fill(token == latest, 0.0).masked_fill(~exists[:, rows, None], 0.0).sum(1)
        return total / exists.sum(1, keepdim=True)
