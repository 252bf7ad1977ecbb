"""Prefill: ragged queries over their tables, in one kernel without a split over keys.

    q        [T, Hq, D]   sequence b owns rows cu_q[b] : cu_q[b + 1]
    program  (query tile, KV head, sequence); a tile is BLOCK_M rows = BLOCK_M // g tokens, each with the g query heads
             of the KV head, so that K and V are read once a group and the diagonal is narrow

The keys of a tile come in two phases. First the tiles that every row sees whole: no mask is computed or applied. Then
the rest, with every mask: the diagonal, and whatever follows the first entry that is not full, wherever that lies (a
scan over the entries, 4 bytes for ``unit_tokens`` slots, finds it). A window or stored positions leave the first phase
empty. Long tiles start first, so that the short ones fill the tail.

FlashAttention-2 (Dao, 2023); the two phases as in TensorRT-LLM's paged Triton kernel (NVIDIA/TensorRT-LLM#13010). Table
entries are located as in ``tiles.py``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings
from octavo.kernels.triton.tiles import (
    LN2,
    LOG2E,
    VALID_MASK,
    add_sink,
    axis_strides,
    load_entries,
    locate,
    scaled,
    score_arguments,
)

SCAN_ENTRIES = tl.constexpr(256)
NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def _attend(
    state,
    query,
    position,
    entry,
    start,
    end,
    keys,
    values,
    starts,
    unit_stride,
    scale,
    cap,
    U: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ORDERED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys: the new (acc [M, D], total [M], top [M]) of the online softmax."""
    acc, total, top = state
    d = tl.arange(0, BLOCK_D)
    at, seen = locate(entry, start, end, unit_stride, U, D, BLOCK_N)  # [N]
    tile = at[:, None] + d[None, :]  # [N, D]
    inside = (d < D)[None, :]
    if MASKED:
        inside = inside & seen[:, None]
    if MASKED or D < BLOCK_D:
        k = tl.load(keys + tile, mask=inside, other=0.0)
        v = tl.load(values + tile, mask=inside, other=0.0)
    else:
        k = tl.load(keys + tile)
        v = tl.load(values + tile)

    scores = scaled(tl.dot(query, tl.trans(k), input_precision="ieee"), scale, cap, CAPPED)  # [M, N]
    if MASKED:
        slot = start + tl.arange(0, BLOCK_N)
        key_position = slot
        if not ORDERED:
            key_position = slot % U + tl.load(starts + slot // U, mask=seen, other=0)
        distance = position[:, None] - key_position[None, :]
        visible = seen[None, :] & (distance >= 0)
        if WINDOW > 0:
            visible = visible & (distance < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

    new_top = tl.maximum(top, tl.max(scores, 1))
    pivot = new_top
    if MASKED:
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    probs = tl.exp2(scores - pivot[:, None])
    decay = tl.exp2(top - pivot)
    total = total * decay + tl.sum(probs, 1)
    acc = tl.dot(probs.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, total, new_top


_UNSPECIALISED = ["layer", "tokens", "batch", "scale", "cap", "l_layer", "l_batch", "l_head"]
_UNSPECIALISED += ["t_layer", "t_batch", "t_head", "p_layer", "p_batch", "p_head"]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _prefill_kernel(
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
    layer,
    tokens,
    batch,
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
    GROUP: tl.constexpr,
    U: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ORDERED: tl.constexpr,
    SINKS: tl.constexpr,
):
    head = tl.program_id(1)
    b = tl.program_id(2)
    kv_heads = tl.num_programs(1)
    TILE: tl.constexpr = BLOCK_M // GROUP  # tokens

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    heads = head * GROUP + m % GROUP  # [M]
    if b == batch:  # rows of no sequence (the padding of a step) see nothing
        first = tl.load(cu_q + batch) + tl.program_id(0) * TILE
        for start in range(first, tokens, tl.num_programs(0) * TILE):
            token = (start + m // GROUP).to(tl.int64)
            live = (m < TILE * GROUP) & (token < tokens)
            to = out + token[:, None] * out_token + heads[:, None] * out_head + d[None, :]
            tl.store(to, tl.zeros([BLOCK_M, BLOCK_D], tl.float32), mask=live[:, None] & (d < D)[None, :])
            tl.store(lse + token * (kv_heads * GROUP) + heads, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=live)
        return

    first_token = tl.load(cu_q + b)
    count = tl.load(cu_q + b + 1) - first_token
    tile = tl.cdiv(count, TILE) - 1 - tl.program_id(0)  # long tiles first
    if tile < 0:
        return

    local = tile * TILE + m // GROUP
    live = (m < TILE * GROUP) & (local < count)
    token = (first_token + local).to(tl.int64)  # [M]
    position = tl.load(q_pos + token, mask=live, other=-1)  # a row that is not live sees nothing
    inside = live[:, None] & (d < D)[None, :]
    query = tl.load(q + token[:, None] * q_token + heads[:, None] * q_head + d[None, :], mask=inside, other=0.0)

    layer = layer.to(tl.int64)
    row = table + layer * t_layer + b * t_batch + head * t_head
    starts = unit_pos + layer * p_layer + b * p_batch + head * p_head
    keys = pool + layer * (2 * kv_heads * U * D) + head * (U * D)
    values = keys + kv_heads * (U * D)

    end = tl.load(lengths + layer * l_layer + b * l_batch + head * l_head)
    begin = 0
    whole = 0  # slots before it are seen whole by every row
    if ORDERED:
        lowest = tl.min(tl.where(live, position, NEVER))
        end = tl.maximum(tl.minimum(end, tl.max(position) + 1), 0)
        if WINDOW > 0:
            begin = tl.maximum(lowest + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        else:
            whole = tl.maximum(tl.minimum(end, lowest + 1), 0) // BLOCK_N * BLOCK_N
            needed = tl.cdiv(whole, U)
            full = needed  # entries before the first that is not full
            for first in range(0, needed, SCAN_ENTRIES):
                index = first + tl.arange(0, SCAN_ENTRIES)
                valid = tl.load(row + index, mask=index < needed, other=U) & VALID_MASK
                full = tl.minimum(full, tl.min(tl.where(valid < U, index, needed)))
            whole = tl.minimum(whole, full * U // BLOCK_N * BLOCK_N)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if ORDERED and WINDOW == 0:
        entry = load_entries(row, 0, whole, U, BLOCK_N)
        for start in range(0, whole, BLOCK_N):
            now = entry
            entry = load_entries(row, start + BLOCK_N, whole, U, BLOCK_N)
            acc, total, top = _attend(
                (acc, total, top),
                query,
                position,
                now,
                start,
                whole,
                keys,
                values,
                starts,
                unit_stride,
                scale,
                cap,
                U,
                D,
                BLOCK_N,
                BLOCK_D,
                WINDOW,
                CAPPED,
                ORDERED,
                False,
            )
        begin = whole
    entry = load_entries(row, begin, end, U, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        now = entry
        entry = load_entries(row, start + BLOCK_N, end, U, BLOCK_N)
        acc, total, top = _attend(
            (acc, total, top),
            query,
            position,
            now,
            start,
            end,
            keys,
            values,
            starts,
            unit_stride,
            scale,
            cap,
            U,
            D,
            BLOCK_N,
            BLOCK_D,
            WINDOW,
            CAPPED,
            ORDERED,
            True,
        )

    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    row_lse = tl.where(nothing, float("-inf"), top + tl.log2(tl.where(nothing, 1.0, total)))
    if SINKS:
        row_lse, shrink = add_sink(row_lse, tl.load(sinks + heads).to(tl.float32) * LOG2E)
        acc = acc * shrink[:, None]
    tl.store(out + token[:, None] * out_token + heads[:, None] * out_head + d[None, :], acc, mask=inside)
    tl.store(lse + token * (kv_heads * GROUP) + heads, row_lse * LN2, mask=live)


def prefill(
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
    want_lse: bool,
) -> tuple[Tensor, Tensor]:
    """See ``reference.prefill``."""
    tokens, q_heads, head_dim = q.shape
    kv_heads, unit_tokens, batch = pool.shape[3], pool.shape[4], len(cu_q) - 1
    assert pool.is_contiguous() and q.stride(2) == table.stride(3) == 1

    group = q_heads // kv_heads
    block_d = max(triton.next_power_of_2(head_dim), 16)
    tuned = settings.launch("prefill", f"{block_d}x{q.element_size()}", q.device)
    block_m = max(min(tuned["BLOCK_M"], triton.next_power_of_2(max_q * group)), triton.next_power_of_2(group), 16)
    out = torch.empty_like(q)
    lse = torch.empty((tokens, q_heads), dtype=torch.float32, device=q.device)
    scale, cap = score_arguments(scale, softcap)
    _prefill_kernel[triton.cdiv(max_q, block_m // group), kv_heads, batch + 1](
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
        layer,
        tokens,
        batch,
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
        GROUP=group,
        U=unit_tokens,
        D=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=tuned["BLOCK_N"],
        BLOCK_D=block_d,
        WINDOW=window,
        CAPPED=softcap != 0,
        ORDERED=unit_pos is None,
        SINKS=sinks is not None,
        num_warps=tuned["num_warps"] if block_m > 64 else 4,
        num_stages=tuned["num_stages"],
    )
    return out, lse if want_lse else lse.new_empty(0)
