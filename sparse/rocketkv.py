"""RocketKV (arXiv 2502.14051): tokens are dropped once, and a step chooses among those that are left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.interfaces import ModelSpec, PageView
from octavo.sparse.checks import check_integer
from octavo.sparse.digests import Digested
from octavo.sparse.ranking import grouped, sealed
from octavo.sparse.scorers import Scored


@dataclass(frozen=True)
class Split:
    """What the first stage keeps (RocketKV, section 3.4, "adaptive compression decomposition"): the whole compression
    c = sequence / read is split into c^a by dropping and c^(1 - a) by choosing, a = min(0.2 + 0.06 log2 c, 0.8).

    Deviations: the second stage reads ``read`` tokens whatever it reads to choose them, which the paper takes off.
    """

    def tokens(self, read: int, sequence: int) -> int:
        whole = max(1.0, sequence / read)
        return ceil(sequence / whole ** min(0.2 + 0.06 * log2(whole), 0.8))


@dataclass(frozen=True)
class ChunkBoxes(Digested):
    """Elementwise minimum and maximum of the keys of each ``chunk_tokens`` of a page, side by side in one vector, so
    that one of the two can be read a channel (RocketKV, section 3.3).

    Two vectors a chunk: ``1 / chunk_tokens`` of the page's own bytes. Deviation: the chunk is given; the paper takes
    the square root of what choosing has to compress, rounded up.
    """

    chunk_tokens: int = 4

    def __post_init__(self) -> None:
        check_integer("digest.chunk_tokens", self.chunk_tokens, 1)

    def spec(self, page_tokens: int, model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        if page_tokens % self.chunk_tokens:
            raise ValueError(f"digest.chunk_tokens={self.chunk_tokens} must divide the page of {page_tokens} tokens")
        return {"box": (model.kv_heads, page_tokens // self.chunk_tokens, 2 * model.head_dim)}

    def compute(self, k: Tensor, v: Tensor, layers: Sequence[int]) -> Mapping[str, Tensor]:
        chunks = k.unflatten(-2, (-1, self.chunk_tokens))  # [n, L, Hkv, chunks, chunk_tokens, D]
        return {"box": torch.cat([chunks.amin(-2), chunks.amax(-2)], -1)}


@dataclass(frozen=True)
class HybridBound(Scored):
    """A page's share of attention by the bounds of its chunks, in the ``channels`` in which the query is largest alone
    (RocketKV, section 3.3, "hybrid sparse attention"; the estimate is SparQ's, arXiv 2312.04985):

    1. I = the channels of largest |q|, added up over the query heads of a KV head;
    2. of each chunk and channel of I the maximum where that sum of q is above 0, and else the minimum: b;
    3. softmax over chunks of q_I . b / sqrt(D |q_I| / |q|), norms being sums of absolute values; the mean of a group;
    4. its sum over the chunks of a page.

    Deviations: pages are read instead of chunks; the open page, which is always read, has no part in the softmax.
    """

    parts: ClassVar[frozenset[str]] = frozenset({"box"})
    shares: ClassVar[bool] = True
    channels: int = 16

    def __post_init__(self) -> None:
        check_integer("scorer.channels", self.channels, 1)

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        q = grouped(q, pages.kv_heads)  # [b, Hkv, g, D]
        sizes, sums = q.abs(), q.sum(2)
        largest = sizes.sum(2).argsort(dim=-1, descending=True, stable=True)[..., : self.channels]  # [b, Hkv, r]
        side = largest + q.shape[3] * (sums.gather(2, largest) > 0)
        bounds = pages.digest("box", side).float()  # [b, P, Hkv, chunks, r]
        wide = largest.unsqueeze(2).expand(-1, -1, q.shape[2], -1)
        covered = sizes.gather(3, wide).sum(3) / sizes.sum(3)  # [b, Hkv, g]
        logits = torch.einsum("bhgr,bphcr->bhgpc", q.gather(3, wide), bounds)
        logits = logits * (pages.traits.scale * covered.rsqrt())[..., None, None]
        exists = sealed(pages)[:, :, None, :, None]  # [b, 1, 1, P, 1]
        shares = logits.masked_fill(~exists, -torch.inf).flatten(3).softmax(3).view_as(logits)
        return shares.sum(4).mean(2)

    def elements_of(self, shape: tuple[int, ...]) -> int:
        chunks, both = shape
        return chunks * min(self.channels, both // 2)
