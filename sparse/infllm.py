"""InfLLM (arXiv 2402.04617): a few keys stand for a page, and all heads read the same pages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from octavo.core.interfaces import ModelSpec, PageView
from octavo.sparse.checks import check_integer
from octavo.sparse.digests import Digested
from octavo.sparse.ranking import grouped
from octavo.sparse.scorers import Scored


@dataclass(frozen=True)
class Representatives(Digested):
    """``count`` keys of a page, as they are (InfLLM, arXiv 2402.04617, section 2.2).

    Deviations: those least like the page's mean key, a property of the page alone; the paper takes those that got the
    most attention from the tokens that follow, so its digest depends on queries. The paper's blocks are of 128 tokens.
    """

    count: int = 4

    def __post_init__(self) -> None:
        check_integer("digest.count", self.count, 1)

    def spec(self, page_tokens: int, model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        if self.count > page_tokens:
            raise ValueError(f"digest.count={self.count} keys cannot stand for a page of {page_tokens} tokens")
        return {"representatives": (model.kv_heads, self.count, model.head_dim)}

    def compute(self, k: Tensor, v: Tensor, layers: Sequence[int]) -> Mapping[str, Tensor]:
        likeness = cosine_similarity(k.float(), k.float().mean(-2, keepdim=True), dim=-1)  # [n, L, Hkv, p]
        chosen = likeness.argsort(dim=-1, stable=True)[..., : self.count]
        return {"representatives": k.take_along_dim(chosen.unsqueeze(-1), -2)}


@dataclass(frozen=True)
class SumOfDots(Scored):
    """The dot products of all query heads with all representatives of a page, added up: one order for all heads of a
    layer (InfLLM, section 2.2)."""

    parts: ClassVar[frozenset[str]] = frozenset({"representatives"})

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        queries = grouped(q, pages.kv_heads).sum(2)  # [b, Hkv, D]
        keys = pages.digest("representatives").float().sum(3)  # [b, P, Hkv, D]
        return torch.einsum("bhd,bphd->bp", queries, keys)[:, None]
