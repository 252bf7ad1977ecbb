"""Group decode: rows whose tables begin with the same units read those units once (copy-on-write forks, prefix hits).

Decoding in two passes. This kernel attends from all members of a group to the run that they share: the query heads of
up to MEMBERS rows stand in one matrix product, so that K and V are read once a group and not once a row. Then
``decode.py`` attends to what each row has of its own, and ``combine.py`` joins the parts.

    item    (group, MEMBERS rows of it); its tiles are those of the shared run. Shares of programs as in plan.py
    m       row of the product: member m // g, query head m % g of the KV head

    part_out fp32 [2 S, Hkv, MEMBERS g, D], then [B, Hq, D] for items that one program had whole; part_lse without D

Of the shared run, whole tiles are served here; the rest of less than a tile is left to the second pass.

Hydragen (arXiv 2402.05099) and cascade inference (FlashInfer, arXiv 2501.01005) with the groups taken from the block
tables.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings
from octavo.kernels.triton.attend import attend
from octavo.kernels.triton.combine import SharedRun
from octavo.kernels.triton.decode import decode_after
from octavo.kernels.triton.plan import (
    multiprocessors,
    overlaps_launches,
    programs_a_lane,
    programs_used,
    share_begin,
)
from octavo.kernels.triton.tiles import axis_strides, score_arguments

_UNSPECIALISED = ["layer", "batch", "most", "min_tiles", "scale", "cap", "t_layer", "t_batch", "t_head"]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _shared_kernel(
    q,
    pool,
    table,
    groups,
    part_out,
    part_lse,
    layer,
    batch,
    most,
    min_tiles,
    scale,
    cap,
    q_batch,
    q_head,
    unit_stride,
    t_layer,
    t_batch,
    t_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    U: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    CAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0)
    program = tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    layer = layer.to(tl.int64)
    keys = pool + layer * (2 * KV_HEADS * U * D) + head * (U * D)
    table += layer * t_layer + head * t_head

    g = tl.arange(0, BLOCK_B)
    bounds = groups + batch + 1
    begins = tl.load(bounds + g, mask=g < batch, other=0)
    sizes = tl.load(bounds + g + 1, mask=g < batch, other=0) - begins
    runs = tl.load(bounds + batch + 1 + g, mask=g < batch, other=0) // BLOCK_N  # tiles
    tiles = tl.where(sizes > 0, tl.cdiv(sizes, MEMBERS) * runs, 0)
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
        mine = g == tl.sum((ends <= now).to(tl.int32))
        run = tl.sum(tl.where(mine, runs, 0))
        offset = now - tl.sum(tl.where(mine, ends - tiles, 0))
        first = offset % run
        until = tl.minimum(stop, now + run - first)
        whole = until - now == run
        begin = tl.sum(tl.where(mine, begins, 0))
        member = offset // run * MEMBERS + m // GROUP
        live = (m < MEMBERS * GROUP) & (member < tl.sum(tl.where(mine, sizes, 0)))
        b = tl.load(groups + begin + member, mask=live, other=0)  # [M]
        heads = head * GROUP + m % GROUP
        inside = live[:, None] & (d < D)[None, :]
        acc, row_lse = attend(
            tl.load(q + b[:, None] * q_batch + heads[:, None] * q_head + d[None, :], mask=inside, other=0.0),
            0,
            table + tl.load(groups + begin) * t_batch,
            table,
            keys,
            keys + KV_HEADS * U * D,
            first * BLOCK_N,
            (first + until - now) * BLOCK_N,
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
            0,
            CAPPED,
            True,
            False,
            True,
        )
        ROWS: tl.constexpr = MEMBERS * GROUP
        compact = 2 * most * (KV_HEADS * ROWS) + b * (KV_HEADS * GROUP) + heads
        at = tl.where(whole, compact, (place * KV_HEADS + head) * ROWS + m).to(tl.int64)
        tl.store(part_out + at[:, None] * D + d[None, :], acc, mask=inside)
        tl.store(part_lse + at, row_lse, mask=live)
        place = 2 * program + 1
        now = until


def decode_shared(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    groups: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """See ``reference.decode_shared``."""
    batch, q_heads, head_dim = q.shape
    kv_heads, unit_tokens, entries = pool.shape[3], pool.shape[4], table.shape[3]
    assert pool.is_contiguous() and groups.is_contiguous() and q.stride(2) == table.stride(3) == 1
    group = q_heads // kv_heads
    block_d = max(triton.next_power_of_2(head_dim), 16)
    tuned = settings.launch("shared", f"{block_d}x{pool.element_size()}", q.device)
    block_m = max(min(tuned["BLOCK_M"], triton.next_power_of_2(batch * group)), triton.next_power_of_2(group), 16)
    members = block_m // group
    most, min_tiles = programs_a_lane(batch, kv_heads, entries * unit_tokens, multiprocessors(q.device), tuned)
    most = max(most, 1)
    rows = 2 * most * kv_heads * members * group + batch * q_heads
    part_out = torch.empty((rows, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    folded_scale, cap = score_arguments(scale, softcap)
    overlap = overlaps_launches(q.device)
    _shared_kernel[kv_heads, most](
        q,
        pool,
        table,
        groups,
        part_out,
        part_lse,
        layer,
        batch,
        most,
        min_tiles,
        folded_scale,
        cap,
        q.stride(0),
        q.stride(1),
        pool.stride(0),
        *axis_strides(table),
        KV_HEADS=kv_heads,
        GROUP=group,
        MEMBERS=members,
        U=unit_tokens,
        D=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=tuned["BLOCK_N"],
        BLOCK_D=block_d,
        BLOCK_B=max(triton.next_power_of_2(batch), 16),
        CAPPED=softcap != 0,
        OVERLAP=overlap,
        num_warps=tuned["num_warps"] if block_m >= 64 else 4,
        num_stages=tuned["num_stages"],
        launch_pdl=overlap,
    )
    run = SharedRun(groups, part_out, part_lse, most, min_tiles, members, tuned["BLOCK_N"])
    out, _, _ = decode_after(
        run, None, q, pool, layer, table, lengths, q_pos, None, sinks, scale, 0, softcap, False, False
    )
    return out
