"""Short chunks: few queries a sequence over a long context, which is shared out over programs as in decode.

    q          [T, Hq, D]             sequence b owns rows cu_q[b] : cu_q[b + 1], at most Q of them
    m          row of the product: query m // g of the chunk, query head m % g of the KV head; padded to 16, 32 or 64
    item       (sequence, table head); its tiles are those that any query of the chunk sees anything of
    part_out   fp32 [2 S, Q, Hq, D]   output of each part of an item for each query; plan.py says which part lies where
    part_lse   fp32 [2 S, Q, Hq]      its log-sum-exp, base 2

``prefill.py`` gives the keys of a tile of queries to one program, which leaves most of a card idle if there is no
second tile. Here the work is planned as in ``decode.py``: S programs a KV head take equal shares of all tiles, from
shapes alone, and read K and V once for all queries of a chunk. One that has all of an item finishes it; other items
are joined by a second kernel, a program a (query head, token), which also writes the rows of no sequence.

Each row ends at its own query and is masked in every tile, not only in the last ones: that is hidden behind the bytes
as long as there are few rows. The other masks are those of decode.

Verification of drafts (Leviathan et al., 2023, section 2.3) is such a call.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings
from octavo.kernels.triton.attend import attend
from octavo.kernels.triton.combine import finish, item_parts, join_parts
from octavo.kernels.triton.plan import (
    multiprocessors,
    overlaps_launches,
    programs_a_lane,
    programs_used,
    share_begin,
    span,
)
from octavo.kernels.triton.tiles import LN2, LOG2E, add_sink, axis_strides, score_arguments


@triton.jit
def _chunks(
    item,
    items,
    lengths,
    l_batch,
    l_head,
    cu_q,
    q_pos,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Of an item or of several: the first row of its chunk and how many there are; first slot and end of what they
    see, from the window of the first query to the position of the last. Nothing past ``items``."""
    b = item // HEADS
    row = tl.load(cu_q + b, mask=item < items, other=0)
    rows = tl.load(cu_q + b + 1, mask=item < items, other=0) - row
    asks = rows > 0
    length = tl.load(lengths + b * l_batch + item % HEADS * l_head, mask=asks, other=0)
    first, _, _ = span(length, tl.load(q_pos + row, mask=asks, other=-1), 0, WINDOW, ORDERED, BLOCK_N)
    _, end, _ = span(length, tl.load(q_pos + row + rows - 1, mask=asks, other=-1), 0, WINDOW, ORDERED, BLOCK_N)
    return row, rows, first, tl.maximum(first, end)


