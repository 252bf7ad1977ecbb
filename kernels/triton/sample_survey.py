"""The survey, first kernel of the sampler (see sample.py): all logits are read once, by several programs a row."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl

from octavo.kernels.triton.sample_noise import row_key
from octavo.kernels.triton.sample_row import MAX_SCALE, NO_TOKEN, load_logits, raise_best, real
from octavo.kernels.triton.tiles import LOG2E


@triton.jit
def _noisiest(row, first, last, vocabulary, scale, low, high, bounds, BLOCK: tl.constexpr):
    """Of blocks ``first`` to ``last``: best score and its token, and the largest logit. Leaves the blocks' ``bounds``.

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
            tops = tl.maximum(tops, x)
            best, winner, bound = raise_best(row, x, block * BLOCK + lanes, scale, low, high, best, winner)
            tl.store(bounds + block, bound)
            x = ahead
    if whole < last:
        x = load_logits(row, whole * BLOCK + lanes, vocabulary, True)
        tops = tl.maximum(tops, x)
        best, winner, bound = raise_best(row, x, whole * BLOCK + lanes, scale, low, high, best, winner)
        tl.store(bounds + whole, bound)
    return best, winner, tl.max(tops)


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
    """Of blocks ``first`` to ``last``: the largest logit of each cell, to ``peaks`` [blocks, BLOCK / CELL]."""
    cells = tl.arange(0, BLOCK // CELL)
    whole = tl.minimum(last, vocabulary // BLOCK)
    for block in tl.range(first, whole, num_stages=STAGES):
        x = load_logits(row, block * BLOCK + tl.arange(0, BLOCK), vocabulary, False)
        tl.store(peaks + block * (BLOCK // CELL) + cells, real(tl.max(tl.reshape(x, [BLOCK // CELL, CELL]), 1)))
    if whole < last:
        x = load_logits(row, whole * BLOCK + tl.arange(0, BLOCK), vocabulary, True)
        tl.store(peaks + whole * (BLOCK // CELL) + cells, real(tl.max(tl.reshape(x, [BLOCK // CELL, CELL]), 1)))


@triton.jit(do_not_specialize=["share"])
def survey_kernel(
    logits,
    temperature,
    top_k,
    seeds,
    draws,
    part_score,
    part_id,
    part_top,
    summary,
    counters,
    row_stride,
    vocabulary,
    share,
    CELL: tl.constexpr,
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
    summary += b.to(tl.int64) * blocks * (BLOCK // CELL)
    if part == 0:
        tl.store(counters + b * 4 + tl.arange(0, 4), 0)
    if (heat > 0) & (k > 0) & (k < vocabulary):
        _cell_peaks(row, first, last, vocabulary, summary, CELL, BLOCK, STAGES)
        return

    if heat > 0:
        low, high = row_key(seeds, draws, b)
        scale = tl.minimum(1 / heat * LOG2E, MAX_SCALE)
        best, winner, top = _noisiest(row, first, last, vocabulary, scale, low, high, summary, BLOCK)
    else:
        top, winner = _largest(row, first, last, vocabulary, BLOCK, STAGES)
        best = top
    at = b * tl.num_programs(0) + part
    tl.store(part_score + at, best)
    tl.store(part_id + at, winner)
    tl.store(part_top + at, top)
