"""What several parts need to know of a step's pages."""

import torch
from torch import Tensor

from octavo.core.interfaces import PageView


def sealed(pages: PageView) -> Tensor:
    """bool [b, 1, P]: the full pages of each sequence, which have a digest."""
    page = torch.arange(pages.max_pages, device=pages.n_pages.device)
    return page < (pages.n_pages - 1)[:, None, None]


def kept_first(scores: Tensor, keep: Tensor, pages: PageView) -> Tensor:
    """``scores`` fp32 [b, H, P] of which a budget may take the largest: infinite for pages in ``keep`` bool [b, P], and
    minus infinity for what is no page. NaN becomes the worst score that a page can have."""
    page = torch.arange(pages.max_pages, device=scores.device)
    exists = page < pages.n_pages[:, None, None]
    worst = torch.finfo(scores.dtype).min
    ranked = scores.nan_to_num(nan=worst, posinf=-worst, neginf=worst)
    return ranked.masked_fill(keep[:, None], torch.inf).where(exists, -torch.inf)


def grouped(q: Tensor, kv_heads: int) -> Tensor:
    """``q [b, Hq, D]`` as fp32 [b, Hkv, g, D], the query heads beside their KV head."""
    return q.float().view(len(q), kv_heads, -1, q.shape[2])
