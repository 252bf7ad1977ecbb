"""Attention mass: from the log-sum-exps of a row's pieces to the share of its softmax that fell on each table entry."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings
from octavo.kernels.triton.plan import span
from octavo.kernels.triton.tiles import LOG2E, axis_strides


@triton.jit(do_not_specialize=["layer", "entries", "l_layer", "l_batch", "l_head"])
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
    first, end, _ = span(length, tl.load(q_pos + b), 0, WINDOW, ORDERED, BLOCK_N)

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


def finish_mass(
    piece_lse: Tensor,
    lse: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    mass: Tensor,
    layer: int,
    plan: dict[str, Any],
    unit_tokens: int,
) -> None:
    """Fill ``mass`` fp32 [B, Hkv, M] from ``piece_lse`` fp32 [B, Hq, P] and ``lse`` fp32 [B, Hq] of a decode."""
    batch, kv_heads, entries = mass.shape
    tuned = settings.launch("mass", "any", mass.device)
    _mass_kernel[triton.cdiv(entries, tuned["BLOCK_E"]), kv_heads, batch](
        piece_lse,
        lse,
        lengths,
        q_pos,
        mass,
        layer,
        entries,
        *axis_strides(lengths),
        U=unit_tokens,
        BLOCK_M=triton.next_power_of_2(plan["GROUP"]),
        **{name: plan[name] for name in ("GROUP", "BLOCK_N", "WINDOW", "ORDERED")},
        **tuned,
    )
