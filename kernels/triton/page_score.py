"""Page score: the bound of every sealed page on the query's dot products, straight out of the digest store.

    low, high   [rows, layers, Hkv, D]   two views of one store; a row is a page's, found by id: no gathered copy
    rows        int64 [B, P]             the page's row
    scores      fp32 [B, Hkv or Hq, P]

The bound relu(q) . high + min(q, 0) . low is two matrix products, with the group's query heads as rows, padded to 16,
and pages as columns; nothing else is computed, so reading the boxes is all the time that it takes. The largest of the
group is taken before anything is written.

A program scores ``tiles`` tiles of BLOCK_P pages of one (sequence, KV head), whatever the sequence's length: one that
lies past the sealed pages writes minus infinity and reads no box, so a ragged batch costs what its pages cost, and a
captured graph replays at any length. There are as many tiles a program as let all programs run at once, up to a limit,
beyond which a sequence that is much shorter than the room for it would have too few programs. The rows of a tile are
fetched one tile ahead, so that the loads of the boxes never wait for them. KV heads are the fastest axis of the grid:
the boxes of all heads of a page lie side by side and are read at about the same time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings
from octavo.kernels.triton.plan import multiprocessors, overlaps_launches


@triton.jit
def _write(
    scores,
    bound,
    sequence,
    head,
    page,
    width,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PER_QUERY_HEAD: tl.constexpr,
):
    """Store the bounds [M, N] of some pages [N] of the first GROUP rows, or the largest of them."""
    m = tl.arange(0, BLOCK_M)
    kv_heads = tl.num_programs(0)
    if PER_QUERY_HEAD:
        heads = (sequence * kv_heads + head) * GROUP + m
        inside = (m < GROUP)[:, None] & (page < width)[None, :]
        tl.store(scores + heads[:, None].to(tl.int64) * width + page[None, :], bound, mask=inside)
    else:
        best = tl.max(tl.where((m < GROUP)[:, None], bound, float("-inf")), 0)
        tl.store(scores + (sequence * kv_heads + head).to(tl.int64) * width + page, best, mask=page < width)


@triton.jit(do_not_specialize=["layer", "width", "tiles", "rows_batch"])
def _page_score_kernel(
    q,
    low,
    high,
    rows,
    n_pages,
    scores,
    layer,
    width,
    tiles,
    q_batch,
    q_head,
    rows_batch,
    box_row,
    box_layer,
    box_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PER_QUERY_HEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0)
    first = tl.program_id(1) * (tiles * BLOCK_P)
    sequence = tl.program_id(2)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    sealed = tl.load(n_pages + sequence) - 1
    stop = tl.minimum(first + tiles * BLOCK_P, width)
    scored = tl.minimum(stop, sealed)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_P)
    at = q + sequence * q_batch + (head * GROUP + m)[:, None] * q_head + d[None, :]
    query = tl.load(at, mask=(m < GROUP)[:, None] & (d < D)[None, :], other=0.0)  # [M, D]
    up = tl.maximum(query.to(tl.float32), 0.0).to(query.dtype)
    down = tl.minimum(query.to(tl.float32), 0.0).to(query.dtype)

    shift = layer.to(tl.int64) * box_layer + head * box_head
    low += shift
    high += shift
    rows += sequence * rows_batch
    row = tl.load(rows + first + n, mask=first + n < width, other=0)  # before it is known which pages are sealed
    for start in range(first, scored, BLOCK_P):
        page = start + n
        inside = (page < scored)[:, None]
        if D < BLOCK_D:
            inside = inside & (d < D)[None, :]
        box = row.to(tl.int64)[:, None] * box_row + d[None, :]  # [N, D]
        lowest = tl.load(low + box, mask=inside, other=0.0, eviction_policy="evict_first")
        highest = tl.load(high + box, mask=inside, other=0.0, eviction_policy="evict_first")
        row = tl.load(rows + BLOCK_P + page, mask=BLOCK_P + page < width, other=0)

        bound = tl.dot(down, tl.trans(lowest.to(query.dtype)), input_precision="ieee")
        bound = tl.dot(up, tl.trans(highest.to(query.dtype)), acc=bound, input_precision="ieee")  # [M, N]
        bound = tl.where((page < scored)[None, :], bound, float("-inf"))
        _write(scores, bound, sequence, head, page, width, GROUP, BLOCK_M, PER_QUERY_HEAD)

    nothing = tl.full([BLOCK_M, BLOCK_P], float("-inf"), tl.float32)
    written = tl.cdiv(tl.maximum(scored - first, 0), BLOCK_P) * BLOCK_P
    for start in range(first + written, stop, BLOCK_P):
        _write(scores, nothing, sequence, head, start + n, width, GROUP, BLOCK_M, PER_QUERY_HEAD)


def page_score(
    q: Tensor, low: Tensor, high: Tensor, layer: int, rows: Tensor, n_pages: Tensor, per_query_head: bool
) -> Tensor:
    """See ``reference.page_score``."""
    assert low.shape == high.shape and low.stride() == high.stride() and low.dtype == high.dtype
    assert q.stride(2) == low.stride(3) == rows.stride(1) == 1 and n_pages.is_contiguous()
    batch, q_heads, head_dim = q.shape
    kv_heads, width = low.shape[2], rows.shape[1]
    group = q_heads // kv_heads
    block_d = max(triton.next_power_of_2(head_dim), 16)
    tuned = settings.launch("page_score", f"{block_d}x{q.element_size()}", q.device)
    overlap = overlaps_launches(q.device)
    scores = torch.empty((batch, q_heads if per_query_head else kv_heads, width), dtype=torch.float32, device=q.device)
    row_tiles = triton.cdiv(width, tuned["BLOCK_P"])
    at_once = tuned["programs_per_sm"] * multiprocessors(q.device)
    tiles = min(max(triton.cdiv(row_tiles * kv_heads * batch, at_once), 1), tuned["most_tiles"])
    _page_score_kernel[kv_heads, triton.cdiv(row_tiles, tiles), batch](
        q,
        low,
        high,
        rows,
        n_pages,
        scores,
        layer,
        width,
        tiles,
        q.stride(0),
        q.stride(1),
        rows.stride(0),
        *low.stride()[:3],
        GROUP=group,
        D=head_dim,
        BLOCK_M=max(triton.next_power_of_2(group), 16),
        BLOCK_D=block_d,
        PER_QUERY_HEAD=per_query_head,
        OVERLAP=overlap,
        BLOCK_P=tuned["BLOCK_P"],
        num_warps=tuned["num_warps"],
        num_stages=tuned["num_stages"],
        launch_pdl=overlap,
    )
    return scores
