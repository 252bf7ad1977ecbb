"""Decode: one query a sequence over its table, in equal shares of the batch's tiles, then combined.

    q          [B, Hq, D]            the g query heads of a KV head are the rows of one matrix product, padded to 16
    table      int32 [Lt, B, Ht, M]  axes of size 1 broadcast: their stride is passed as 0
    part_out   fp32 [2 S + B, Hq, D] normalised output of each part of a row (plan.py says which part lies where)
    part_lse   fp32 [2 S + B, Hq]    its log-sum-exp, base 2
    piece_lse  fp32 [B, Hq, P]       log-sum-exp, base 2, of the scores on each piece of the table, when mass is wanted;
                                     a piece is an entry, or BLOCK_N slots of one that is larger

Every launch argument comes from shapes and from the number of SMs alone, so a captured graph replays at any length.
The lengths are read on the device, where each program works out the same plan (``plan.py``) and walks through its
share: the rest of one row, whole rows, the beginning of another. A table too short to be split takes one program a row
(DIRECT) and no combine.

FRESH  The row's newest token is not in the pool yet: append and decode in one launch, for steps in which both are next
       to nothing but launches. The program that has the end of a row stores K and V in the token's slot, and attends to
       it out of registers, before the slots of the pool::

           slots of the row   | 0 ...            | ...              | ... L - 2 | L - 1: the new token |
           programs           |        p         |      p + 1       |        p + 2                     |
                                                                      reads the slots before it, writes it

       No program reads what another one writes in the same launch. With ROTARY, Q and K are turned as they are loaded
       (rotary.py), which spares the step a launch that would do nothing else.

A tile is BLOCK_N slots, whatever the unit; its entries are fetched one tile ahead so that the loads of K and V never
wait for the table. Masked rows are loaded as zeros: what lies in an unused slot, NaN included, cannot matter.

On Hopper most of what is asked of this file is served by a kernel in CUDA (``kernels/hopper/decode.py``).

Flash-decoding (Dao et al., 2023) with the query heads packed into the product's rows as in "The Anatomy of a Triton
Attention Kernel" (arXiv 2511.11581).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import log
from octavo.kernels.fresh import Fresh
from octavo.kernels.hopper import decode as hopper
from octavo.kernels.triton import settings
from octavo.kernels.triton.attend import attend
from octavo.kernels.triton.combine import SharedRun, combine_parts
from octavo.kernels.triton.mass import finish_mass
from octavo.kernels.triton.plan import (
    item_tiles,
    multiprocessors,
    overlaps_launches,
    programs_a_lane,
    programs_used,
    share_begin,
    skipped,
    span,
)
from octavo.kernels.triton.rotary import load_turned
from octavo.kernels.triton.tiles import LN2, LOG2E, add_sink, axis_strides, scaled, score_arguments

MANY_ROWS = 32  # from here on, the settings of a key that ends in "many"

_UNSPECIALISED = ["layer", "items", "most", "min_tiles", "scale", "cap", "pieces"]
_UNSPECIALISED += [f"{x}_{axis}" for x in "ltp" for axis in ("layer", "batch", "head")]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _decode_kernel(
    q,
    pool,
    table,
    lengths,
    q_pos,
    skips,
    unit_pos,
    sinks,
    out,
    lse,
    part_out,
    part_lse,
    piece_lse,
    k,
    v,
    slots,
    cos,
    sin,
    layer,
    items,
    most,
    min_tiles,
    scale,
    cap,
    pieces,
    k_batch,
    k_head,
    v_batch,
    v_head,
    angle_row,
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
    MASS: tl.constexpr,
    RUN_TILE: tl.constexpr,
    DIRECT: tl.constexpr,
    OVERLAP: tl.constexpr,
    FRESH: tl.constexpr,
    ROTARY: tl.constexpr,
):
    LANES: tl.constexpr = KV_HEADS // HEADS
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

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q_mask = (m < GROUP)[:, None] & (d < D)[None, :]

    now = 0  # a tile of the lane, and the end of the program's share
    stop = 1
    part = 2 * program
    if not DIRECT:
        tiles = item_tiles(
            lengths, l_batch, l_head, q_pos, skips, items, HEADS, WINDOW, ORDERED, RUN_TILE, BLOCK_N, BLOCK_I
        )
        ends = tl.cumsum(tiles)
        total = tl.sum(tiles)
        used = programs_used(total, most, min_tiles)
        if program >= used:
            return
        now = share_begin(program, total, used)
        stop = share_begin(program + 1, total, used)

    while now < stop:
        item = program
        if not DIRECT:
            item = tl.sum((ends <= now).to(tl.int32))
        b = item // HEADS
        head = item % HEADS * LANES + lane
        position = tl.load(q_pos + b)
        skip = 0
        if RUN_TILE > 0:
            skip = skipped(tl.load(skips + b), RUN_TILE)
        first, last, _ = span(tl.load(lengths + b * l_batch + head * l_head), position, skip, WINDOW, ORDERED, BLOCK_N)
        if DIRECT:
            whole = True
            has_end = last > first
            now = stop
        else:
            mine = tl.arange(0, BLOCK_I) == item
            item_end = tl.sum(tl.where(mine, ends, 0))
            item_begin = item_end - tl.sum(tl.where(mine, tiles, 0))
            until = tl.minimum(stop, item_end)
            has_end = until == item_end
            whole = (now == item_begin) & has_end
            last = tl.minimum(first + (until - item_begin) * BLOCK_N, last)
            first += (now - item_begin) * BLOCK_N
            now = until

        keys = pool + head * (U * D)
        values = keys + KV_HEADS * U * D
        heads = head * GROUP + m  # [M]
        at_row = b * (KV_HEADS * GROUP) + heads
        c = cos + b.to(tl.int64) * angle_row
        s = sin + b.to(tl.int64) * angle_row
        query = load_turned(q + b * q_batch, c, s, heads, m < GROUP, q_head, 0, D, ROTARY, BLOCK_D)
        if FRESH:
            one = tl.arange(0, 1)
            fresh = load_turned(
                k + b * k_batch + head * k_head, c, s, one, (one == 0) & has_end, 0, 0, D, ROTARY, BLOCK_D
            )
            fresh_key = tl.sum(fresh.to(tl.float32), 0).to(pool.dtype.element_ty)  # [D]
            mine = (d < D) & has_end
            fresh_value = tl.load(v + b * v_batch + head * v_head + d, mask=mine, other=0.0).to(pool.dtype.element_ty)
            slot = tl.load(slots + b, mask=has_end, other=0)
            at = slot // U * unit_stride + slot % U * D
            tl.store(keys + at + d, fresh_key, mask=mine)
            tl.store(values + at + d, fresh_value, mask=mine)
            asked = query.to(pool.dtype.element_ty)  # as attend asks the others
            dots = tl.sum(asked.to(tl.float32) * fresh_key.to(tl.float32)[None, :], 1)
            fresh_score = tl.where(has_end, scaled(dots, scale, cap, CAPPED), float("-inf"))
            last -= has_end.to(tl.int32)
        else:
            fresh_score = None
            fresh_value = None
        acc, row_lse = attend(
            query,
            position,
            table + b * t_batch + head * t_head,
            unit_pos + b * p_batch + head * p_head,
            keys,
            values,
            first,
            last,
            unit_stride,
            scale,
            cap,
            piece_lse + at_row.to(tl.int64) * pieces,
            m < GROUP,
            U,
            D,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            WINDOW,
            CAPPED,
            ORDERED,
            MASS,
            False,
            False,
            fresh_score,
            fresh_value,
            FRESH,
        )
        done = whole
        if RUN_TILE > 0:  # a whole row is still to be joined with the shared run
            done = False
        if done:
            if SINKS:
                sink = tl.load(sinks + heads, mask=m < GROUP, other=0.0).to(tl.float32) * LOG2E
                row_lse, shrink = add_sink(row_lse, sink)
                acc = acc * shrink[:, None]
            tl.store(out + b * out_batch + heads[:, None] * out_head + d[None, :], acc, mask=q_mask)
            tl.store(lse + at_row, row_lse * LN2, mask=m < GROUP)
        else:
            place = tl.where(whole, 2 * most + b, part)
            at_part = place * (KV_HEADS * GROUP) + heads
            tl.store(part_out + at_part[:, None] * D + d[None, :], acc, mask=q_mask)
            tl.store(part_lse + at_part, row_lse, mask=m < GROUP)
        part = 2 * program + 1


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
    scores = (unit_pos, sinks, scale, window, softcap)
    return decode_after(None, None, q, pool, layer, table, lengths, q_pos, *scores, want_mass, want_lse)


def append_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    layer: int,
    slots: Tensor,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """See ``reference.append_decode``."""
    assert k.stride(2) == v.stride(2) == slots.stride(0) == 1
    if cos is not None:
        assert sin is not None and cos.shape == sin.shape and cos.stride() == sin.stride() and cos.stride(1) == 1
        assert cos.shape[1] % 2 == 0 and cos.shape[1] <= k.shape[2]
    fresh, scores = Fresh(k, v, slots, cos, sin), (None, sinks, scale, window, softcap)
    return decode_after(None, fresh, q, pool, layer, table, lengths, q_pos, *scores, False, False)[0]


def decode_after(
    run: SharedRun | None,
    fresh: Fresh | None,
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
    """``decode`` where what groups of rows share has been attended to already (``run``), if anything has, or where the
    last token of each row comes from elsewhere than the pool (``fresh``)."""
    batch, q_heads, head_dim = q.shape
    kv_heads, unit_tokens, entries = pool.shape[3], pool.shape[4], table.shape[3]
    assert pool.is_contiguous() and q.stride(2) == table.stride(3) == 1

    if run is None and unit_pos is None and not want_mass and hopper.serves(q, fresh, pool, sinks):
        out, lse = hopper.decode(q, fresh, pool, layer, table, lengths, q_pos, sinks, scale, window, softcap)
        return out, lse if want_lse else lse.new_empty(0), lse.new_empty(0)

    block_d = max(triton.next_power_of_2(head_dim), 16)
    many = " many" if batch >= MANY_ROWS else ""
    tuned = settings.launch("decode", f"{block_d}x{pool.element_size()}{many}", q.device)
    block_n, group, heads = tuned["BLOCK_N"], q_heads // kv_heads, lengths.shape[2]
    items = batch * heads
    most, min_tiles = programs_a_lane(items, kv_heads // heads, entries * unit_tokens, multiprocessors(q.device), tuned)
    plan = {
        "KV_HEADS": kv_heads,
        "HEADS": heads,
        "GROUP": group,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "BLOCK_I": 1 if items == 1 else max(triton.next_power_of_2(items), 128),
        "WINDOW": window,
        "ORDERED": unit_pos is None,
        "SINKS": sinks is not None,
        "DIRECT": most == 0,
        "RUN_TILE": 0 if run is None else run.tile,
        "D": head_dim,
        "OVERLAP": overlaps_launches(q.device),
    }

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    if log.KERNELS:
        kernel = f"Triton, at most {most} programs a KV head, combined" if most else "Triton, a program a row"
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
    parts = 2 * most + (0 if run is None else batch)
    part_out, part_lse = fp32(parts, q_heads, head_dim), fp32(parts, q_heads)
    pieces = entries * max(unit_tokens // block_n, 1)
    piece_lse = fp32(batch, q_heads, pieces) if want_mass else fp32(0)

    scale, cap = score_arguments(scale, softcap)
    length_strides = axis_strides(lengths)
    new = Fresh(q, q, q, None, None) if fresh is None else fresh  # the first stands for what is left out
    _decode_kernel[kv_heads // heads, most or items](
        q,
        pool,
        table,
        lengths,
        q_pos,
        lengths if run is None else run.groups[3],
        table if unit_pos is None else unit_pos,
        lse if sinks is None else sinks,
        out,
        lse,
        part_out,
        part_lse,
        piece_lse,
        new.k,
        new.v,
        new.slots,
        q if new.cos is None else new.cos,
        q if new.sin is None else new.sin,
        layer,
        items,
        most,
        min_tiles,
        scale,
        cap,
        pieces,
        new.k.stride(0),
        new.k.stride(1),
        new.v.stride(0),
        new.v.stride(1),
        0 if new.cos is None else new.cos.stride(0),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        pool.stride(0),
        *axis_strides(table),
        *length_strides,
        *((0, 0, 0) if unit_pos is None else axis_strides(unit_pos)),
        U=unit_tokens,
        BLOCK_M=max(triton.next_power_of_2(group), 16),
        CAPPED=softcap != 0,
        MASS=want_mass,
        FRESH=fresh is not None,
        ROTARY=0 if new.cos is None else new.cos.shape[1],
        num_warps=tuned["num_warps"],
        num_stages=tuned["num_stages"],
        launch_pdl=plan["OVERLAP"],
        **plan,
    )
    if most or run is not None:
        combine_parts(run, part_out, part_lse, lengths, q_pos, sinks, out, lse, layer, most, min_tiles, plan)
    mass = fp32(0)
    if want_mass:
        mass = fp32(batch, kv_heads, entries)
        finish_mass(piece_lse, lse, lengths, q_pos, mass, layer, plan, unit_tokens)
    return out, lse if want_lse else lse.new_empty(0), mass
