"""Selectors: from scores to pages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.interfaces import Selection


@dataclass(frozen=True)
class TopK:
    """The kept pages, then the best scores, until the budget is spent; listed in ascending order."""

    def select(self, scores: Tensor, budget: Tensor, keep: Tensor, n_pages: Tensor, most: int) -> Selection:
        pages = scores.shape[2]
        page = torch.arange(pages, device=scores.device)
        exists = (page < n_pages[:, None])[:, None]  # [b, 1, P]
        is_open = (page == (n_pages - 1)[:, None])[:, None]
        rank = scores.where(exists, -torch.inf).masked_fill(keep[:, None] & exists, torch.finfo(torch.float32).max)
        chosen = rank.masked_fill(is_open, torch.inf).topk(min(most, pages), 2).indices  # best first
        meant = torch.arange(chosen.shape[2], device=scores.device) < torch.minimum(budget, n_pages[:, None])[..., None]
        chosen = chosen.where(meant, pages).sort(2).values
        return Selection(chosen.clamp(max=pages - 1), meant.sum(2))
