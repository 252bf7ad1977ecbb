"""Combine: join the parts of each row that decoding left in several places (plan.py), by their log-sum-exps.

    out = sum_i 2^(lse_i - lse) out_i,  lse = log2 sum_i 2^lse_i        (base 2 throughout; an empty part is 0, -inf)

A program joins rows of one query head. It finds the parts by the same plan as the programs that wrote them. At most one
item begins in a program's share of a lane and ends in another's, so that of many rows few have anything to join: the
grid holds ``most`` programs a head and no more, and the rows that have are dealt out to them in turn. With one program
a row, 256 rows of 1k took 10 us to find that next to none of them had; that the plan is worked out while decoding still
runs (``gdc_wait`` comes after it) leaves the joining itself.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings
from octavo.kernels.triton.plan import item_tiles, program_of, programs_used, share_begin
from octavo.kernels.triton.tiles import LN2, LOG2E, add_sink, axis_strides


@dataclass(frozen=True)
class SharedRun:
    """What the kernel of shared.py left: parts of the rows of each group over the run that its tables share.

    ``groups`` int32 [4, B + 1] as in ``reference.decode_shared``; ``out`` fp32 [rows, D] and ``lse`` fp32 [rows]: first
    ``2 most`` places of ``kv_heads * members * g`` rows, then a row a query head of the batch for what one program
    had whole. ``members`` are attended together, in tiles of ``tile`` slots.
    """

    groups: Tensor
    out: Tensor
    lse: Tensor
    most: int
    min_tiles: int
    members: int
    tile: int


@triton.jit
def join(top, total, acc, lses, rows):
    """Online softmax over parts: ``lses [S]`` and outputs ``rows [S, D]`` joined to (top, total, acc [D])."""
    new_top = tl.maximum(top, tl.max(lses))
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(lses - pivot)
    decay = tl.exp2(top - pivot)
    return new_top, total * decay + tl.sum(weight), acc * decay + tl.sum(weight[:, None] * rows, 0)


@triton.jit
def item_parts(tiles, item, most, min_tiles, BLOCK_I: tl.constexpr):
    """Where an item's parts lie (plan.py): the place of the first, its program, and how many there are.

    ``tiles`` are those of each item; the parts after the first have the even places of the programs that follow.
    """
    i = tl.arange(0, BLOCK_I)
    begin = tl.sum(tl.where(i < item, tiles, 0))
    mine = tl.sum(tl.where(i == item, tiles, 0))
    total = tl.maximum(tl.sum(tiles), 1)
    used = programs_used(total, most, min_tiles)
    program = program_of(begin, total, used)
    parts = tl.where(mine > 0, program_of(begin + mine - 1, total, used) - program + 1, 0)
    return 2 * program + (share_begin(program, total, used) != begin).to(tl.int32), program, parts


@triton.jit
def unfinished(tiles, most, min_tiles):
    """Which items no single program has finished, bool [BLOCK_I]: those in several parts, and those without tiles."""
    ends = tl.cumsum(tiles)
    total = tl.maximum(tl.sum(tiles), 1)
    used = programs_used(total, most, min_tiles)
    return (tiles == 0) | (program_of(ends - tiles, total, used) != program_of(ends - 1, total, used))


@triton.jit
def join_parts(
    part_out,
    part_lse,
    first_place,
    first_program,
    parts,
    row,
    rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """(top, total, acc [D]) of an item's parts, in each of which a place holds ``rows`` rows and ``row`` is ours."""
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    top = tl.max(tl.full([BLOCK_S], float("-inf"), tl.float32))
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, parts, BLOCK_S):
        part = start + s
        at = tl.where(part == 0, first_place, 2 * (first_program + part)) * rows + row
        lses = tl.load(part_lse + at, mask=part < parts, other=float("-inf"))
        inside = (part < parts)[:, None] & (d < D)[None, :]
        outs = tl.load(part_out + at[:, None] * D + d[None, :], mask=inside, other=0.0)
        top, total, acc = join(top, total, acc, lses, outs)
    return top, total, acc


@triton.jit
def finish(top, total, acc, sink, SINKS: tl.constexpr):
    """Output [D] and log-sum-exp, base 2, of a row whose parts are all joined; ``sink`` is base 2, too."""
    nothing = total == 0.0
    divisor = tl.where(nothing, 1.0, total)
    acc = acc / divisor
    row_lse = tl.where(nothing, float("-inf"), top + tl.log2(divisor))
    if SINKS:
        row_lse, shrink = add_sink(row_lse, sink)
        acc = acc * shrink
    return acc, row_lse


@triton.jit
def group_part(groups, b, batch, BLOCK_B: tl.constexpr, MEMBERS: tl.constexpr, RUN_TILE: tl.constexpr):
    """Where the work of a row's group stands in the plan of shared runs (shared.py).

    Gives the row's place among the members that are attended together, the first tile, the tiles, and the tiles of all;
    no tiles if the row is in no group.
    """
    i = tl.arange(0, BLOCK_B)
    stride = batch + 1
    is_mine = (tl.load(groups + i, mask=i < batch, other=-1) == b) & (i < tl.load(groups + stride + batch))
    at = tl.sum(tl.where(is_mine, i, 0))
    begin = tl.load(groups + stride + i, mask=i < batch, other=0)
    end = tl.load(groups + stride + i + 1, mask=i < batch, other=0)
    run = tl.load(groups + 2 * stride + i, mask=i < batch, other=0) // RUN_TILE
    tiles = tl.where(end > begin, tl.cdiv(end - begin, MEMBERS) * run, 0)
    has = (begin <= at) & (at < end) & (tl.sum(is_mine.to(tl.int32)) > 0)
    offset = at - tl.sum(tl.where(has, begin, 0))
    mine = tl.sum(tl.where(has, run, 0))
    first = tl.sum(tl.where(end <= at, tiles, 0)) + offset // MEMBERS * mine
    return offset % MEMBERS, first, mine, tl.sum(tiles)


