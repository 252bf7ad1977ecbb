"""Truth of the ops that choose pages: what a page could be worth to a query, and the list of the best."""

import torch
from torch import Tensor

from octavo.kernels.layout import MAX_UNITS


def page_score(
    q: Tensor, low: Tensor, high: Tensor, layer: int, rows: Tensor, n_pages: Tensor, per_query_head: bool
) -> Tensor:
    """The largest dot product that any key in a page's box could have with the query (Quest, arXiv 2406.10774,
    section 3.3): ``sum_d max(q_d low_d, q_d high_d) = relu(q) . high + min(q, 0) . low``.

    Args:
        q: [B, Hq, D].
        low: [rows, layers, Hkv, D], the least key of a page, elementwise; any strides.
        high: the greatest, with the same shape and strides.
        layer: which of their layers.
        rows: int64 [B, P], the row of each page of a sequence; one past its sealed pages may be any valid row.
        n_pages: int32 [B], the open page at the end included, which has no box.
        per_query_head: give the bounds of every query head, instead of the largest of each KV head's group.

    Returns:
        fp32 [B, Hkv, P], or [B, Hq, P] for every query head; minus infinity from page ``n_pages - 1`` on.
    """
    assert low.shape == high.shape and low.stride() == high.stride() and low.dtype == high.dtype
    assert q.stride(2) == low.stride(3) == rows.stride(1) == 1 and n_pages.is_contiguous()
    box_low, box_high = (part[:, layer][rows].float() for part in (low, high))  # [B, P, Hkv, D]
    grouped = q.float().unflatten(1, (low.shape[2], -1))  # [B, Hkv, g, D]
    bound = torch.einsum("bhgd,bphd->bhgp", grouped.clamp(min=0), box_high)
    bound = bound + torch.einsum("bhgd,bphd->bhgp", grouped.clamp(max=0), box_low)
    sealed = torch.arange(rows.shape[1], device=q.device) < (n_pages - 1)[:, None]  # [B, P]
    bound = bound.where(sealed[:, None, None], -torch.inf)
    return bound.flatten(1, 2) if per_query_head else bound.amax(2)


def page_topk(
    scores: Tensor,
    budget: Tensor,
    keep: Tensor,
    n_pages: Tensor,
    lengths: Tensor,
    table: Tensor,
    page_tokens: int,
    page_units: int,
    most: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The open page, then the kept pages, then the best scores, until a row's budget is spent; listed in ascending
    order, as page ids and as what a decode kernel needs to read them.

    Equal scores go to the lower page, and minus zero equals zero; NaN counts as minus infinity. What stands past
    ``n_pages`` is ignored.

    Args:
        scores: fp32 [B, H, P], larger is better; H is Hkv, or 1 where all heads agree.
        budget: integer [B, H], pages that each row may list; a row with pages lists one at least, the open one.
        keep: bool [B, P], pages to list before the best scores; the lower ones where the budget is short.
        n_pages: int32 [B], the open page at the end included; 0 for a row of padding.
        lengths: int32 [B], tokens of each sequence.
        table: int32 [B, M], packed entries of each sequence, ``page_units`` a page.
        page_tokens: tokens of a page; every page but the open one is full.
        page_units: units of a page.
        most: what no budget exceeds; it fixes the shapes, with S = min(most, P).

    Returns:
        pages: int32 [B, H, S], ascending, the open page last; 0 past the count.
        counts: int32 [B, H], how many are listed.
        entries: int32 [B, H, S * page_units], the listed pages' entries of the table; 0 (no valid slot) past the count.
        slots: int32 [B, H], tokens on the listed pages: the lengths of a table made of ``entries``.
    """
    # What Triton's kernel asks for: who passes something else is to hear of it on every backend.
    assert keep.stride(1) == table.stride(1) == 1 and n_pages.is_contiguous() and lengths.is_contiguous()
    heads, width = scores.shape[1:]
    page = torch.arange(width, device=scores.device)
    exists = page < n_pages[:, None]
    is_open = page == n_pages[:, None] - 1
    rank = (exists.int() + (exists & keep)).masked_fill(is_open, 3)  # [B, P]: absent, scored, kept, open
    rank = rank[:, None].expand(-1, heads, -1)
    value = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).where(rank == 1, 0.0)
    order = value.argsort(dim=2, descending=True, stable=True)
    order = order.gather(2, rank.gather(2, order).argsort(dim=2, descending=True, stable=True))
    return read_list(order[..., :most], budget, n_pages, lengths, table, page_tokens, page_units)


def read_list(
    best: Tensor, budget: Tensor, n_pages: Tensor, lengths: Tensor, table: Tensor, page_tokens: int, page_units: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of ``page_topk`` from the ids int64 [B, H, S] of a row's ``best`` pages, best first."""
    heads, listed = best.shape[1:]
    counts = torch.minimum(budget.clamp(min=1, max=listed), n_pages[:, None])
    meant = torch.arange(listed, device=best.device) < counts[..., None]  # [B, H, S]
    pages = best.where(meant, MAX_UNITS).sort(2).values.where(meant, 0)

    units = pages[..., None] * page_units + torch.arange(page_units, device=best.device)  # [B, H, S, page_units]
    entries = table[:, None].expand(-1, heads, -1).gather(2, units.flatten(2))
    entries = entries.where(meant.repeat_interleave(page_units, 2), 0)
    open_tokens = lengths - (n_pages - 1) * page_tokens
    slots = ((counts - 1) * page_tokens + open_tokens[:, None]).where(counts > 0, 0)
    return pages.int(), counts.int(), entries, slots.int()
