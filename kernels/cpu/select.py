"""Choosing pages on a CPU (semantics and shapes as in ``reference/select.py``)."""

import torch
from torch import Tensor

from octavo.kernels.reference.select import read_list

POSITION_BITS = 24
"""Of a sort key, below the 32 of the score: a table has at most 2^22 entries."""
HIGHEST = 2**31 - 1


def page_score(
    q: Tensor, low: Tensor, high: Tensor, layer: int, rows: Tensor, n_pages: Tensor, per_query_head: bool
) -> Tensor:
    # The boxes as the left side of the product: half the time of having the few query heads there.
    queries = q.float().unflatten(1, (low.shape[2], -1)).transpose(2, 3)  # [B, Hkv, D, g]
    box_low, box_high = (part[:, layer][rows].float().transpose(1, 2) for part in (low, high))  # [B, Hkv, P, D]
    bound = box_high @ queries.clamp(min=0) + box_low @ queries.clamp(max=0)  # [B, Hkv, P, g]
    sealed = torch.arange(rows.shape[1]) < (n_pages - 1)[:, None]  # [B, P]
    bound = bound.where(sealed[:, None, :, None], -torch.inf)
    return bound.transpose(2, 3).flatten(1, 2) if per_query_head else bound.amax(3)


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
    """One selection among distinct int64 keys: the score's bits, in an order that ascends with it, then the position,
    lower pages above; the reference sorts twice."""
    page = torch.arange(scores.shape[2])
    value = scores.masked_fill(scores.isnan(), -torch.inf) + 0.0  # minus zero becomes zero
    bits = value.view(torch.int32)
    order = bits ^ ((bits >> 31) & HIGHEST)
    last = n_pages[:, None] - 1
    order = order.masked_fill(keep[:, None], HIGHEST - 1).masked_fill((page == last)[:, None], HIGHEST)
    order = order.masked_fill((page > last)[:, None], -HIGHEST - 1)
    key = (order.long() << POSITION_BITS) - page
    chosen = key.topk(min(most, scores.shape[2]), 2, sorted=True).indices
    return read_list(chosen, budget, n_pages, lengths, table, page_tokens, page_units)