_UNSPECIALISED = ["layer", "batch", "l_layer", "l_batch", "l_head"]
_UNSPECIALISED += ["most", "min_tiles", "shared_most", "shared_min"]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _combine_kernel(
    part_out,
    part_lse,
    shared_out,
    shared_lse,
    groups,
    lengths,
    q_pos,
    sinks,
    out,
    lse,
    layer,
    batch,
    most,
    min_tiles,
    shared_most,
    shared_min,
    out_batch,
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
    DIRECT: tl.constexpr,
    OVERLAP: tl.constexpr,
    MEMBERS: tl.constexpr,
    RUN_TILE: tl.constexpr,
):
    head = tl.program_id(0)
    turn = tl.program_id(1)
    Q_HEADS: tl.constexpr = KV_HEADS * GROUP
    SKIPS: tl.constexpr = RUN_TILE > 0
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)

    i = tl.arange(0, BLOCK_I)
    ours = (i < batch * HEADS) & (i % HEADS == head // GROUP % HEADS)  # items of this head
    if not DIRECT:
        tiles = item_tiles(
            lengths + layer.to(tl.int64) * l_layer, l_batch, l_head, q_pos, groups + 3 * (batch + 1), batch * HEADS,
            HEADS, WINDOW, ORDERED, RUN_TILE, BLOCK_N, BLOCK_I,
        )  # fmt: skip
        if not SKIPS:
            ours = ours & unfinished(tiles, most, min_tiles)
    ours = ours & ((tl.cumsum(ours.to(tl.int32)) - 1) % tl.num_programs(1) == turn)

    for _ in range(tl.sum(ours.to(tl.int32))):
        item = tl.min(tl.where(ours, i, BLOCK_I))
        ours = ours & (i != item)
        b = item // HEADS
        parts = 1
        first_place = b
        first_program = 0
        if not DIRECT:
            first_place, first_program, parts = item_parts(tiles, item, most, min_tiles, BLOCK_I)
            if SKIPS:
                first_place = tl.where(parts == 1, 2 * most + b, first_place)
        if SKIPS:
            ROWS: tl.constexpr = MEMBERS * GROUP
            member, run_begin, run_tiles, all_tiles = group_part(groups, b, batch, BLOCK_I, MEMBERS, RUN_TILE)
            all_tiles = tl.maximum(all_tiles, 1)
            used = programs_used(all_tiles, shared_most, shared_min)
            p = program_of(run_begin, all_tiles, used)
            shared_parts = tl.where(run_tiles > 0, program_of(run_begin + run_tiles - 1, all_tiles, used) - p + 1, 0)
            run_place = 2 * p + (share_begin(p, all_tiles, used) != run_begin).to(tl.int32)
            run_row = member * GROUP + head % GROUP

        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        top, total_exp, acc = join_parts(
            part_out, part_lse, first_place, first_program, parts, head, Q_HEADS, D, BLOCK_D, BLOCK_S
        )
        if SKIPS:
            for start in range(0, shared_parts, BLOCK_S):
                part = start + s
                place = tl.where(part == 0, run_place, 2 * (p + part))
                at = (place * KV_HEADS + head // GROUP) * ROWS + run_row
                at = tl.where(shared_parts == 1, 2 * shared_most * KV_HEADS * ROWS + b * Q_HEADS + head, at)
                lses = tl.load(shared_lse + at, mask=part < shared_parts, other=float("-inf"))
                inside = (part < shared_parts)[:, None] & (d < D)[None, :]
                rows = tl.load(shared_out + at[:, None] * D + d[None, :], mask=inside, other=0.0)
                top, total_exp, acc = join(top, total_exp, acc, lses, rows)

        sink = 0.0
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        acc, row_lse = finish(top, total_exp, acc, sink, SINKS)
        tl.store(out + b * out_batch + head * out_head + d, acc, mask=d < D)
        tl.store(lse + b * Q_HEADS + head, row_lse * LN2)
    if OVERLAP:  # whoever had nothing to join, too, or this kernel could end before the one that writes the parts
        tl.extra.cuda.gdc_wait()


def combine_parts(
    run: SharedRun | None,
    part_out: Tensor,
    part_lse: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    layer: int,
    most: int,
    min_tiles: int,
    plan: dict[str, Any],
) -> None:
    """Finish ``out [B, Hq, D]`` and ``lse [B, Hq]`` from the parts that a decode with this ``plan`` left."""
    batch, q_heads, _ = out.shape
    key = "one" if batch == 1 else "any" if run is None else "shared"
    programs = batch if run is not None else min(batch, most)  # what shares a run is joined with it, in every row
    _combine_kernel[q_heads, programs](
        part_out,
        part_lse,
        lse if run is None else run.out,
        lse if run is None else run.lse,
        q_pos if run is None else run.groups,
        lengths,
        q_pos,
        lse if sinks is None else sinks,
        out,
        lse,
        layer,
        batch,
        most,
        min_tiles,
        0 if run is None else run.most,
        0 if run is None else run.min_tiles,
        out.stride(0),
        out.stride(1),
        *axis_strides(lengths),
        MEMBERS=0 if run is None else run.members,
        launch_pdl=plan["OVERLAP"],
        **settings.launch("combine", key, out.device),
        **plan,
    )
