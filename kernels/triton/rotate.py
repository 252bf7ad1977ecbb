"""Rotation: turn cached keys in their pages, or queries, by some positions.

    pool       [units, layers, 2, kv_heads, unit_tokens, head_dim], see layout.py
    units      int32 [n, 2]        source and destination
    deltas     int32 [n]
    inv_freq   fp32 [kinds, Dr/2]  kinds int32 [layers] says which row a layer takes

All keys of a unit's layer turn alike, and they lie side by side, rows of a matrix of which a program takes TILES tiles
of BLOCK_R each::

    unit, layer   | K: head 0 [u, D] | head 1 | ... | V: head 0 | ...
                    ^ kv_heads * u rows of D          ^ kv_heads * u rows of D: copied, if the unit moves

So cosine and sine, the only costly arithmetic, are taken once a program, and the kernel streams K in and out, and V
with it, for all layers in one launch. The angle is reduced to an eighth of a turn in fp64, where the product of delta
and frequency is exact; there the Taylor polynomials below are as good as fp32. The library's own sine would carry
along a branch for large arguments.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings

TURNS = tl.constexpr(1 / (2 * math.pi))
RADIANS = tl.constexpr(2 * math.pi)


@triton.jit
def cos_sin(delta, inv_freq, HALF: tl.constexpr, BLOCK_P: tl.constexpr):
    """Cosine and sine, fp32 [P], of ``delta * inv_freq[i]``; of 0 past HALF."""
    pair = tl.arange(0, BLOCK_P)
    frequency = tl.load(inv_freq + pair, mask=pair < HALF, other=0.0)
    turns = delta.to(tl.float64) * frequency.to(tl.float64) * TURNS
    quarters = tl.floor(4 * turns + 0.5)
    x = ((turns - quarters * 0.25) * RADIANS).to(tl.float32)  # at most pi / 4 from 0
    x2 = x * x
    sine = x * (1 + x2 * (-1 / 6 + x2 * (1 / 120 + x2 * (-1 / 5040 + x2 * (1 / 362880)))))
    cosine = 1 + x2 * (-1 / 2 + x2 * (1 / 24 + x2 * (-1 / 720 + x2 * (1 / 40320))))
    # Each quarter turn maps (cos, sin) to (-sin, cos).
    quarter = quarters.to(tl.int32) & 3
    odd = (quarter & 1) == 1
    cos = tl.where(odd, sine, cosine)
    sin = tl.where(odd, cosine, sine)
    return tl.where((quarter == 1) | (quarter == 2), -cos, cos), tl.where(quarter >= 2, -sin, sin)


@triton.jit
def turn_rows(
    source,
    target,
    inside,
    cos,
    sin,
    HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Turn the first 2 HALF elements of the rows at ``source`` into those at ``target`` (pointers [R])."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK_P)
        live = inside[:, None] & (column < 2 * HALF)[None, :]
        both = tl.load(source[:, None] + column[None, :], mask=live)
        first, second = tl.split(tl.reshape(both, [BLOCK_R, BLOCK_P, 2]))
    else:
        column = tl.arange(0, BLOCK_P)
        live = inside[:, None] & (column < HALF)[None, :]
        first = tl.load(source[:, None] + column[None, :], mask=live)
        second = tl.load(source[:, None] + (HALF + column)[None, :], mask=live)
    first = first.to(tl.float32)  # [R, P]
    second = second.to(tl.float32)
    turned = first * cos[None, :] - second * sin[None, :]
    second = second * cos[None, :] + first * sin[None, :]
    if INTERLEAVED:
        both = tl.reshape(tl.join(turned, second), [BLOCK_R, 2 * BLOCK_P])
        tl.store(target[:, None] + column[None, :], both, mask=live)
    else:
        tl.store(target[:, None] + column[None, :], turned, mask=live)
        tl.store(target[:, None] + (HALF + column)[None, :], second, mask=live)


@triton.jit(do_not_specialize=["first_layer", "layers", "blocks"])
def _rotate_keys_kernel(
    pool,
    units,
    deltas,
    inv_freq,
    kinds,
    first_layer,
    layers,
    blocks,
    unit_stride,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    program = tl.program_id(0)
    pair = program // (blocks * layers)
    layer = first_layer + program // blocks % layers
    source_unit = tl.load(units + 2 * pair)
    target_unit = tl.load(units + 2 * pair + 1)
    delta = tl.load(deltas + pair)
    moves = source_unit != target_unit
    if (delta == 0) & (source_unit == target_unit):  # padding
        return
    cos, sin = cos_sin(delta, inv_freq + tl.load(kinds + layer) * HALF, HALF, BLOCK_P)

    d = tl.arange(0, BLOCK_D)
    for tile in tl.static_range(TILES):
        row = (program % blocks * TILES + tile) * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = row < ROWS
        at = layer * (2 * ROWS * D) + row * D  # [R], within the unit
        source = pool + source_unit.to(tl.int64) * unit_stride + at
        target = pool + target_unit.to(tl.int64) * unit_stride + at
        # What is only copied is read before anything is written, so that all the reads of a tile are under way at once.
        copied = (inside & moves)[:, None] & (d < D)[None, :]
        values = tl.load(source[:, None] + (ROWS * D + d)[None, :], mask=copied)
        if BLOCK_REST > 0:
            r = 2 * HALF + tl.arange(0, BLOCK_REST)
            kept = (inside & moves)[:, None] & (r < D)[None, :]
            rest = tl.load(source[:, None] + r[None, :], mask=kept)
        turn_rows(source, target, inside, cos, sin, HALF, BLOCK_R, BLOCK_P, INTERLEAVED)
        if BLOCK_REST > 0:
            tl.store(target[:, None] + r[None, :], rest, mask=kept)
        tl.store(target[:, None] + (ROWS * D + d)[None, :], values, mask=copied)


@triton.jit(do_not_specialize=["heads"])
def _rotate_queries_kernel(
    q,
    rows,
    deltas,
    inv_freq,
    out,
    heads,
    q_row,
    q_head,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    i = tl.program_id(0)
    cos, sin = cos_sin(-tl.load(deltas + i), inv_freq, HALF, BLOCK_P)
    head = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = head < heads
    source = q + tl.load(rows + i).to(tl.int64) * q_row + head * q_head  # [R]
    target = out + i.to(tl.int64) * heads * D + head * D
    if BLOCK_REST > 0:
        r = 2 * HALF + tl.arange(0, BLOCK_REST)
        kept = inside[:, None] & (r < D)[None, :]
        tl.store(target[:, None] + r[None, :], tl.load(source[:, None] + r[None, :], mask=kept), mask=kept)
    turn_rows(source, target, inside, cos, sin, HALF, BLOCK_R, BLOCK_P, INTERLEAVED)


def _pair_blocks(head_dim: int, half: int) -> dict[str, int]:
    """Widths of a row's parts, padded to powers of two: pairs, and elements that do not turn (0: there are none)."""
    rest = head_dim - 2 * half
    assert half > 0 and rest >= 0, f"{2 * half} rotary elements in a head of {head_dim}"
    return {
        "D": head_dim,
        "HALF": half,
        "BLOCK_P": triton.next_power_of_2(half),
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
    }


