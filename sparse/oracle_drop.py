"""An oracle of dropping: tokens are kept by the attention that they are going to get."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.compression.interfaces import Context, LayerContext
from octavo.sparse.checks import check_integer
from octavo.sparse.token_scores import Rated


@dataclass(frozen=True)
class FutureAttention(Rated):
    """The attention that the queries to come pay to each token with everything in the cache, added up over queries, the
    mean over the query heads of a KV head: what every other scorer of a method that drops tokens tries to guess.

    No method can know it; it is an upper bar. The queries to come are those of the question, where it comes after the
    decision (``unseen_tokens``), and those of the answer: of the given one, where a target is scored and ``given``
    allows to look at it, and else of ``lookahead_tokens`` that dense attention would draw greedily. So it needs the
    answer, or a look ahead that computes one (``Sample.extra_tokens``). What it keeps holds the most attention that so
    many tokens of a head can hold; that this gives the best answers is not said.
    """

    shares: ClassVar[bool] = True
    lookahead_tokens: int = 64
    given: bool = True

    def __post_init__(self) -> None:
        check_integer("scorer.lookahead_tokens", self.lookahead_tokens, 1)

    def behind(self, tokens: int, read: Callable[[str | Sequence[int]], list[int]]) -> int:
        return self.lookahead_tokens

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        return self.score_all(context)[context.layers.index(layer.layer)]

    def score_all(self, context: Context) -> Tensor:
        paid: dict[int, Tensor] = {}

        def watch(layer: int, positions: Tensor, logits: Tensor) -> None:
            attention = logits.softmax(3)[..., : positions.shape[1]].sum(2).mean(1)  # [Hkv, N]
            paid[layer] = paid.get(layer, 0.0) + attention

        answer = list(context.answer) if self.given else []
        ahead = context.continuation(overlap=1)
        token = ahead.compute(context.token_ids[-1:])  # which was computed before, and says what follows
        if known := [*context.question, *answer]:
            token = ahead.compute(known, watch)
        for _ in range(0 if answer else self.lookahead_tokens):
            if token in context.eos and paid:
                break
            token = ahead.compute([token], watch)
        return torch.stack([paid[layer] for layer in context.layers])
