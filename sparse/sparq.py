"""SparQ (arXiv 2312.04985): scores from the largest components of the query."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.interfaces import ModelSpec, PageView
from octavo.sparse.checks import check_integer
from octavo.sparse.ranking import grouped
from octavo.sparse.scorers import Scored


@dataclass(frozen=True)
class LargestChannels(Scored):
    """A page's share of attention, estimated from the ``channels`` in which the query is largest (SparQ attention,
    arXiv 2312.04985, section 4, steps 1 and 2):

    1. i = the channels of largest |q|, summed over the query heads of a KV head;
    2. softmax over tokens of q_i . k_i / sqrt(D * |q_i| / |q|), norms being sums of absolute values;
    3. its sum over each page, the mean of a group.

    Needs no digest: it reads ``channels`` of the D elements of every key, all where D is less. Deviations: pages
    instead of tokens; the output is not mixed with the mean value vector (step 3 of the paper); the bytes are those of
    the elements, although a device fetches whole sectors of 32 bytes where the pool has no second copy of K by channel.
    """

    shares: ClassVar[bool] = True
    channels: int = 16

    def __post_init__(self) -> None:
        check_integer("scorer.channels", self.channels, 1)

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        q = grouped(q, pages.kv_heads)
        sizes = q.abs()  # [b, Hkv, g, D]
        largest = sizes.sum(2).argsort(dim=-1, descending=True, stable=True)[..., : self.channels]
        keys = pages.keys(largest).float()  # [b, Hkv, P * p, r]
        wide = largest.unsqueeze(2).expand(-1, -1, q.shape[2], -1)
        covered = sizes.gather(3, wide).sum(3) / sizes.sum(3)  # [b, Hkv, g]
        logits = torch.einsum("bhgr,bhtr->bhgt", q.gather(3, wide), keys)
        # The layer's own scale stands for 1 / sqrt(D); fewer channels make smaller logits.
        logits = logits * (pages.traits.scale * covered.rsqrt()).unsqueeze(-1)
        token = torch.arange(logits.shape[3], device=q.device)
        exists = token < pages.lengths[:, None, None, None]
        probs = logits.masked_fill(~exists, -torch.inf).softmax(-1)
        return probs.unflatten(3, (pages.max_pages, pages.page_tokens)).sum(4).mean(2)

    def elements(self, tokens: int, spec: ModelSpec, page_tokens: int) -> int:
        return tokens * min(self.channels, spec.head_dim)