def rotate_keys(
    pool: Tensor,
    units: Tensor,
    deltas: Tensor,
    inv_freq: Tensor,
    kinds: Tensor,
    first_layer: int,
    end_layer: int,
    interleaved: bool,
) -> None:
    """See ``reference.rotate_keys``."""
    assert all(x.is_contiguous() for x in (pool, units, deltas, inv_freq, kinds))
    rows, head_dim = pool.shape[3] * pool.shape[4], pool.shape[5]
    layers = end_layer - first_layer
    tuned = settings.launch("rotate_keys", "any", pool.device)
    block_d = triton.next_power_of_2(head_dim)
    block_r = max(min(tuned["BLOCK_BYTES"] // (block_d * pool.element_size()), triton.next_power_of_2(rows)), 1)
    blocks = triton.cdiv(rows, block_r * tuned["TILES"])
    _rotate_keys_kernel[(len(units) * layers * blocks,)](
        pool,
        units,
        deltas,
        inv_freq,
        kinds,
        first_layer,
        layers,
        blocks,
        pool.stride(0),
        ROWS=rows,
        TILES=tuned["TILES"],
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        INTERLEAVED=interleaved,
        num_warps=tuned["num_warps"],
        **_pair_blocks(head_dim, inv_freq.shape[1]),
    )


def rotate_queries(q: Tensor, rows: Tensor, deltas: Tensor, inv_freq: Tensor, interleaved: bool) -> Tensor:
    """See ``reference.rotate_queries``."""
    heads, head_dim = q.shape[1:]
    assert q.stride(2) == 1 and all(x.is_contiguous() for x in (rows, deltas, inv_freq))
    tuned = settings.launch("rotate_queries", "any", q.device)
    out = torch.empty((len(rows), heads, head_dim), dtype=q.dtype, device=q.device)
    block_r = min(tuned["BLOCK_HEADS"], triton.next_power_of_2(heads))
    _rotate_queries_kernel[len(rows), triton.cdiv(heads, block_r)](
        q,
        rows,
        deltas,
        inv_freq,
        out,
        heads,
        q.stride(0),
        q.stride(1),
        BLOCK_R=block_r,
        INTERLEAVED=interleaved,
        num_warps=tuned["num_warps"],
        **_pair_blocks(head_dim, len(inv_freq)),
    )
    return out
