"""KVzip (arXiv 2505.23416): what a model needs to repeat its context is kept, whatever will be asked of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.compression.interfaces import Context, LayerContext
from octavo.sparse.budgets import Uniform
from octavo.sparse.checks import check_integer
from octavo.sparse.token_scores import Rated


@dataclass(frozen=True)
class Reconstruction(Rated):
    """The most attention that a token gets while the context is repeated (KVzip, section 3.2 and algorithm 1):

    1. behind the context an instruction to repeat it, and then its own tokens, ``chunk_tokens`` at a time, each time
       from the context's end: "repeat" before the first, "go_on" and the ``tail_tokens`` in front of a chunk before
       the others;
    2. for each of these queries a softmax over the first ``sink_tokens``, the chunk's own place in the context, and
       what stands behind the context;
    3. the largest share that any query of any query head of the KV head gives to a token of the chunk.

    The tokens that are computed for it (``Sample.extra_tokens``) are as many as the context has, and a little more,
    each of which attends to all of it. Deviations: the instruction is text like any other, in no chat template; an
    image is not repeated.
    """

    shares: ClassVar[bool] = True
    repeat: str | Sequence[int]
    go_on: str | Sequence[int]
    chunk_tokens: int = 2048
    sink_tokens: int = 4
    tail_tokens: int = 8

    def __post_init__(self) -> None:
        check_integer("scorer.chunk_tokens", self.chunk_tokens, 1)
        check_integer("scorer.sink_tokens", self.sink_tokens, 0)
        check_integer("scorer.tail_tokens", self.tail_tokens, 0)
        for name in ("repeat", "go_on"):
            if not isinstance(getattr(self, name), str):
                object.__setattr__(self, name, tuple(getattr(self, name)))

    def behind(self, tokens: int, read: Callable[[str | Sequence[int]], list[int]]) -> int:
        first, later = len(read(given(self.repeat))), len(read(given(self.go_on))) + self.tail_tokens
        return min(self.chunk_tokens, tokens) + (first if tokens <= self.chunk_tokens else max(first, later))

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        return self.score_all(context)[context.layers.index(layer.layer)]

    def score_all(self, context: Context) -> Tensor:
        most: dict[int, Tensor] = {}
        ids = list(context.token_ids)
        for start in range(0, len(ids), self.chunk_tokens):
            end = min(start + self.chunk_tokens, len(ids))
            before = context.read(given(self.go_on if start else self.repeat))
            before += ids[max(0, start - self.tail_tokens) : start]

            def watch(layer: int, positions: Tensor, logits: Tensor, start: int = start, end: int = end) -> None:
                own = (positions >= start) & (positions < end)  # [Hkv, N]
                among = own | (positions < self.sink_tokens)
                behind = torch.ones_like(among[:, :1]).expand(-1, logits.shape[3] - among.shape[1])
                among = torch.cat([among, behind], 1)[:, None, None]
                shares = logits.masked_fill(~among, -torch.inf).softmax(3)[..., : own.shape[1]]
                share = shares.amax((1, 2)).where(own, 0.0)
                most[layer] = torch.maximum(most.get(layer, share), share)

            text = [token for token in [*before, *ids[start:end]] if token < context.spec.vocab_size]
            context.continuation().compute(text, watch)
        return torch.stack([most[layer] for layer in context.layers])


def given(text: str | Sequence[int]) -> str | list[int]:
    """A text, or token ids, as whoever reads them takes them."""
    return text if isinstance(text, str) else list(text)


@dataclass(frozen=True)
class AllLayers(Uniform):
    """``tokens`` each on average, shared by the KV heads of all layers: the best of all are kept, whosever they are
    (KVzip, section 3.4, "non-uniform head budgets"). For methods that drop tokens; its dense layers have no part in it.
    """

    needs_shares: ClassVar[bool] = True

    def most(self, layer: int, layers: int, page_tokens: int, heads: int) -> int:
        return heads * layers * self.pages(layer, layers, page_tokens)

    def divide(self, scores: Tensor, page_tokens: int) -> Tensor:
        layers, heads, width = scores.shape
        order = scores.flatten().argsort(descending=True, stable=True)
        winners = order[: layers * heads * self.pages(0, layers, page_tokens)] // width
        return winners.bincount(minlength=layers * heads).view(layers, heads)
