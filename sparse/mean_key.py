"""The mean key of a page: the smallest digest that a query can be compared with."""

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
class MeanKey(Digested):
    """The mean of a page's keys: one vector a page and KV head."""

    def spec(self, page_tokens: int, model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        return {"mean": (model.kv_heads, model.head_dim)}

    def compute(self, k: Tensor, v: Tensor, layers: Sequence[int]) -> Mapping[str, Tensor]:
        return {"mean": k.float().mean(-2)}


@dataclass(frozen=True)
class MeanDot(Scored):
    """The dot product of the query with a page's mean key, the largest of a group: the router of MoBA (arXiv
    2502.13189, section 2.2), and a landmark of ShadowKV (arXiv 2410.21465).

    Deviations: MoBA trains the model with it; here the model is as it is.
    """

    parts: ClassVar[frozenset[str]] = frozenset({"mean"})

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        return torch.einsum("bhgd,bphd->bhgp", grouped(q, pages.kv_heads), pages.digest("mean").float()).amax(2)
