"""Digests: small pure functions of a sealed page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from octavo.core.interfaces import ModelSpec


class Digested:
    """What all digests have in common: their parameters say how they came to be."""

    @property
    def provenance(self) -> str:
        return repr(self)


@dataclass(frozen=True)
class MinMax(Digested):
    """Elementwise minimum and maximum of a page's keys: the box that holds them (Quest, arXiv 2406.10774, section 3.2).

    Two vectors a page and KV head: 1 / page_tokens of the page's own bytes.
    """

    def spec(self, page_tokens: int, model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        return {"min": (model.kv_heads, model.head_dim), "max": (model.kv_heads, model.head_dim)}

    def compute(self, k: Tensor, v: Tensor, layers: Sequence[int]) -> Mapping[str, Tensor]:
        return {"min": k.amin(-2), "max": k.amax(-2)}
