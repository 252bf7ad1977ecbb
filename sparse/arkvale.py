"""ArkVale (NeurIPS 2024): pages summed up by how far their keys lie from the centre on average."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.interfaces import ModelSpec, PageView
from octavo.sparse.digests import Digested
from octavo.sparse.ranking import grouped
from octavo.sparse.scorers import Scored


@dataclass(frozen=True)
class MeanBox(Digested):
    """The mean key of a page and, in every channel, the mean distance from it: a box from centre - radius to centre +
    radius, rated like any box by ``UpperBound`` (ArkVale, NeurIPS 2024, section 4.2: of its digests the one that finds
    the best page most often).

    Where the box of all keys bounds every dot product, this one estimates a large one, and stays tight when the page
    is large. Deviations: the centre is the mean key; pages stay in the pool, and the paper recalls them from the host.
    """

    def spec(self, page_tokens: int, model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        return {"min": (model.kv_heads, model.head_dim), "max": (model.kv_heads, model.head_dim)}

    def compute(self, k: Tensor, v: Tensor, layers: Sequence[int]) -> Mapping[str, Tensor]:
        k = k.float()
        centre = k.mean(-2)
        radius = (k - centre.unsqueeze(-2)).abs().mean(-2)
        return {"min": centre - radius, "max": centre + radius}


@dataclass(frozen=True)
class MeanBall(Digested):
    """The mean key of a page and the mean distance from it: a ball (ArkVale, section 4.2), half of a box's bytes."""

    def spec(self, page_tokens: int, model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        return {"centre": (model.kv_heads, model.head_dim), "radius": (model.kv_heads, 1)}

    def compute(self, k: Tensor, v: Tensor, layers: Sequence[int]) -> Mapping[str, Tensor]:
        k = k.float()
        centre = k.mean(-2)
        radius = (k - centre.unsqueeze(-2)).norm(dim=-1).mean(-1, keepdim=True)
        return {"centre": centre, "radius": radius}


@dataclass(frozen=True)
class BallBound(Scored):
    """The largest dot product with the query in a page's ball, q . centre + |q| radius; the largest of a group."""

    parts: ClassVar[frozenset[str]] = frozenset({"centre", "radius"})

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        q = grouped(q, pages.kv_heads)
        centre, radius = pages.digest("centre").float(), pages.digest("radius").float()
        dots = torch.einsum("bhgd,bphd->bhgp", q, centre)
        reach = q.norm(dim=-1, keepdim=True) * radius[..., 0].transpose(1, 2).unsqueeze(2)  # [b, Hkv, g, P]
        return (dots + reach).amax(2)
