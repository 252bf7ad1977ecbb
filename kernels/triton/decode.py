"""Decode: one query a sequence over its table, split over the table's entries, then combined.

    q          [B, Hq, D]            the g query heads of a KV head are the rows of one matrix product, padded to 16
    table      int32 [Lt, B, Ht, M]  axes of size 1 broadcast: their stride is passed as 0
    part_out   fp32 [S, Hq, D]       normalised output of each split
    part_lse   fp32 [S, Hq]          its log-sum-exp, base 2
    piece_lse  fp32 [B, Hq, P]       log-sum-exp, base 2, of the scores on each piece of the table, when mass is wanted;
                                     a piece is an entry, or BLOCK_N slots of one that is larger

Every launch argument comes from shapes and from the number of SMs alone, so a captured graph replays at any length. The
lengths are read on the device, where each program works out the same plan (``plan``): the tiles of the whole batch over
the number of programs wanted is the share of a split; a sequence gets as many splits as its tiles need, and the splits
of the sequences follow each other. So a split is a like amount of work in a ragged batch too. Splits that no sequence
needs exit at once. A table too short to be split takes one program a row (DIRECT) and no combine.

A tile is BLOCK_N slots, whatever the unit: each tile row finds its own entry, one vector load for the tile, fetched one
tile ahead so that the loads of K and V never wait for the table. A row past the end reads entry 0, whose valid count is
0, so that one comparison with the valid count masks everything that holds no token. Masked rows are loaded as zeros:
what lies in an unused slot, NaN included, cannot matter.

Flash-decoding (Dao et al., 2023) with the query heads packed into the product's rows as in "The Anatomy of a Triton
Attention Kernel" (arXiv 2511.11581).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import log
from octavo.kernels.triton import settings
from octavo.kernels.triton.tiles import (
    LN2,
    LOG2E,
    add_sink,
    axis_strides,
    load_entries,
    locate,
    scaled,
    score_arguments,
)


@triton.jit
def span(length, q_pos, WINDOW: tl.constexpr, ORDERED: tl.constexpr, BLOCK_N: tl.constexpr):
    """First slot (of a tile), end and tiles of what a query may see; an ordered table ends at the query's position."""
    first = length * 0
    end = length
    if ORDERED:
        end = tl.maximum(tl.minimum(length, q_pos + 1), 0)
        if WINDOW > 0:
            first = tl.maximum(q_pos + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    return first, end, tl.maximum(tl.cdiv(end - first, BLOCK_N), 0)


@triton.jit
def plan(
    lengths,
    l_batch,
    q_pos,
    batch,
    wanted,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Number of splits of each sequence, int32 [BLOCK_B]; in all at most ``wanted + batch``."""
    b = tl.arange(0, BLOCK_B)
    length = tl.load(lengths + b * l_batch, mask=b < batch, other=0)
    position = tl.load(q_pos + b, mask=b < batch, other=-1)
    _, _, tiles = span(length, position, WINDOW, ORDERED, BLOCK_N)
    tiles = tl.where(b < batch, tiles, 0)
    return tl.cdiv(tiles, tl.maximum(tl.cdiv(tl.sum(tiles), wanted), MIN_TILES))


_UNSPECIALISED = ["layer", "batch", "wanted", "scale", "cap", "l_layer", "l_batch", "l_head"]
_UNSPECIALISED += ["t_layer", "t_batch", "t_head", "p_layer", "p_batch", "p_head", "entries", "pieces"]


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
    piece_lse,
    layer,
    batch,
    wanted,
    scale,
    cap,
    pieces,
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
    BLOCK_B: tl.constexpr,
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
    kv_heads = tl.num_programs(0)
    layer = layer.to(tl.int64)
    lengths += layer * l_layer + head * l_head

    b = split
    part = 0  # of the sequence's splits
    parts = 1
    if not DIRECT:
        splits = plan(lengths, l_batch, q_pos, batch, wanted, WINDOW, ORDERED, BLOCK_N, BLOCK_B, MIN_TILES)
        ends = tl.cumsum(splits)
        b = tl.sum((ends <= split).to(tl.int32))
        if b >= batch:
            return
        mine = tl.arange(0, BLOCK_B) == b
        parts = tl.sum(tl.where(mine, splits, 0))
        part = split - tl.sum(tl.where(mine, ends, 0)) + parts
    position = tl.load(q_pos + b)
    first, last, tiles = span(tl.load(lengths + b * l_batch), position, WINDOW, ORDERED, BLOCK_N)
    share = tl.cdiv(tiles, parts) * BLOCK_N  # even within the sequence
    first += part * share
    last = tl.minimum(first + share, last)

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
            PIECE: tl.constexpr = min(U, BLOCK_N)
            by_piece = tl.sum(tl.reshape(probs, [BLOCK_M, BLOCK_N // PIECE, PIECE]), 2)  # [M, N / PIECE]
            index = start // PIECE + tl.arange(0, BLOCK_N // PIECE)
            to = piece_lse + (b * (kv_heads * GROUP) + heads)[:, None].to(tl.int64) * pieces + index[None, :]
            keep = (m < GROUP)[:, None] & (index * PIECE < last)[None, :]
            tl.store(to, pivot[:, None] + tl.log2(by_piece), mask=keep)
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
        at_part = split * (kv_heads * GROUP) + heads
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
    batch,
    wanted,
    out_batch,
    out_head,
    l_layer,
    l_batch,
    l_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
    SINKS: tl.constexpr,
):
    head = tl.program_id(0)
    b = tl.program_id(1)
    lengths += layer.to(tl.int64) * l_layer + head // GROUP * l_head
    splits = plan(lengths, l_batch, q_pos, batch, wanted, WINDOW, ORDERED, BLOCK_N, BLOCK_B, MIN_TILES)
    stop = tl.sum(tl.where(tl.arange(0, BLOCK_B) <= b, splits, 0))
    begin = stop - tl.sum(tl.where(tl.arange(0, BLOCK_B) == b, splits, 0))

    d = tl.arange(0, BLOCK_D)
    at_row = b * tl.num_programs(0) + head
    top = tl.max(tl.full([BLOCK_S], float("-inf"), tl.float32))
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(begin, stop, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        at_part = split * tl.num_programs(0) + head
        part = tl.load(part_lse + at_part, mask=split < stop, other=float("-inf"))  # [S]
        inside = (split < stop)[:, None] & (d < D)[None, :]
        rows = tl.load(part_out + at_part[:, None] * D + d[None, :], mask=inside, other=0.0)  # [S, D]
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
    piece_lse,
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
    first, end, _ = span(length, tl.load(q_pos + b), WINDOW, ORDERED, BLOCK_N)

    at_row = b * tl.num_programs(1) + head
    m = tl.arange(0, BLOCK_M)
    rows = at_row * GROUP + m
    denominator = tl.load(lse + rows, mask=m < GROUP, other=0.0) * LOG2E
    # A row that saw nothing has only pieces of minus infinity; any finite denominator makes them 0.
    denominator = tl.where(denominator == float("-inf"), 0.0, denominator)

    index = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    PIECE: tl.constexpr = min(U, BLOCK_N)
    total = tl.zeros([BLOCK_E], tl.float32)
    for i in tl.static_range(U // PIECE):
        piece = index * (U // PIECE) + i
        slot = piece * PIECE
        written = (slot >= first) & (slot < end)  # the decode kernel visited these and no others
        at = piece_lse + rows[:, None].to(tl.int64) * (entries * (U // PIECE)) + piece[None, :]
        share = tl.load(at, mask=(m < GROUP)[:, None] & written[None, :], other=float("-inf"))  # [M, E]
        total += tl.sum(tl.exp2(share - denominator[:, None]), 0)
    tl.store(mass + at_row.to(tl.int64) * entries + index, total / GROUP, mask=index < entries)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def split_counts(
    batch: int, kv_heads: int, slots: int, multiprocessors: int, tuned: Mapping[str, int]
) -> tuple[int, int]:
    """Splits of a KV head: those wanted for a full machine, and at most how many there are (0: a program a row).

    From shapes alone, never from lengths; ``slots`` is the capacity of a table row.
    """
    most = triton.cdiv(slots, tuned["min_split_tokens"])
    wanted = max(tuned["programs_per_sm"] * multiprocessors * min(batch, tuned["rounds"]) // kv_heads, 1)
    return wanted, min(wanted + batch, batch * most) if most > 1 else 0


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
    want_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference.decode``."""
    batch, q_heads, head_dim = q.shape
    kv_heads, unit_tokens, entries = pool.shape[3], pool.shape[4], table.shape[3]
    assert pool.is_contiguous() and q.stride(2) == table.stride(3) == 1

    block_d = max(triton.next_power_of_2(head_dim), 16)
    tuned = settings.launch("decode", f"{block_d}x{q.element_size()}", q.device)
    block_n = tuned["BLOCK_N"]
    wanted, splits = split_counts(batch, kv_heads, entries * unit_tokens, _multiprocessors(q.device), tuned)
    group = q_heads // kv_heads
    block_m = max(triton.next_power_of_2(group), 16)
    common = {
        "GROUP": group,
        "BLOCK_N": block_n,
        "WINDOW": window,
        "ORDERED": unit_pos is None,
    }
    division = {
        "BLOCK_B": 1 if batch == 1 else max(triton.next_power_of_2(batch), 128),
        "MIN_TILES": max(tuned["min_split_tokens"] // block_n, 1),
    }

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    if log.KERNELS:
        kernel = f"Triton, at most {splits} splits a KV head, combined" if splits else "Triton, a program a row"
        log.chosen(
            "decode",
            "triton",
            kernel,
            pool,
            query_heads=q_heads,
            rows=batch,
            entries=entries,
            tile=block_n,
            mass=want_mass,
        )
    out = torch.empty_like(q)
    lse = fp32(batch, q_heads)
    part_out, part_lse = fp32(splits, q_heads, head_dim), fp32(splits, q_heads)
    pieces = entries * max(unit_tokens // block_n, 1)
    mass = fp32(batch, kv_heads, entries) if want_mass else fp32(0)
    piece_lse = fp32(batch, q_heads, pieces) if want_mass else fp32(0)

    scale, cap = score_arguments(scale, softcap)
    length_strides = axis_strides(lengths)
    _decode_kernel[kv_heads, splits or batch](
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
        piece_lse,
        layer,
        batch,
        wanted,
        scale,
        cap,
        pieces,
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
        CAPPED=softcap != 0,
        SINKS=sinks is not None,
        MASS=want_mass,
        DIRECT=splits == 0,
        num_warps=tuned["num_warps"],
        num_stages=tuned["num_stages"],
        **common,
        **division,
    )
    if splits:
        _combine_kernel[q_heads, batch](
            part_out,
            part_lse,
            lengths,
            q_pos,
            lse if sinks is None else sinks,
            out,
            lse,
            layer,
            batch,
            wanted,
            out.stride(0),
            out.stride(1),
            *length_strides,
            D=head_dim,
            BLOCK_D=block_d,
            SINKS=sinks is not None,
            **settings.launch("combine", "any", q.device),
            **common,
            **division,
        )
    if want_mass:
        mass_tuned = settings.launch("mass", "any", q.device)
        _mass_kernel[triton.cdiv(entries, mass_tuned["BLOCK_E"]), kv_heads, batch](
            piece_lse,
            lse,
            lengths,
            q_pos,
            mass,
            layer,
            entries,
            *length_strides,
            U=unit_tokens,
            BLOCK_M=triton.next_power_of_2(group),
            **mass_tuned,
            **common,
        )
    return out, lse if want_lse else lse.new_empty(0), mass
