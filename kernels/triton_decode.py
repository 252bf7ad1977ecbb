"""Decode: one query a sequence over its table, split over the table's entries, then combined.

    q          [B, Hq, D]            the g query heads of a KV head are the rows of one matrix product, padded to 16
    table      int32 [Lt, B, Ht, M]  axes of size 1 broadcast: their stride is passed as 0
    part_out   fp32 [B, Hq, S, D]    normalised output of each of S splits
    part_lse   fp32 [B, Hq, S]       its log-sum-exp, base 2
    entry_lse  fp32 [B, Hq, M]       log-sum-exp, base 2, of the scores on each table entry, when mass is wanted

S and every other launch argument come from shapes and from the number of SMs alone. Lengths are read on the device, so
a captured graph replays at any length. Split and combine work out a sequence's share of the splits from its length by
the same function (``split_span``); splits left over exit at once and nobody reads their partials.

A tile is BLOCK_N slots, whatever the unit: each tile row finds its own entry, one vector load for the tile, fetched one
tile ahead so that the loads of K and V never wait for the table. A row past the end reads entry 0, whose valid count is
0, so that one comparison with the valid count masks everything that holds no token. Masked rows are loaded as zeros:
what lies in an unused slot, NaN included, cannot matter.

Flash-decoding (Dao et al., 2023) with the query heads packed into the product's rows as in "The Anatomy of a Triton
Attention Kernel" (arXiv 2511.11581). The helpers at the top serve ``triton_prefill.py`` too.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import layout

ID_SHIFT = tl.constexpr(layout.ID_SHIFT)
VALID_MASK = tl.constexpr(layout.VALID_MASK)
LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))

# (BLOCK_N, num_warps, num_stages) by (padded head dimension, element size). At 16 bits a program keeps two tiles of K
# and V, 64 KB, in flight, and three programs fit an SM of 228 KB. fp32 runs on the plain multiply-add units and serves
# parity only.
SETTINGS = {
    (16, 2): (128, 4, 3),
    (32, 2): (128, 4, 3),
    (64, 2): (128, 4, 3),
    (128, 2): (64, 4, 3),
    (256, 2): (32, 4, 3),
    (16, 4): (64, 4, 2),
    (32, 4): (64, 4, 2),
    (64, 4): (64, 4, 2),
    (128, 4): (32, 4, 2),
    (256, 4): (16, 4, 2),
}
PROGRAMS_PER_SM = 3
MIN_SPLIT_TOKENS = 256  # below this a split costs more in start-up and combining than it gains
COMBINE_SPLITS = 16  # splits that the combine reads at a time
MASS_ENTRIES = 256  # entries that a program of the mass kernel finishes


@triton.jit
def load_entries(row, start, end, U: tl.constexpr, BLOCK_N: tl.constexpr):
    """Entries of the slots ``start + [0, BLOCK_N)``: int32 [N], or one scalar when they share it; 0 past ``end``."""
    if U >= BLOCK_N:
        return tl.load(row + start // U, mask=start < end, other=0)
    else:
        slot = start + tl.arange(0, BLOCK_N)
        return tl.load(row + slot // U, mask=slot < end, other=0)


@triton.jit
def locate(entry, start, end, unit_stride, U: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a tile's rows lie, in elements from the run of unit 0 (int64 [N]), and which hold a token (bool [N])."""
    slot = start + tl.arange(0, BLOCK_N)
    offset = slot % U
    valid = entry & VALID_MASK
    if U >= BLOCK_N:
        valid = tl.minimum(valid, end - start // U * U)
    return (entry >> ID_SHIFT).to(tl.int64) * unit_stride + offset * D, offset < valid


@triton.jit
def scaled(dots, scale, cap, CAPPED: tl.constexpr):
    """Scores in units of log 2. A cap c comes as ``cap = c log2(e)`` and ``scale = 2 log2(e) scale / c``, see below."""
    scores = dots * scale
    if CAPPED:  # tanh(x) = 1 - 2 / (exp(2x) + 1), exact at both ends
        scores = cap - 2 * cap / (tl.exp2(scores) + 1)
    return scores


@triton.jit
def add_sink(lse, sink):
    """Log-sum-exp, base 2, with the sink joined in, and the factor by which the outputs shrink."""
    top = tl.maximum(lse, sink)
    joined = top + tl.log2(tl.exp2(lse - top) + tl.exp2(sink - top))
    return joined, tl.exp2(lse - joined)


def score_arguments(scale: float, softcap: float) -> tuple[float, float]:
    """The ``scale`` and ``cap`` that ``scaled`` takes."""
    log2e = math.log2(math.e)
    return (2 * log2e * scale / softcap, log2e * softcap) if softcap else (log2e * scale, 0.0)


def axis_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of the axes [L, B, H, ...], 0 where an axis of size 1 broadcasts."""
    return tuple(0 if x.shape[i] == 1 else x.stride(i) for i in range(3))  # type: ignore[return-value]


@triton.jit
def split_span(
    length, q_pos, splits, WINDOW: tl.constexpr, ORDERED: tl.constexpr, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr
):
    """First slot, end and slots per split of what one query may see; ordered tables end at its own position."""
    first = 0
    end = length
    if ORDERED:
        end = tl.maximum(tl.minimum(length, q_pos + 1), 0)
        if WINDOW > 0:
            first = tl.maximum(q_pos + 1 - WINDOW, 0) // BLOCK_N
    tiles = tl.maximum(tl.cdiv(end, BLOCK_N) - first, 0)
    return first * BLOCK_N, end, tl.maximum(tl.cdiv(tiles, splits), MIN_TILES) * BLOCK_N


_UNSPECIALISED = ["layer", "splits", "scale", "cap", "l_layer", "l_batch", "l_head"]
_UNSPECIALISED += ["t_layer", "t_batch", "t_head", "p_layer", "p_batch", "p_head", "entries"]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _decode_kernel(
    q,
    pool,
    table,
    lengths,
    q_pos,
    unit_pos,
    sinks,
    out,
    lse,
    part_out,
    part_lse,
    entry_lse,
    layer,
    scale,
    cap,
    entries,
    q_batch,
    q_head,
    out_batch,
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
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ORDERED: tl.constexpr,
    SINKS: tl.constexpr,
    MASS: tl.constexpr,
    DIRECT: tl.constexpr,
):
    head = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    kv_heads = tl.num_programs(0)
    splits = tl.num_programs(1)

    layer = layer.to(tl.int64)
    length = tl.load(lengths + layer * l_layer + b * l_batch + head * l_head)
    position = tl.load(q_pos + b)
    first, end, share = split_span(length, position, splits, WINDOW, ORDERED, BLOCK_N, MIN_TILES)
    first += split * share
    last = tl.minimum(first + share, end)
    if (not DIRECT) & (first >= last):
        return

    row = table + layer * t_layer + b * t_batch + head * t_head
    starts = unit_pos + layer * p_layer + b * p_batch + head * p_head
    keys = pool + layer * (2 * kv_heads * U * D) + head * (U * D)
    values = keys + kv_heads * (U * D)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    heads = head * GROUP + m  # [M]
    q_mask = (m < GROUP)[:, None] & (d < D)[None, :]
    query = tl.load(q + b * q_batch + heads[:, None] * q_head + d[None, :], mask=q_mask, other=0.0)  # [M, D]

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    entry = load_entries(row, first, last, U, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        at, seen = locate(entry, start, last, unit_stride, U, D, BLOCK_N)  # [N]
        inside = seen[:, None]
        if D < BLOCK_D:
            inside = inside & (d < D)[None, :]
        tile = at[:, None] + d[None, :]  # [N, D]
        k = tl.load(keys + tile, mask=inside, other=0.0, eviction_policy="evict_first")
        v = tl.load(values + tile, mask=inside, other=0.0, eviction_policy="evict_first")
        entry = load_entries(row, start + BLOCK_N, last, U, BLOCK_N)

        slot = start + tl.arange(0, BLOCK_N)
        if ORDERED:  # the span ends at the query's position
            if WINDOW > 0:
                seen = seen & (position - slot < WINDOW)
        else:
            distance = position - slot % U - tl.load(starts + slot // U, mask=seen, other=0)
            seen = seen & (distance >= 0)
            if WINDOW > 0:
                seen = seen & (distance < WINDOW)
        scores = scaled(tl.dot(query, tl.trans(k), input_precision="ieee"), scale, cap, CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))  # [M, N]

        new_top = tl.maximum(top, tl.max(scores, 1))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        probs = tl.exp2(scores - pivot[:, None])
        decay = tl.exp2(top - pivot)
        if MASS:
            by_entry = tl.sum(tl.reshape(probs, [BLOCK_M, BLOCK_N // U, U]), 2)  # [M, N / U]
            index = start // U + tl.arange(0, BLOCK_N // U)
            to = entry_lse + (b * (kv_heads * GROUP) + heads)[:, None].to(tl.int64) * entries + index[None, :]
            keep = (m < GROUP)[:, None] & (index * U < last)[None, :]
            tl.store(to, pivot[:, None] + tl.log2(by_entry), mask=keep)
        total = total * decay + tl.sum(probs, 1)
        acc = acc * decay[:, None] + tl.dot(probs.to(v.dtype), v, input_precision="ieee")
        top = new_top

    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    row_lse = tl.where(nothing, float("-inf"), top + tl.log2(tl.where(nothing, 1.0, total)))
    at_row = b * (kv_heads * GROUP) + heads  # [M]
    if DIRECT:
        if SINKS:
            sink = tl.load(sinks + heads, mask=m < GROUP, other=0.0).to(tl.float32) * LOG2E
            row_lse, shrink = add_sink(row_lse, sink)
            acc = acc * shrink[:, None]
        tl.store(out + b * out_batch + heads[:, None] * out_head + d[None, :], acc, mask=q_mask)
        tl.store(lse + at_row, row_lse * LN2, mask=m < GROUP)
    else:
        at_part = at_row * splits + split
        tl.store(part_out + at_part[:, None] * D + d[None, :], acc, mask=q_mask)
        tl.store(part_lse + at_part, row_lse, mask=m < GROUP)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _combine_kernel(
    part_out,
    part_lse,
    lengths,
    q_pos,
    sinks,
    out,
    lse,
    layer,
    splits,
    out_batch,
    out_head,
    l_layer,
    l_batch,
    l_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
    SINKS: tl.constexpr,
):
    head = tl.program_id(0)
    b = tl.program_id(1)
    length = tl.load(lengths + layer.to(tl.int64) * l_layer + b * l_batch + head // GROUP * l_head)
    first, end, share = split_span(length, tl.load(q_pos + b), splits, WINDOW, ORDERED, BLOCK_N, MIN_TILES)
    used = tl.cdiv(tl.maximum(end - first, 0), share)

    d = tl.arange(0, BLOCK_D)
    at_row = b * tl.num_programs(0) + head
    top = tl.max(tl.full([BLOCK_S], float("-inf"), tl.float32))
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, used, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        part = tl.load(part_lse + at_row * splits + s, mask=s < used, other=float("-inf"))  # [S]
        inside = (s < used)[:, None] & (d < D)[None, :]
        rows = tl.load(part_out + (at_row * splits + s)[:, None] * D + d[None, :], mask=inside, other=0.0)  # [S, D]
        new_top = tl.maximum(top, tl.max(part))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(part - pivot)
        decay = tl.exp2(top - pivot)
        total = total * decay + tl.sum(weight)
        acc = acc * decay + tl.sum(weight[:, None] * rows, 0)
        top = new_top

    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)
    row_lse = tl.where(nothing, float("-inf"), top + tl.log2(tl.where(nothing, 1.0, total)))
    if SINKS:
        row_lse, shrink = add_sink(row_lse, tl.load(sinks + head).to(tl.float32) * LOG2E)
        acc = acc * shrink
    tl.store(out + b * out_batch + head * out_head + d, acc, mask=d < D)
    tl.store(lse + at_row, row_lse * LN2)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _mass_kernel(
    entry_lse,
    lse,
    lengths,
    q_pos,
    mass,
    layer,
    entries,
    l_layer,
    l_batch,
    l_head,
    GROUP: tl.constexpr,
    U: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
):
    head = tl.program_id(1)
    b = tl.program_id(2)
    length = tl.load(lengths + layer.to(tl.int64) * l_layer + b * l_batch + head * l_head)
    first, end, _ = split_span(length, tl.load(q_pos + b), 1, WINDOW, ORDERED, BLOCK_N, 1)

    at_row = b * tl.num_programs(1) + head
    m = tl.arange(0, BLOCK_M)
    index = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    written = (index * U >= first) & (index * U < end)  # the decode kernel visited these and no others
    inside = (m < GROUP)[:, None] & written[None, :]
    rows = at_row * GROUP + m
    share = tl.load(entry_lse + rows[:, None].to(tl.int64) * entries + index[None, :], mask=inside, other=float("-inf"))
    denominator = tl.load(lse + rows, mask=m < GROUP, other=0.0) * LOG2E
    # A row that saw nothing has only entries of minus infinity; any finite denominator makes them 0.
    denominator = tl.where(denominator == float("-inf"), 0.0, denominator)
    mean = tl.sum(tl.exp2(share - denominator[:, None]), 0) / GROUP
    tl.store(mass + at_row.to(tl.int64) * entries + index, mean, mask=index < entries)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def split_count(batch: int, kv_heads: int, slots: int, multiprocessors: int) -> int:
    """Splits of each (sequence, KV head), from shapes alone, never from lengths.

    One sequence is cut to fill the SMs once. A batch may be ragged, so it is cut finer, to fill them twice.
    """
    programs = PROGRAMS_PER_SM * multiprocessors * min(batch, 2)
    return max(min(programs // max(batch * kv_heads, 1), triton.cdiv(slots, MIN_SPLIT_TOKENS)), 1)


def decode(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    unit_pos: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    want_mass: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference.decode``."""
    batch, q_heads, head_dim = q.shape
    kv_heads, unit_tokens, entries = pool.shape[3], pool.shape[4], table.shape[3]
    assert pool.is_contiguous() and q.stride(2) == table.stride(3) == 1

    block_d = max(triton.next_power_of_2(head_dim), 16)
    block_n, warps, stages = SETTINGS[block_d, q.element_size()]
    if want_mass and unit_tokens > block_n:  # the mass of an entry is summed within a tile
        block_n, stages = unit_tokens, 1
    splits = split_count(batch, kv_heads, entries * unit_tokens, _multiprocessors(q.device))
    group = q_heads // kv_heads
    block_m = max(triton.next_power_of_2(group), 16)
    common = {
        "GROUP": group,
        "BLOCK_N": block_n,
        "WINDOW": window,
        "ORDERED": unit_pos is None,
    }
    min_tiles = max(MIN_SPLIT_TOKENS // block_n, 1)

    fp32 = {"dtype": torch.float32, "device": q.device}
    out = torch.empty_like(q)
    lse = torch.empty((batch, q_heads), **fp32)
    mass = torch.empty((batch, kv_heads, entries) if want_mass else (0,), **fp32)
    part_out = torch.empty((batch, q_heads, splits, head_dim) if splits > 1 else (0,), **fp32)
    part_lse = torch.empty((batch, q_heads, splits) if splits > 1 else (0,), **fp32)
    entry_lse = torch.empty((batch, q_heads, entries) if want_mass else (0,), **fp32)

    scale, cap = score_arguments(scale, softcap)
    length_strides = axis_strides(lengths)
    _decode_kernel[kv_heads, splits, batch](
        q,
        pool,
        table,
        lengths,
        q_pos,
        table if unit_pos is None else unit_pos,
        lse if sinks is None else sinks,
        out,
        lse,
        part_out,
        part_lse,
        entry_lse,
        layer,
        scale,
        cap,
        entries,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        pool.stride(0),
        *axis_strides(table),
        *length_strides,
        *((0, 0, 0) if unit_pos is None else axis_strides(unit_pos)),
        U=unit_tokens,
        D=head_dim,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        MIN_TILES=min_tiles,
        CAPPED=softcap != 0,
        SINKS=sinks is not None,
        MASS=want_mass,
        DIRECT=splits == 1,
        num_warps=warps,
        num_stages=stages,
        **common,
    )
    if splits > 1:
        _combine_kernel[q_heads, batch](
            part_out,
            part_lse,
            lengths,
            q_pos,
            lse if sinks is None else sinks,
            out,
            lse,
            layer,
            splits,
            out.stride(0),
            out.stride(1),
            *length_strides,
            D=head_dim,
            BLOCK_D=block_d,
            BLOCK_S=COMBINE_SPLITS,
            MIN_TILES=min_tiles,
            SINKS=sinks is not None,
            num_warps=4,
            **common,
        )
    if want_mass:
        _mass_kernel[triton.cdiv(entries, MASS_ENTRIES), kv_heads, batch](
            entry_lse,
            lse,
            lengths,
            q_pos,
            mass,
            layer,
            entries,
            *length_strides,
            U=unit_tokens,
            BLOCK_M=triton.next_power_of_2(group),
            BLOCK_E=MASS_ENTRIES,
            num_warps=4,
            **common,
        )
    return out, lse, mass
