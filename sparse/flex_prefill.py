"""FlexPrefill (arXiv 2502.20766): every head finds its own pattern, and how much of it is enough."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.core.interfaces import QueryBlocks
from octavo.sparse.checks import check_integer, check_share
from octavo.sparse.prefill import Pattern, attention, crossed, fewest, lines


@dataclass(frozen=True)
class FlexPrefill(Pattern):
    """A choice by content where pooled queries and keys tell what is attended to, and else vertical lines and slashes;
    of either the fewest that hold a share of the attention, ``mass`` (FlexPrefill, arXiv 2502.20766, algorithms 1 to
    3). Of each block, and head:

    1. a, the attention of the block's queries to each page, and e, its estimate: the softmax of the dot products of
       the mean query with the mean key of each page.
    2. The square root of the Jensen-Shannon divergence of a and e (equation 4), at most ``divergence``: the head is
       *query-aware*, and reads the fewest pages whose e reach ``mass``.
    3. Otherwise it reads the fewest pages whose a reach ``mass``, and the pages that the fewest bands of distances with
       that ``mass`` cross.

    At least ``least_tokens`` of pages are read in either case, by the same order.

    Deviations: a page is the block of keys, and lines are as wide as a page; the queries that represent a block are its
    own, the paper's are the prompt's last block for all of them, which a prompt that comes in chunks does not know; so
    each block reaches ``mass`` by itself, where the paper's query-aware heads reach it over the whole map; the query
    heads of a KV head choose together, by their mean; ``least_tokens`` does not widen the choice of bands.
    """

    mass: float = 0.9
    divergence: float = 0.1
    least_tokens: int = 1024
    adaptive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("prefill.mass", self.mass)
        check_integer("prefill.least_tokens", self.least_tokens, 0)
        is_number = isinstance(self.divergence, int | float) and not isinstance(self.divergence, bool)
        if not (is_number and self.divergence >= 0):  # NaN is not
            raise ValueError(f"prefill.divergence must be a number of at least 0, got {self.divergence!r}")

    def _choose(self, blocks: QueryBlocks, page: Tensor) -> Tensor:
        p, own = blocks.page_tokens, blocks.block_tokens // blocks.page_tokens
        keys, least = blocks.keys(), -(-self.least_tokens // blocks.page_tokens)
        means = keys.float().mean(2).transpose(0, 1)  # [Hkv, P, D]
        found = []
        for end, queries in zip(blocks.ends.tolist(), blocks.q, strict=True):
            by_page, by_band = (x / len(queries) for x in lines(attention(queries, keys[:end], blocks.traits), p))
            pooled = queries.float().mean(0).view(len(means), -1, means.shape[2])  # [Hkv, g, D]
            logits = pooled @ means[:, :end].mT * blocks.traits.scale
            if blocks.traits.softcap:
                logits = blocks.traits.softcap * (logits / blocks.traits.softcap).tanh()
            estimate = logits.softmax(2).mean(1)  # [Hkv, end]
            aware = divergence(by_page, estimate) <= self.divergence
            slashes = crossed(fewest(by_band, self.mass), own)
            chosen = torch.where(
                aware[:, None], fewest(estimate, self.mass, least), fewest(by_page, self.mass, least) | slashes
            )
            found.append(pad(chosen, (0, len(page) - end)))
        return torch.stack(found)

    def _pages(self, everything: int, own: int, page_tokens: int) -> int:
        return everything


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence (natural logarithm) of distributions ``a, b`` [..., P]: fp32 [...],
    0 where they are equal, at most 0.833."""
    middle = (a + b) / 2
    halves = [torch.xlogy(x, x) - torch.xlogy(x, middle) for x in (a, b)]
    return ((halves[0] + halves[1]).sum(-1) / 2).clamp(min=0).sqrt()
