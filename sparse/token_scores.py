"""Scorers of single tokens, for methods that keep some for good. Each is one piece of maths with its source."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from octavo.core.compression.interfaces import Context, LayerContext
from octavo.sparse.checks import check_integer


class Rated:
    """What most scorers of tokens have in common: they look at no query, their scores are no shares of attention, and
    they want nothing back."""

    window: ClassVar[int] = 0
    shares: ClassVar[bool] = False
    carries: ClassVar[bool] = False


@dataclass(frozen=True)
class SmallKeys(Rated):
    """The smaller its key, the more attention a token gets (Knorm, arXiv 2406.11430, section 3)."""

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        norms: Tensor = layer.keys.float().norm(dim=-1)
        return -norms


@dataclass(frozen=True)
class DistinctKeys(Rated):
    """A token is worth more the less its key points where the keys of the sequence point on average: minus the cosine
    with the mean direction of all (KeyDiff, arXiv 2504.15364, section 3)."""

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        directions = normalize(layer.keys.float(), dim=-1)  # [Hkv, N, D]; 0 in padding
        anchor = normalize(directions.sum(1, keepdim=True), dim=-1)
        return -(directions * anchor).sum(2)


@dataclass(frozen=True)
class Latest(Rated):
    """The later token is worth more: with sinks kept, the window of StreamingLLM (arXiv 2309.17453). Keys keep their
    original positions; the paper renumbers them inside the window."""

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        return layer.positions.float()


@dataclass(frozen=True)
class Drawn(Rated):
    """A random order of the tokens for each layer and head: the lower bar of every comparison. A hash of (``seed``,
    layer, head, position), so that samples of a prompt keep the same, and a token that was kept once is kept again."""

    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("scorer.seed", self.seed, 0, (1 << 15) - 1)  # what is left of 64 bits

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        heads = torch.arange(len(layer.positions), device=layer.positions.device)[:, None]
        x = (self.seed << 48) + (layer.layer << 40) + (heads << 32) + layer.positions
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):  # SplitMix64 finaliser
            x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
        return (x & 0xFFFFFF).float()
