"""From pages to sub-pages to tokens: each level looks at fewer pages, and closer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.interfaces import ModelSpec, PageView
from octavo.sparse.checks import check_integer
from octavo.sparse.digests import Digested, MinMax
from octavo.sparse.lserve import SubPageBoxes
from octavo.sparse.ranking import grouped
from octavo.sparse.scorers import Scored


@dataclass(frozen=True)
class Hierarchy(Digested, Scored):
    """Digest and scorer in one. With a layer's budget of B pages, for each KV head:

    1. *Pages.* The bound of q . k over a page's box (``UpperBound``) leaves the best ``wide`` * B.
    2. *Sub-pages.* The best bound of the boxes of a page's ``sub_pages`` equal parts leaves ``narrow`` * B of them.
    3. *Tokens.* Of those, a page is worth its exact softmax mass, from the dot products of all of its tokens.

    The boxes of pages and sub-pages are those of Quest (arXiv 2406.10774) and LServe (arXiv 2502.14866); that a coarse
    choice is pruned by attention weights is Twilight's idea (arXiv 2502.02770), which has an int4 copy of the keys
    where this reads the keys themselves.

    What is chosen and read stays pages: a kernel that reads pages saves nothing by passing over tokens of one, so the
    level of tokens decides between pages. Its cost is counted: 2 D elements a page, 2 D ``sub_pages`` for each of
    ``wide`` * B pages, p D for each of ``narrow`` * B. Pages that the last level has not seen come after all others.
    """

    parts: ClassVar[frozenset[str]] = frozenset({"min", "max"})
    sub_pages: int = 4
    wide: int = 4
    narrow: int = 2

    def __post_init__(self) -> None:
        check_integer("digest.sub_pages", self.sub_pages, 2)
        check_integer("digest.narrow", self.narrow, 1)
        check_integer("digest.wide", self.wide, self.narrow)

    @property
    def _boxes(self) -> SubPageBoxes:
        return SubPageBoxes(self.sub_pages)

    def spec(self, page_tokens: int, model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        return {**MinMax().spec(page_tokens, model), **self._boxes.spec(page_tokens, model)}

    def compute(self, k: Tensor, v: Tensor, layers: Sequence[int]) -> Mapping[str, Tensor]:
        return {**MinMax().compute(k, v, layers), **self._boxes.compute(k, v, layers)}

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        """fp32 [b, Hkv, P]: shares of the tokens that the last level has seen, minus infinity for other pages."""
        at = _best(pages.bounds(q), self.wide * pages.budget)  # [b, Hkv, S], page numbers
        q = grouped(q, pages.kv_heads)
        low, high = (pages.digest_at(part, at).float() for part in ("sub_min", "sub_max"))  # [b, Hkv, S, s, D]
        bound = torch.einsum("bhgd,bhpsd->bhgps", q.clamp(min=0), high)
        bound = (bound + torch.einsum("bhgd,bhpsd->bhgps", q.clamp(max=0), low)).amax((2, 4))
        at = at.gather(2, _best(_sealed_only(bound, at, pages), self.narrow * pages.budget))
        keys = pages.keys_at(at).float()  # [b, Hkv, S, p, D]
        logits = torch.einsum("bhgd,bhptd->bhgpt", q, keys) * pages.traits.scale
        shares = _sealed_only(logits.logsumexp(4), at.unsqueeze(2), pages).softmax(3)  # [b, Hkv, g, S]
        mass = _sealed_only(shares.mean(2), at, pages)
        scores = mass.new_full((*at.shape[:2], pages.max_pages), -torch.inf)
        return scores.scatter_(2, at, mass)

    def narrowing(self, budget: int, tokens: int, spec: ModelSpec, page_tokens: int) -> int:
        full = (tokens - 1) // page_tokens
        boxes = min(self.wide * budget, full) * 2 * self.sub_pages * spec.head_dim
        return boxes + min(self.narrow * budget, full) * page_tokens * spec.head_dim


def _best(scores: Tensor, count: int) -> Tensor:
    """The places int64 [b, H, S] of the ``count`` best of ``scores [b, H, P]``, best first; equal ones in order."""
    return scores.argsort(dim=2, descending=True, stable=True)[..., :count]


def _sealed_only(scores: Tensor, at: Tensor, pages: PageView) -> Tensor:
    """``scores``, minus infinity where ``at`` is no full page."""
    full = (pages.n_pages - 1).view(-1, *[1] * (at.ndim - 1))
    return scores.where(at < full, -torch.inf)
