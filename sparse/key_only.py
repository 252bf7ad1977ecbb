"""Scores that look at keys alone: what they choose does not depend on the query."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from octavo.core.interfaces import ModelSpec, PageView
from octavo.sparse.digests import Digested
from octavo.sparse.ranking import sealed
from octavo.sparse.scorers import Scored


@dataclass(frozen=True)
class KeyNorm(Digested):
    """The mean Euclidean norm of a page's keys: one number a page and KV head."""

    def spec(self, page_tokens: int, model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        return {"norm": (model.kv_heads, 1)}

    def compute(self, k: Tensor, v: Tensor, layers: Sequence[int]) -> Mapping[str, Tensor]:
        return {"norm": k.float().norm(dim=-1).mean(-1, keepdim=True)}


@dataclass(frozen=True)
class SmallNorm(Scored):
    """The smaller its keys, the more attention a page gets (Knorm, arXiv 2406.11430, section 3).

    Says nothing of a model that scales its keys to one length (QK norm: Qwen 3, Gemma 3), where all pages are equal but
    for rounding. Deviations: the mean over a page instead of single tokens; pages stay in the pool.
    """

    parts: ClassVar[frozenset[str]] = frozenset({"norm"})

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        return -pages.digest("norm")[..., 0].transpose(1, 2).float()


@dataclass(frozen=True)
class MeanDirection(Digested):
    """The mean of a page's keys, each scaled to length 1."""

    def spec(self, page_tokens: int, model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        return {"direction": (model.kv_heads, model.head_dim)}

    def compute(self, k: Tensor, v: Tensor, layers: Sequence[int]) -> Mapping[str, Tensor]:
        return {"direction": normalize(k.float(), dim=-1).mean(-2)}


@dataclass(frozen=True)
class KeyDifference(Scored):
    """A page is worth more the less its keys point where the keys of the sequence point on average (KeyDiff, arXiv
    2504.15364, section 3): minus the mean cosine of its keys with the mean direction of all.

    Cosines are linear in the keys' directions, so the mean over a page comes from its mean direction exactly.
    Deviations: the mean over a page instead of single tokens; pages stay in the pool; the open page has no part in the
    sequence's direction.
    """

    parts: ClassVar[frozenset[str]] = frozenset({"direction"})

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        direction = pages.digest("direction").float().transpose(1, 2)  # [b, Hkv, P, D]
        known = direction.where(sealed(pages).unsqueeze(-1), 0.0)
        anchor = normalize(known.sum(2), dim=-1)
        return -torch.einsum("bhpd,bhd->bhp", direction, anchor)
