"""Prefill patterns: which pages a block of a prompt's queries reads. Each is one piece of maths with its source.

Blocks are those of the papers, 128 queries where they say so; what is chosen are pages, of which a block of keys is
several. The last, unfinished block of a prompt is dense, as in the papers, which all let the last queries see
everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.interfaces import (
    Digest,
    LayerTraits,
    ModelSpec,
    PagesRead,
    PageView,
    PrefillPattern,
    QueryBlocks,
    Selection,
)
from octavo.sparse.checks import check_integer, check_share, layer_numbers


@dataclass(frozen=True)
class Pattern:
    """What patterns have in common.

    Attributes:
        block_tokens: queries of a block; a multiple of the page size.
        dense_layers: layers in which every block reads all pages up to its end.
    """

    block_tokens: int = 128
    dense_layers: Sequence[int] = ()
    adaptive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_integer("prefill.block_tokens", self.block_tokens, 2)
        object.__setattr__(self, "dense_layers", layer_numbers("prefill.dense_layers", self.dense_layers))

    @property
    def provenance(self) -> str:
        return repr(self)

    def validate(self, spec: ModelSpec, page_tokens: int) -> None:
        name = type(self).__name__
        if spec.sinks:
            raise ValueError(
                f"prefill pattern {name}: {spec.name} has attention sinks, learned logits in each softmax that no "
                "pattern accounts for; compute its prompts densely (no prefill)"
            )
        if self.block_tokens % page_tokens:
            raise ValueError(
                f"prefill pattern {name}: blocks of {self.block_tokens} queries are no multiple of the page of "
                f"{page_tokens} tokens"
            )
        outside = [layer for layer in self.dense_layers if not 0 <= layer < spec.layers]
        if outside:
            raise ValueError(
                f"prefill pattern {name}: dense_layers {outside} are not among the {spec.layers} layers of {spec.name}"
            )

    def choose(self, blocks: QueryBlocks) -> Tensor:
        page = torch.arange(int(blocks.ends[-1]), device=blocks.q.device)
        if blocks.layer in self.dense_layers:
            return torch.ones((len(blocks.q), 1, len(page)), dtype=torch.bool, device=page.device)
        return self._choose(blocks, page)

    def predict(self, block: int, layer: int, spec: ModelSpec, page_tokens: int) -> PagesRead:
        block_pages = self.block_tokens // page_tokens
        everything = (block + 1) * block_pages
        if layer in self.dense_layers:
            return PagesRead(everything, 0)
        return PagesRead(
            self._pages(everything, block_pages, page_tokens), self._elements(everything, spec, page_tokens)
        )

    def _choose(self, blocks: QueryBlocks, page: Tensor) -> Tensor:
        """``choose`` in a layer that chooses; ``page [P]`` numbers the pages."""
        raise NotImplementedError

    def _pages(self, everything: int, own: int, page_tokens: int) -> int:
        """Pages of a KV head that a block reads which has so many up to its end, ``own`` of them its own."""
        raise NotImplementedError

    def _elements(self, everything: int, spec: ModelSpec, page_tokens: int) -> int:
        return everything * page_tokens * spec.head_dim


@dataclass(frozen=True)
class AShape(Pattern):
    """The first tokens and the last ones, for every head (MInference, arXiv 2407.02490, section 3.2, "A-shape"; after
    StreamingLLM, arXiv 2309.17453). Both round up to whole pages; the window is that of a block's first query."""

    sink_tokens: int = 64
    window_tokens: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("prefill.sink_tokens", self.sink_tokens, 0)
        check_integer("prefill.window_tokens", self.window_tokens, 0)

    def _choose(self, blocks: QueryBlocks, page: Tensor) -> Tensor:
        sinks, window = (-(-tokens // blocks.page_tokens) for tokens in (self.sink_tokens, self.window_tokens))
        own = blocks.ends - blocks.block_tokens // blocks.page_tokens  # the first page of each block
        return ((page < sinks) | (page >= own[:, None] - window))[:, None]

    def _pages(self, everything: int, own: int, page_tokens: int) -> int:
        sinks, window = (-(-tokens // page_tokens) for tokens in (self.sink_tokens, self.window_tokens))
        return min(everything, sinks + window + own)

    def _elements(self, everything: int, spec: ModelSpec, page_tokens: int) -> int:
        return 0


@dataclass(frozen=True)
class TopPages(Pattern):
    """As many pages as ``budget_tokens`` have, a block's own included: those whose mean key has the largest dot product
    with the block's mean query, both pooled over the heads' own rows (MInference, section 3.2, "block-sparse").

    Deviations: a page is the block of keys; the query heads of a KV head choose together, by the largest of them.
    """

    budget_tokens: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("prefill.budget_tokens", self.budget_tokens, 1)

    def _choose(self, blocks: QueryBlocks, page: Tensor) -> Tensor:
        queries = blocks.q.float().mean(1).unflatten(1, (blocks.kv_heads, -1))  # [N, Hkv, g, D]
        means = blocks.keys().float().mean(2)  # [P, Hkv, D]
        scores = torch.einsum("nhgd,phd->nhgp", queries, means).amax(2)
        own = blocks.block_tokens // blocks.page_tokens
        free = self._free(blocks.page_tokens)
        ends = blocks.ends.tolist()
        return torch.stack([_best(scores[n], end - own, free) for n, end in enumerate(ends)])

    def _free(self, page_tokens: int) -> int:
        """Pages besides a block's own."""
        return max(0, -(-self.budget_tokens // page_tokens) - self.block_tokens // page_tokens)

    def _pages(self, everything: int, own: int, page_tokens: int) -> int:
        return min(everything, own + self._free(page_tokens))


@dataclass(frozen=True)
class VerticalSlash(Pattern):
    """Vertical lines, keys that all queries of a block attend to, and slashes, keys at a fixed distance from the query
    (MInference, section 3.2, "vertical-slash"). The softmax of a block's last ``queries`` is summed over each page of
    keys, and over each band of distances, as wide as a page. Besides its own, a block reads the ``vertical_tokens`` of
    the best pages, and the pages that the best bands, of ``slash_tokens`` together, cross.

    Deviations: the last queries are those of each block, the paper's are those of the prompt, which a prompt that
    comes in chunks does not know; lines are as wide as a page; a band is read as the pages that it crosses at any of
    the block's queries; one size for all heads, where the paper searches for each head's offline.
    """

    queries: int = 64
    vertical_tokens: int = 512
    slash_tokens: int = 256
    adaptive: ClassVar[bool] = True  # lines cross, and bands lie side by side

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("prefill.queries", self.queries, 1)
        for name in ("vertical_tokens", "slash_tokens"):
            check_integer(f"prefill.{name}", getattr(self, name), 0)
        if self.queries > self.block_tokens:
            raise ValueError(f"prefill.queries={self.queries}: a block has {self.block_tokens} queries")

    def _choose(self, blocks: QueryBlocks, page: Tensor) -> Tensor:
        p, keys = blocks.page_tokens, blocks.keys()  # [P, Hkv, p, D]
        vertical, slash = -(-self.vertical_tokens // p), -(-self.slash_tokens // p)
        own = blocks.block_tokens // p
        found = []
        for end, queries in zip(blocks.ends.tolist(), blocks.q[:, -self.queries :], strict=True):
            by_page, by_band = lines(attention(queries, keys[:end], blocks.traits), p)
            columns = _best(by_page, end - own, vertical)
            chosen = columns | crossed(_best(by_band, end, slash), own)
            found.append(torch.nn.functional.pad(chosen, (0, len(page) - end)))
        return torch.stack(found)

    def _pages(self, everything: int, own: int, page_tokens: int) -> int:
        vertical, slash = -(-self.vertical_tokens // page_tokens), -(-self.slash_tokens // page_tokens)
        return min(everything, own + vertical + slash * (own + 1))


@dataclass(frozen=True)
class XAttention(Pattern):
    """The fewest blocks of keys whose scores reach a share of the whole, ``mass``, by antidiagonals (XAttention, arXiv
    2503.16428, sections 2.1 and 2.2). Of each square of ``stride`` queries and ``stride`` keys the scores on its
    antidiagonal are summed, which is one dot product of the queries in reverse order and the keys in order, each laid
    end to end; a softmax over all squares before a row of squares gives shares, which are summed over ``block_tokens``
    of queries and a page of keys.

    Deviations: a page is the block of keys; the query heads of a KV head choose together, by the mean of their shares;
    one ``mass`` for all heads (the paper also finds one a head, by dynamic programming).
    """

    stride: int = 8
    mass: float = 0.9
    adaptive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("prefill.stride", self.stride, 1)
        check_share("prefill.mass", self.mass)
        if self.block_tokens % self.stride:
            raise ValueError(
                f"prefill.stride={self.stride} must divide the block of {self.block_tokens} queries and the page"
            )

    def validate(self, spec: ModelSpec, page_tokens: int) -> None:
        super().validate(spec, page_tokens)
        if page_tokens % self.stride:
            raise ValueError(f"prefill.stride={self.stride} must divide the page of {page_tokens} tokens")

    def _choose(self, blocks: QueryBlocks, page: Tensor) -> Tensor:
        keys = blocks.keys().float().transpose(1, 2).flatten(0, 1)  # [P * p, Hkv, D]
        keys = keys.unflatten(0, (-1, self.stride)).transpose(1, 2).flatten(2)  # [squares, Hkv, stride * D]
        queries = blocks.q.float().unflatten(1, (-1, self.stride)).flip(2)  # [N, rows, stride, Hq, D]
        queries = (
            queries.transpose(2, 3).flatten(3).unflatten(2, (blocks.kv_heads, -1))
        )  # [N, rows, Hkv, g, stride * D]
        a_page = blocks.page_tokens // self.stride
        found = []
        for end, rows in zip(blocks.ends.tolist(), queries, strict=True):
            scores = torch.einsum("rhgc,shc->hgrs", rows, keys[: end * a_page]) * (blocks.traits.scale / self.stride)
            square = torch.arange(end * a_page, device=page.device)
            scores.masked_fill_(square > square[-len(rows) :, None], -torch.inf)
            shares = scores.softmax(3).mean((1, 2)).unflatten(1, (end, a_page)).sum(2)  # [Hkv, end]
            found.append(torch.nn.functional.pad(fewest(shares, self.mass), (0, len(page) - end)))
        return torch.stack(found)

    def _pages(self, everything: int, own: int, page_tokens: int) -> int:
        return everything


@dataclass(frozen=True)
class DenseDecode:
    """A prefill pattern alone: prompts are computed under it, and every new token reads all pages."""

    name: str
    prefill: PrefillPattern
    digest: ClassVar[Digest | None] = None
    draws: ClassVar[bool] = False

    @property
    def provenance(self) -> str:
        return repr(self)

    def reads_all(self, tokens: int, spec: ModelSpec, page_tokens: int) -> bool:
        return True

    def validate(self, spec: ModelSpec, page_tokens: int) -> None:
        self.prefill.validate(spec, page_tokens)

    def select(self, q: Tensor, pages: PageView) -> Selection | None:
        return None

    def resolve(self, selection: Selection, pages: PageView) -> tuple[Tensor, Tensor]:
        return pages.gather(selection)

    def predict(self, tokens: int, layer: int, spec: ModelSpec, page_tokens: int) -> PagesRead:
        return PagesRead(-(-tokens // page_tokens), 0)


def attention(queries: Tensor, keys: Tensor, traits: LayerTraits) -> Tensor:
    """Attention of the last ``queries [w, Hq, D]`` before the end of ``keys [P, Hkv, p, D]``, causal, mean over the
    query heads of a group: fp32 [Hkv, w, P * p]."""
    slots = keys.transpose(1, 2).flatten(0, 1).float()  # [P * p, Hkv, D]
    grouped = queries.float().unflatten(1, (slots.shape[1], -1))  # [w, Hkv, g, D]
    scores = torch.einsum("whgd,shd->hgws", grouped, slots) * traits.scale
    if traits.softcap:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    slot = torch.arange(len(slots), device=slots.device)
    return scores.masked_fill(slot > slot[-len(queries) :, None], -torch.inf).softmax(3).mean(1)


def lines(probs: Tensor, page_tokens: int) -> tuple[Tensor, Tensor]:
    """Attention of the last w queries, ``probs`` fp32 [Hkv, w, P * p], added up over each page of keys, and over each
    band of distances as wide as a page: both fp32 [Hkv, P]."""
    heads, width, tokens = probs.shape
    by_page = probs.sum(1).view(heads, -1, page_tokens).sum(2)
    slot = torch.arange(tokens, device=probs.device)
    band = (slot[-width:, None] - slot).clamp(min=0) // page_tokens  # [w, P * p]
    by_band = torch.zeros_like(by_page).scatter_add_(1, band.flatten().expand(heads, -1), probs.flatten(1))
    return by_page, by_band


def crossed(bands: Tensor, own: int) -> Tensor:
    """bool [H, P]: the pages that some bands of distances, bool [H, P], cross at any query of a block that ends with
    the last page and has ``own`` pages."""
    pages = torch.zeros_like(bands)
    for back in range(own + 1):  # a page that lies so many before the block's last one begins or ends in a band
        pages |= _moved(bands.flip(1), -back)
    return pages


def fewest(shares: Tensor, mass: float, least: int = 0) -> Tensor:
    """bool, the shape of ``shares`` fp32 [H, P]: the fewest pages whose shares reach ``mass`` together, and the next
    best up to ``least``; the earlier of equal ones."""
    ordered, order = shares.sort(dim=1, descending=True, stable=True)
    reached = ordered.cumsum(1) - ordered >= mass  # by the pages before it
    needed = ~reached if mass < 1 else torch.ones_like(reached)  # sums that round must not end at 1
    needed[:, :least] = True
    return torch.zeros_like(needed).scatter_(1, order, needed)


def _best(scores: Tensor, among: int, count: int) -> Tensor:
    """bool, the shape of ``scores [H, P]``: the ``count`` best of the first ``among``, the earlier of equal ones."""
    order = scores[:, :among].argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)


def _moved(marks: Tensor, by: int) -> Tensor:
    """bool [H, P] moved by so many places towards the front (negative), without what leaves."""
    return marks if by == 0 else torch.nn.functional.pad(marks[:, -by:], (0, -by))
