"""The short way to a row's token (see sample.py): candidates are listed in memory, and the draw is made on the list."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl

from octavo.kernels.triton.sample_noise import hashes, log2_exponentials
from octavo.kernels.triton.sample_row import LOWEST_KEY, NO_TOKEN, comes_before, flip

FEW = tl.constexpr(8)  # most lists fill less than this part of their room
NOT_DRAWN = tl.constexpr(-1)


@triton.jit
def kth_listed(x, k, LOW_BITS: tl.constexpr):
    """k-th largest of a vector, at most as long as k asks for, bit by bit from the highest."""
    keys = flip(x.to(tl.int32, bitcast=True))
    kth = tl.where(tl.sum((keys >= 0).to(tl.int32)) >= k, 0, LOWEST_KEY)
    for i in range(31 - LOW_BITS):
        trial = kth | (1 << (30 - i))
        kth = tl.where(tl.sum((keys >= trial).to(tl.int32)) >= k, trial, kth)
    return flip(tl.min(tl.where(keys >= kth, keys, NO_TOKEN))).to(tl.float32, bitcast=True)


@triton.jit
def _append(values, hit, count, listed, CAPACITY: tl.constexpr):
    """List the values that hit behind the first ``count``, in their order, as far as they fit; gives the new count."""
    at = count + tl.cumsum(hit.to(tl.int32), 0)
    tl.store(listed + at - 1, values, mask=hit & (at <= CAPACITY))
    return tl.max(at)


@triton.jit
def _list_candidates(
    row,
    peak,
    bound,
    vocabulary,
    listed,
    CAPACITY: tl.constexpr,
    CELL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """List the tokens whose logits reach ``bound``, in the order of their ids, and say how many there are.

    They are looked for in the cells whose ``peak`` [BLOCK_C] reaches it, which are listed first. ``listed`` is
    [2, CAPACITY]: cells, tokens. More than CAPACITY: a list is not complete.
    """
    reached = _append(tl.arange(0, BLOCK_C), (peak >= bound) & (peak > float("-inf")), 0, listed, CAPACITY)
    count = reached
    if reached <= CAPACITY:
        tl.debug_barrier()  # listed by other threads of this program; read past the L1
        count = 0
        for start in range(0, reached, BLOCK // CELL):
            i = start + tl.arange(0, BLOCK // CELL)
            cell = tl.load(listed + i, mask=i < reached, other=0, cache_modifier=".cg")
            tokens = cell[:, None] * CELL + tl.arange(0, CELL)[None, :]
            inside = (i < reached)[:, None] & (tokens < vocabulary)
            x = tl.load(row + tokens, mask=inside, other=float("-inf")).to(tl.float32)
            hit = (x >= bound) & (x > float("-inf"))
            count = _append(tl.reshape(tokens, [BLOCK]), tl.reshape(hit, [BLOCK]), count, listed + CAPACITY, CAPACITY)
        tl.debug_barrier()
    return count


@triton.jit
def _draw_listed(
    row,
    listed,
    count,
    scale,
    low,
    high,
    top,
    k,
    p,
    floor,
    goal,
    limited,
    partial,
    LOW_BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The token drawn from the ``count`` listed ones; NOT_DRAWN if a ``partial`` list does not reach the goal."""
    at = tl.arange(0, CAPACITY)
    tokens = tl.load(listed + at, mask=at < count, other=0, cache_modifier=".cg")
    x = tl.load(row + tokens, mask=at < count, other=float("-inf")).to(tl.float32)
    weights = tl.exp2((x - top) * scale)
    weights = tl.where(at < count, weights, 0.0)  # also where the top is minus infinity, and their difference NaN
    least = floor
    if limited:
        kth = kth_listed(x, k, LOW_BITS)
        least = tl.maximum(kth, floor)
        larger = x > kth
        ties = k - tl.sum(larger.to(tl.int32))
        goal = p * (tl.sum(tl.where(larger, weights, 0.0)) + ties * tl.exp2((kth - top) * scale))
    cut = (partial == 0) | (tl.sum(weights) >= goal)

    scores = x * scale - log2_exponentials(hashes(tokens, low, high))
    scores = tl.where(x >= least, scores, float("-inf"))
    winner = tl.full([], NOT_DRAWN, tl.int32)
    while cut:
        best = tl.max(scores)
        winner = tl.min(tl.where(scores == best, tokens, NO_TOKEN))
        before = comes_before(x, tokens, tl.load(row + winner).to(tl.float32), winner)
        preceding = tl.sum(before.to(tl.int32))
        mass = tl.sum(tl.where(before, weights, 0.0))
        cut = (preceding > 0) & ((limited & (preceding >= k)) | ((p < 1) & (mass >= goal)))
        scores = tl.where(before, scores, float("-inf"))
    return winner


@triton.jit
def draw_short(
    row,
    peak,
    bound,
    partial,
    vocabulary,
    scale,
    low,
    high,
    top,
    k,
    p,
    floor,
    goal,
    limited,
    listed,
    LOW_BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CELL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The token that is drawn, if a list of those that reach ``bound`` tells; else NOT_DRAWN.

    With top-k (``limited``) the bound leaves the k largest in. Without, what is kept ends where the mass reaches
    ``goal``: the list holds the row's winner and all before it, or is ``partial`` and has to reach the goal itself.
    """
    count = _list_candidates(row, peak, bound, vocabulary, listed, CAPACITY, CELL, BLOCK, BLOCK_C)
    listed += CAPACITY
    drawn = tl.full([], NOT_DRAWN, tl.int32)
    if count <= CAPACITY // FEW:
        drawn = _draw_listed(
            row, listed, count, scale, low, high, top, k, p, floor, goal, limited, partial, LOW_BITS, CAPACITY // FEW
        )
    elif count <= CAPACITY:
        drawn = _draw_listed(
            row, listed, count, scale, low, high, top, k, p, floor, goal, limited, partial, LOW_BITS, CAPACITY
        )
    return drawn
