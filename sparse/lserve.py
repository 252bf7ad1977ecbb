"""LServe (arXiv 2502.14866): pages are read whole and rated by their parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.interfaces import ModelSpec, PageView
from octavo.sparse.checks import check_integer
from octavo.sparse.digests import Digested
from octavo.sparse.ranking import grouped
from octavo.sparse.scorers import Scored


@dataclass(frozen=True)
class SubPageBoxes(Digested):
    """Elementwise minimum and maximum of the keys of each of a page's ``sub_pages`` equal parts (LServe, arXiv
    2502.14866, section 3.5.2): pages as large as reading likes, boxes as small as rating needs.

    Two vectors a part: ``sub_pages / page_tokens`` of the page's own bytes. The paper has 4 parts of 16 tokens.
    """

    sub_pages: int = 4

    def __post_init__(self) -> None:
        check_integer("digest.sub_pages", self.sub_pages, 2)

    def spec(self, page_tokens: int, model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        if page_tokens % self.sub_pages:
            raise ValueError(f"digest.sub_pages={self.sub_pages} must divide the page of {page_tokens} tokens")
        shape = (model.kv_heads, self.sub_pages, model.head_dim)
        return {"sub_min": shape, "sub_max": shape}

    def compute(self, k: Tensor, v: Tensor, layers: Sequence[int]) -> Mapping[str, Tensor]:
        parts = k.unflatten(-2, (self.sub_pages, -1))  # [n, L, Hkv, sub_pages, p / sub_pages, D]
        return {"sub_min": parts.amin(-2), "sub_max": parts.amax(-2)}


@dataclass(frozen=True)
class SubPageBound(Scored):
    """The largest of the bounds of a page's parts, each as in ``UpperBound``; the largest of a group.

    Deviations: chosen anew at every step, the paper's choice serves four; no heads are turned into streaming heads, and
    nothing is quantised.
    """

    parts: ClassVar[frozenset[str]] = frozenset({"sub_min", "sub_max"})

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        q = grouped(q, pages.kv_heads)
        low, high = pages.digest("sub_min").float(), pages.digest("sub_max").float()  # [b, P, Hkv, s, D]
        bound = torch.einsum("bhgd,bphsd->bhgps", q.clamp(min=0), high)
        bound = bound + torch.einsum("bhgd,bphsd->bhgps", q.clamp(max=0), low)
        return bound.amax((2, 4))
