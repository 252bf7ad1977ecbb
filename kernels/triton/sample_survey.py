"""The survey, first kernel of the sampler (see sample.py): all logits are read once, by several programs a row."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl

from octavo.kernels.triton.sample_noise import row_key
from octavo.kernels.triton.sample_row import MAX_SCALE, NO_TOKEN, load_logits, raise_best, real
from octavo.kernels.triton.tiles import LOG2E


@triton.jit
def _noisiest(
    row,
    first,
    last,
    vocabulary,
    scale,
    low,
    high,
    bounds,
    grains,
    peaks,
    CELL: tl.constexpr,
    GRAIN: tl.constexpr,
    WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of blocks ``first`` to ``last``: best score and its token, and the largest logit. Leaves the blocks' ``bounds``.

    WEIGHED: leaves the mass of the grains and the peaks of the cells, too, but does not look for the largest logit.
    The loop asks for the next block before it works on the present one; Triton would not, around an inner loop.
    """
    best = float("-inf")
    winner = 0
    lanes = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    whole = tl.minimum(last, vocabulary // BLOCK)
    if first < whole:
        x = load_logits(row, first * BLOCK + lanes, vocabulary, False)
        for block in range(first, whole):
            ahead = load_logits(row, tl.minimum(block + 1, whole - 1) * BLOCK + lanes, vocabulary, False)
            best, winner, bound = raise_best(row, x, block * BLOCK + lanes, scale, low, high, best, winner)
            tl.store(bounds + block, bound)
            if WEIGHED:
                _store_grains(grains, block, x, scale, bound, GRAIN, BLOCK)
                _store_peaks(peaks, block, x, CELL, BLOCK)
            else:
                tops = tl.maximum(tops, x)
            x = ahead
    if whole < last:
        x = load_logits(row, whole * BLOCK + lanes, vocabulary, True)
        best, winner, bound = raise_best(row, x, whole * BLOCK + lanes, scale, low, high, best, winner)
        tl.store(bounds + whole, bound)
        if WEIGHED:
            _store_grains(grains, whole, x, scale, bound, GRAIN, BLOCK)
            _store_peaks(peaks, whole, x, CELL, BLOCK)
        else:
            tops = tl.maximum(tops, x)
    return best, winner, tl.max(tops)


@triton.jit
def _store_grains(grains, block, x, scale, bound, GRAIN: tl.constexpr, BLOCK: tl.constexpr):
    """To ``grains`` [blocks, BLOCK / GRAIN]: the mass of each, in units of 2^bound.

    The block's largest exponent is at most 5 above its bound and at most 34 below: neither overflows, and no second
    maximum is needed. One rounding (``fma``) leaves the exponent exact, however large the bound. A grain lies in one
    warp: its sum needs no barrier.
    """
    unit = tl.where(bound > float("-inf"), bound, 0.0)
    weights = tl.exp2(tl.fma(x, scale, -unit))
    grain = tl.arange(0, BLOCK // GRAIN)
    tl.store(grains + block * (BLOCK // GRAIN) + grain, tl.sum(tl.reshape(weights, [BLOCK // GRAIN, GRAIN]), 1))


@triton.jit
def _store_peaks(peaks, block, x, CELL: tl.constexpr, BLOCK: tl.constexpr):
    """To ``peaks`` [blocks, BLOCK / CELL]: the largest logit of each cell."""
    cell = tl.arange(0, BLOCK // CELL)
    tl.store(peaks + block * (BLOCK // CELL) + cell, real(tl.max(tl.reshape(x, [BLOCK // CELL, CELL]), 1)))


@triton.jit
def _largest(row, first, last, vocabulary, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Of blocks ``first`` to ``last``: the largest logit and the lowest token that has it."""
    best = float("-inf")
    winner = 0
    whole = tl.minimum(last, vocabulary // BLOCK)
    for block in tl.range(first, whole, num_stages=STAGES):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(row, tokens, vocabulary, False)
        top = tl.max(x)
        if top > best:
            best = top
            winner = tl.min(tl.where(x == top, tokens, NO_TOKEN))
    if whole < last:
        tokens = whole * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(row, tokens, vocabulary, True)
        top = tl.max(x)
        if top > best:
            best = top
            winner = tl.min(tl.where(x == top, tokens, NO_TOKEN))
    return best, winner


@triton.jit
def _cell_peaks(row, first, last, vocabulary, peaks, CELL: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Of blocks ``first`` to ``last``: the peaks of the cells."""
    whole = tl.minimum(last, vocabulary // BLOCK)
    for block in tl.range(first, whole, num_stages=STAGES):
        _store_peaks(
            peaks, block, load_logits(row, block * BLOCK + tl.arange(0, BLOCK), vocabulary, False), CELL, BLOCK
        )
    if whole < last:
        _store_peaks(peaks, whole, load_logits(row, whole * BLOCK + tl.arange(0, BLOCK), vocabulary, True), CELL, BLOCK)


@triton.jit(do_not_specialize=["share"])
def survey_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    seeds,
    draws,
    part_score,
    part_id,
    part_top,
    bounds,
    grains,
    peaks,
    arrivals,
    row_stride,
    vocabulary,
    share,
    CELL: tl.constexpr,
    GRAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    b = tl.program_id(1)
    heat = tl.load(temperature + b)
    k = tl.load(top_k + b)
    row = logits + b.to(tl.int64) * row_stride
    blocks = tl.cdiv(vocabulary, BLOCK)
    first = part * share
    last = tl.minimum(first + share, blocks)
    bounds += b * blocks
    grains += b.to(tl.int64) * blocks * (BLOCK // GRAIN)
    peaks += b.to(tl.int64) * blocks * (BLOCK // CELL)
    if part == 0:
        tl.store(arrivals + b, 0)
    if (heat > 0) & (k > 0) & (k < vocabulary):
        _cell_peaks(row, first, last, vocabulary, peaks, CELL, BLOCK, STAGES)
        return

    if heat > 0:
        low, high = row_key(seeds, draws, b)
        scale = tl.minimum(1 / heat * LOG2E, MAX_SCALE)
        if tl.load(top_p + b) < 1:
            best, winner, top = _noisiest(
                row, first, last, vocabulary, scale, low, high, bounds, grains, peaks, CELL, GRAIN, True, BLOCK
            )
        else:
            best, winner, top = _noisiest(
                row, first, last, vocabulary, scale, low, high, bounds, grains, peaks, CELL, GRAIN, False, BLOCK
            )
    else:
        top, winner = _largest(row, first, last, vocabulary, BLOCK, STAGES)
        best = top
    at = b * tl.num_programs(0) + part
    tl.store(part_score + at, best)
    tl.store(part_id + at, winner)
    tl.store(part_top + at, top)
