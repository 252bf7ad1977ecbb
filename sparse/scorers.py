"""Scorers: what a page is worth to a query. Each is one piece of maths with its source."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from octavo.core.interfaces import ModelSpec, PageView


class Scored:
    """What most scorers have in common: they draw nothing, the host waits for nothing, their scores are no shares of
    attention, and what they read are digests, if anything."""

    parts: ClassVar[frozenset[str]] = frozenset()
    draws: ClassVar[bool] = False
    waits: ClassVar[bool] = False
    shares: ClassVar[bool] = False

    def elements(self, tokens: int, spec: ModelSpec, page_tokens: int) -> int:
        return 0

    def elements_of(self, shape: tuple[int, ...]) -> int:
        return prod(shape)

    def narrowing(self, budget: int, tokens: int, spec: ModelSpec, page_tokens: int) -> int:
        return 0


@dataclass(frozen=True)
class UpperBound(Scored):
    """The largest dot product that any key in a page's min-max box could have with the query (Quest, arXiv
    2406.10774, section 3.3): sum_d max(q_d min_d, q_d max_d) = relu(q) . max + min(q, 0) . min.

    ``group`` reduces over the query heads of a KV head: "max" of the bounds, or "mean" of their softmax over pages,
    which are shares of attention.
    """

    parts: ClassVar[frozenset[str]] = frozenset({"min", "max"})
    group: Literal["max", "mean"] = "max"

    def __post_init__(self) -> None:
        if self.group not in ("max", "mean"):
            raise ValueError(f"scorer.group must be 'max' or 'mean', got {self.group!r}")

    @property
    def shares(self) -> bool:  # type: ignore[override]
        return self.group == "mean"

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        if self.group == "max":
            return pages.bounds(q)
        probs = (pages.bounds(q, per_query_head=True) * pages.traits.scale).softmax(2)  # [b, Hq, P]
        return probs.unflatten(1, (pages.kv_heads, -1)).mean(2)


@dataclass(frozen=True)
class TrueMass(Scored):
    """The softmax mass that dense attention puts on each page: the upper bar of every comparison. It reads all of K,
    so it saves nothing where every layer chooses."""

    shares: ClassVar[bool] = True

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        return pages.mass(q)

    def elements(self, tokens: int, spec: ModelSpec, page_tokens: int) -> int:
        return tokens * spec.head_dim


@dataclass(frozen=True)
class Recency(Scored):
    """The later page is worth more, the same for all heads: with sinks kept, the window of StreamingLLM (arXiv
    2309.17453) on pages. Keys keep their original positions; the paper renumbers them inside the window."""

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        page = torch.arange(pages.max_pages, device=q.device, dtype=torch.float32)
        return page.expand(len(q), 1, -1)


@dataclass(frozen=True)
class Random(Scored):
    """A fresh random order of pages for each step, layer and KV head: the lower bar of every comparison.

    A hash of (request seed, length, layer, head, page), so it does not depend on batch mates or preemption.
    """

    draws: ClassVar[bool] = True

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        kv_heads = pages.kv_heads
        page = torch.arange(pages.max_pages, device=q.device)
        head = torch.arange(kv_heads, device=q.device)[:, None]
        start = pages.seeds + (pages.lengths.long() << 40) + (pages.layer << 32)
        x = start[:, None, None] + (head << 24) + page  # [b, Hkv, P]
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):  # SplitMix64 finaliser
            x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
        return (x & 0xFFFFFF).float()
