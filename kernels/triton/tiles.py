"""What the attention kernels share: finding a tile's rows through the block table, scores, sinks, strides.

A tile is BLOCK_N slots of one row of a table, whatever the unit: each tile row finds its own entry, one vector load for
the tile. A row past the end reads entry 0, whose valid count is 0, so that one comparison with the valid count masks
everything that holds no token.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import math

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import layout

ID_SHIFT = tl.constexpr(layout.ID_SHIFT)
VALID_MASK = tl.constexpr(layout.VALID_MASK)
LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))


@triton.jit
def load_entries(row, start, end, U: tl.constexpr, BLOCK_N: tl.constexpr):
    """Entries of the slots ``start + [0, BLOCK_N)``: int32 [N], or one scalar when they share it; 0 past ``end``."""
    if U >= BLOCK_N:
        return tl.load(row + start // U, mask=start < end, other=0)
    else:
        n = tl.arange(0, BLOCK_N)  # start is a multiple of U
        return tl.load(row + start // U + n // U, mask=start + n < end, other=0)


@triton.jit
def locate(entry, start, end, unit_stride, U: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a tile's rows lie, in elements from the run of unit 0 (int64 [N]), and which hold a token (bool [N])."""
    n = tl.arange(0, BLOCK_N)
    if U >= BLOCK_N:
        offset = (start + n) % U
    else:
        offset = n % U  # start is a multiple of U
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
    """Log-sum-exp, base 2, with the sink joined in, and the factor by which the outputs shrink.

    A sink of minus infinity is none; where there is no key either, both stay as they are: minus infinity and 0.
    """
    top = tl.maximum(lse, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    joined = top + tl.log2(tl.exp2(lse - top) + tl.exp2(sink - top))
    return joined, tl.where(lse == float("-inf"), 0.0, tl.exp2(lse - joined))


def score_arguments(scale: float, softcap: float) -> tuple[float, float]:
    """The ``scale`` and ``cap`` that ``scaled`` takes."""
    log2e = math.log2(math.e)
    return (2 * log2e * scale / softcap, log2e * softcap) if softcap else (log2e * scale, 0.0)


def axis_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of the axes [L, B, H, ...], 0 where an axis of size 1 broadcasts."""
    return tuple(0 if x.shape[i] == 1 else x.stride(i) for i in range(3))  # type: ignore[return-value]