_STRIDES = [f"{x}_{axis}" for x in "ltp" for axis in ("layer", "batch", "head")]
_UNSPECIALISED = ["layer", "items", "max_q", "most", "min_tiles", "scale", "cap", *_STRIDES]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _short_kernel(
    q,
    pool,
    table,
    lengths,
    cu_q,
    q_pos,
    unit_pos,
    sinks,
    out,
    lse,
    part_out,
    part_lse,
    layer,
    items,
    max_q,
    most,
    min_tiles,
    scale,
    cap,
    q_token,
    q_head,
    out_token,
    out_head,
    unit_stride,
    t_layer,
    t_batch,
    t_head,
    l_layer,
    l_batch,
    l_head,
    p_layer,
    p_batch,
    p_head,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    U: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ORDERED: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    LANES: tl.constexpr = KV_HEADS // HEADS
    Q_HEADS: tl.constexpr = KV_HEADS * GROUP
    lane = tl.program_id(0)
    program = tl.program_id(1)
    layer = layer.to(tl.int64)
    lengths += layer * l_layer
    table += layer * t_layer
    unit_pos += layer * p_layer
    pool += layer * (2 * KV_HEADS * U * D)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    i = tl.arange(0, BLOCK_I)
    _, _, begins, stops = _chunks(i, items, lengths, l_batch, l_head, cu_q, q_pos, HEADS, WINDOW, ORDERED, BLOCK_N)
    tiles = tl.cdiv(stops - begins, BLOCK_N)
    ends = tl.cumsum(tiles)
    total = tl.sum(tiles)
    used = programs_used(total, most, min_tiles)
    if program >= used:
        return
    now = share_begin(program, total, used)
    stop = share_begin(program + 1, total, used)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    place = 2 * program
    while now < stop:
        item = tl.sum((ends <= now).to(tl.int32))
        b = item // HEADS
        head = item % HEADS * LANES + lane
        row, rows, first, last = _chunks(
            item, items, lengths, l_batch, l_head, cu_q, q_pos, HEADS, WINDOW, ORDERED, BLOCK_N
        )
        item_end = tl.sum(tl.where(i == item, ends, 0))
        item_begin = item_end - tl.sum(tl.where(i == item, tiles, 0))
        until = tl.minimum(stop, item_end)
        whole = (now == item_begin) & (until == item_end)
        last = tl.minimum(first + (until - item_begin) * BLOCK_N, last)
        first += (now - item_begin) * BLOCK_N
        now = until

        query = m // GROUP  # [M]
        live = query < rows
        heads = head * GROUP + m % GROUP
        token = (row + query).to(tl.int64)
        inside = live[:, None] & (d < D)[None, :]
        keys = pool + head * (U * D)
        acc, row_lse = attend(
            tl.load(q + token[:, None] * q_token + heads[:, None] * q_head + d[None, :], mask=inside, other=0.0),
            tl.load(q_pos + token, mask=live, other=0),
            table + b * t_batch + head * t_head,
            unit_pos + b * p_batch + head * p_head,
            keys,
            keys + KV_HEADS * U * D,
            first,
            last,
            unit_stride,
            scale,
            cap,
            m,
            live,
            U,
            D,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            WINDOW,
            CAPPED,
            ORDERED,
            False,
            False,
            True,
        )
        if whole:
            if SINKS:
                row_lse, shrink = add_sink(row_lse, tl.load(sinks + heads).to(tl.float32) * LOG2E)
                acc = acc * shrink[:, None]
            tl.store(out + token[:, None] * out_token + heads[:, None] * out_head + d[None, :], acc, mask=inside)
            tl.store(lse + token * Q_HEADS + heads, row_lse * LN2, mask=live)
        else:
            at = (place * max_q + query) * Q_HEADS + heads
            tl.store(part_out + at[:, None] * D + d[None, :], acc, mask=inside)
            tl.store(part_lse + at, row_lse, mask=live)
        place = 2 * program + 1


@triton.jit(do_not_specialize=["layer", "batch", "max_q", "most", "min_tiles", "l_layer", "l_batch", "l_head"])
def _combine_kernel(
    part_out,
    part_lse,
    lengths,
    cu_q,
    q_pos,
    sinks,
    out,
    lse,
    layer,
    batch,
    max_q,
    most,
    min_tiles,
    out_token,
    out_head,
    l_layer,
    l_batch,
    l_head,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.program_id(1)
    Q_HEADS: tl.constexpr = KV_HEADS * GROUP
    d = tl.arange(0, BLOCK_D)

    i = tl.arange(0, BLOCK_I)
    lengths += layer.to(tl.int64) * l_layer
    items = batch * HEADS
    _, _, begins, stops = _chunks(i, items, lengths, l_batch, l_head, cu_q, q_pos, HEADS, WINDOW, ORDERED, BLOCK_N)
    tiles = tl.cdiv(stops - begins, BLOCK_N)
    before = (i < batch) & (tl.load(cu_q + 1 + i, mask=i < batch, other=0) <= token)
    b = tl.sum(before.to(tl.int32))  # batch: the row is of no sequence, has no parts and no sink
    query = token - tl.load(cu_q + b)
    item = b * HEADS + head // GROUP % HEADS
    first_place, first_program, parts = item_parts(tiles, item, most, min_tiles, BLOCK_I)

    if OVERLAP:  # before any return, or this kernel could end before the one that writes the parts
        tl.extra.cuda.gdc_wait()
    if parts == 1:  # the one program that had all of the item has finished it
        return

    row = query * Q_HEADS + head
    top, total, acc = join_parts(
        part_out, part_lse, first_place, first_program, parts, row, max_q * Q_HEADS, D, BLOCK_D, BLOCK_S
    )
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
    acc, row_lse = finish(top, total, acc, sink, SINKS)
    row_lse = tl.where(b < batch, row_lse, float("-inf"))
    token = token.to(tl.int64)
    tl.store(out + token * out_token + head * out_head + d, acc, mask=d < D)
    tl.store(lse + token * Q_HEADS + head, row_lse * LN2)


def _tuned(q: Tensor, pool: Tensor) -> Mapping[str, int]:
    block_d = max(triton.next_power_of_2(q.shape[2]), 16)
    return settings.launch("prefill_short", f"{block_d}x{pool.element_size()}", q.device)


def is_short(q: Tensor, pool: Tensor, table: Tensor, max_q: int) -> bool:
    """Whether chunks of at most ``max_q`` queries fit one product, and the tables hold contexts that are worth
    splitting: from shapes alone."""
    tuned = _tuned(q, pool)
    rows = max_q * (q.shape[1] // pool.shape[3])
    slots = table.shape[3] * pool.shape[4]
    return 0 < rows <= tuned["BLOCK_M"] and slots > tuned["min_split_tokens"] and table.shape[1] > 0


def short(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    cu_q: Tensor,
    q_pos: Tensor,
    unit_pos: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    max_q: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """``reference.prefill`` of chunks that are short (``is_short``), into ``out`` like ``q`` and ``lse`` fp32
    [T, Hq]."""
    tokens, q_heads, head_dim = q.shape
    kv_heads, unit_tokens, entries = pool.shape[3], pool.shape[4], table.shape[3]
    assert pool.is_contiguous() and q.stride(2) == out.stride(2) == table.stride(3) == 1 and lse.is_contiguous()
    assert is_short(q, pool, table, max_q)

    tuned = _tuned(q, pool)
    batch, group, heads = len(cu_q) - 1, q_heads // kv_heads, lengths.shape[2]
    items = batch * heads
    most, min_tiles = programs_a_lane(items, kv_heads // heads, entries * unit_tokens, multiprocessors(q.device), tuned)
    part_lse = torch.empty((2 * most, max_q, q_heads), dtype=torch.float32, device=q.device)
    part_out = torch.empty((*part_lse.shape, head_dim), dtype=torch.float32, device=q.device)
    plan = {
        "KV_HEADS": kv_heads,
        "HEADS": heads,
        "GROUP": group,
        "D": head_dim,
        "BLOCK_N": tuned["BLOCK_N"],
        "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
        "BLOCK_I": max(triton.next_power_of_2(items), 128),
        "WINDOW": window,
        "ORDERED": unit_pos is None,
        "SINKS": sinks is not None,
        "OVERLAP": overlaps_launches(q.device),
    }
    scale, cap = score_arguments(scale, softcap)
    _short_kernel[kv_heads // heads, most](
        q,
        pool,
        table,
        lengths,
        cu_q,
        q_pos,
        table if unit_pos is None else unit_pos,
        lse if sinks is None else sinks,
        out,
        lse,
        part_out,
        part_lse,
        layer,
        items,
        max_q,
        most,
        min_tiles,
        scale,
        cap,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        pool.stride(0),
        *axis_strides(table),
        *axis_strides(lengths),
        *((0, 0, 0) if unit_pos is None else axis_strides(unit_pos)),
        U=unit_tokens,
        BLOCK_M=max(triton.next_power_of_2(max_q * group), 16),
        CAPPED=softcap != 0,
        num_warps=tuned["num_warps"],
        num_stages=tuned["num_stages"],
        launch_pdl=plan["OVERLAP"],
        **plan,
    )
    _combine_kernel[q_heads, tokens](
        part_out,
        part_lse,
        lengths,
        cu_q,
        q_pos,
        lse if sinks is None else sinks,
        out,
        lse,
        layer,
        batch,
        max_q,
        most,
        min_tiles,
        out.stride(0),
        out.stride(1),
        *axis_strides(lengths),
        launch_pdl=plan["OVERLAP"],
        **settings.launch("combine", "one" if batch == 1 else "short", q.device),
        **plan,
    )
