"""The short way to a row's token (see sample.py): candidates are listed in memory, and the draw is made on the list."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl

from octavo.kernels.triton.sample_noise import hashes, log2_exponentials
from octavo.kernels.triton.sample_row import LOWEST_KEY, NO_TOKEN, comes_before, flip

FIXED_POINT = tl.constexpr(2.0**40)
CELLS, TOKENS, ARRIVED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the counters of a row


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
def _append(values, hit, counter, listed, CAPACITY: tl.constexpr):
    """List the values that hit, as far as they fit, in no fixed order; ``counter`` counts them all."""
    at = tl.atomic_add(counter + tl.zeros_like(values), 1, mask=hit, sem="relaxed", scope="cta")
    tl.store(listed + at, values, mask=hit & (at < CAPACITY))
    tl.debug_barrier()  # the list is read by other threads of this program


@triton.jit
def shortlist(
    row,
    peaks,
    cells,
    vocabulary,
    k,
    counters,
    listed,
    LOW_BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CELL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """List tokens that are sure to hold the k largest; gives the largest logit and how many are listed."""
    at = tl.arange(0, BLOCK_C)
    peak = tl.load(peaks + at, mask=at < cells, other=float("-inf"))
    bound = kth_listed(peak, k, LOW_BITS)
    _append(at, (peak >= bound) & (peak > float("-inf")), counters + CELLS, listed, CAPACITY)
    reached = tl.load(counters + CELLS, volatile=True)
    count = CAPACITY + 1
    if reached <= CAPACITY:
        for start in range(0, reached, BLOCK // CELL):
            i = start + tl.arange(0, BLOCK // CELL)
            cell = tl.load(listed + i, mask=i < reached, other=0, cache_modifier=".cg")
            tokens = cell[:, None] * CELL + tl.arange(0, CELL)[None, :]
            inside = (i < reached)[:, None] & (tokens < vocabulary)
            x = tl.load(row + tokens, mask=inside, other=float("-inf")).to(tl.float32)
            hit = (x >= bound) & (x > float("-inf"))
            _append(tokens, hit, counters + TOKENS, listed + CAPACITY, CAPACITY)
        count = tl.load(counters + TOKENS, volatile=True)
    return tl.max(peak), count


@triton.jit
def draw_listed(row, listed, count, scale, low, high, top, k, p, floor, LOW_BITS: tl.constexpr, CAPACITY: tl.constexpr):
    """The token drawn from the ``count`` listed ones, under top-k and the other filters."""
    at = tl.arange(0, CAPACITY)
    tokens = tl.load(listed + at, mask=at < count, other=0)
    x = tl.load(row + tokens, mask=at < count, other=float("-inf")).to(tl.float32)
    kth = kth_listed(x, k, LOW_BITS)
    weights = (tl.exp2((x - top) * scale) * FIXED_POINT).to(tl.int64)
    tie = (tl.exp2((kth - top) * scale) * FIXED_POINT).to(tl.int64)
    larger = x > kth
    ties = k - tl.sum(larger.to(tl.int32))
    goal = p * (tl.sum(tl.where(larger, weights, 0)) + ties * tie).to(tl.float32)

    scores = x * scale - log2_exponentials(hashes(tokens, low, high))
    scores = tl.where(x >= tl.maximum(kth, floor), scores, float("-inf"))
    winner = 0
    cut = count >= 0
    while cut:
        best = tl.max(scores)
        winner = tl.min(tl.where(scores == best, tokens, NO_TOKEN))
        before = comes_before(x, tokens, tl.load(row + winner).to(tl.float32), winner)
        preceding = tl.sum(before.to(tl.int32))
        mass = tl.sum(tl.where(before, weights, 0)).to(tl.float32)
        cut = (preceding > 0) & ((preceding >= k) | ((p < 1) & (mass >= goal)))
        scores = tl.where(before, scores, float("-inf"))
    return winner
