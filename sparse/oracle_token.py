"""The oracle at token grain: what a choice of single tokens could keep. For evaluation only; no kernel reads so."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.interfaces import ModelSpec, PageView, TokenSelection
from octavo.sparse.ranking import grouped
from octavo.sparse.scorers import Scored


@dataclass(frozen=True)
class TokenMass(Scored):
    """The exact softmax of each token, mean over the query heads of a group: fp32 [b, Hkv, P * p]. Reads all of K."""

    grain: ClassVar[str] = "token"
    shares: ClassVar[bool] = True

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        dim = q.shape[2]
        every = torch.arange(dim, device=q.device).expand(len(q), pages.kv_heads, dim)
        dots = torch.einsum("bhgd,bhtd->bhgt", grouped(q, pages.kv_heads), pages.keys(every).float())
        slot = torch.arange(dots.shape[3], device=q.device)
        none = slot >= pages.lengths[:, None, None, None]
        return (dots * pages.traits.scale).masked_fill(none, -torch.inf).softmax(3).mean(2)

    def elements(self, tokens: int, spec: ModelSpec, page_tokens: int) -> int:
        return tokens * spec.head_dim


@dataclass(frozen=True)
class TopTokens:
    """The tokens of kept pages, then the best scores: as many tokens as the same budget of pages has, of which the open
    one is filled as far as it is. So a page and a token method of one budget read the same bytes of K and V."""

    grain: ClassVar[str] = "token"

    def select(self, scores: Tensor, budget: Tensor, keep: Tensor, pages: PageView, most: int) -> TokenSelection:
        slot = torch.arange(scores.shape[2], device=scores.device)
        lengths = pages.lengths.long()[:, None]
        kept = keep.repeat_interleave(pages.page_tokens, 1)[:, None]
        ranked = scores.masked_fill(kept, torch.inf).masked_fill(slot >= lengths[..., None], -torch.inf)
        tokens = ranked.argsort(dim=2, descending=True, stable=True)[:, :, : most * pages.page_tokens]
        unfilled = pages.n_pages.long()[:, None] * pages.page_tokens - lengths
        return TokenSelection(tokens, (budget * pages.page_tokens - unfilled).minimum(lengths))
