"""Sampling without a sort: a noisy arg-max over all tokens, and a walk up from it to the first token that is kept.

    logits                          [B, V]             contiguous rows
    part_score, part_id, part_top   [B, S]             a part's best noisy score, its token, and the largest logit
    summary                         [B, N C]           what the survey leaves of a row's N blocks, of C cells each:
        bounds                         [N]             without top-k: no noisy score of the block is above
        peaks                          [N, C]          with top-k: the largest logit of each cell
    masses                          [B, 2, M]          of the second kernel's M blocks: mass before the winner, all mass
    counters                        [B, 4]             listed cells, listed tokens, programs that are done
    listed                          [B, 2, CAPACITY]   with top-k: cells, and the tokens that are candidates

What is kept is a prefix of the tokens in order (largest logit first, equal ones by id). The arg-max over a set that
contains the prefix is therefore the arg-max over the prefix as soon as it falls inside. So:

1. *survey*, S programs a row: the arg-max of logit / temperature + noise over all tokens, filters or not. This is one
   read of the logits, and all that greedy rows and rows without a filter need.
2. *settle*: a row with top-p sums up, in several programs, how much mass comes before the winner (out of L2), and the
   last program to finish decides. Less than the limit: done. Else the kept prefix ends before the winner: take the
   arg-max over the tokens before it and ask again. That visits only the blocks whose bound is above the best so far,
   the highest first: two or three where the filter keeps most of the mass. A filter that keeps the share s of the mass
   is met at once in s of all draws, and after 1 + ln(1 / s) questions on average. Nothing is sorted and no threshold is
   searched, and the result is that of the exact thresholds, ties by id included.

That walk is long for a top-k of few among many, so these rows go another way. The survey leaves the peaks of cells of
CELL tokens in place of the arg-max. They have a k-th largest, found bit by bit in registers, and at least k tokens
reach it: rarely more than a few above k, all in the cells whose peaks do. Their ids are listed in memory, and the walk
is done on the list. More than CAPACITY candidates (k is as large, or very many logits are equal) send the row down the
first way, with the k-th largest logit found bit by bit in as many passes over the row.

The noise is -log2 of an exponential E = -log(1 - w), where the hash gives w (``reference/sampling.py``). Two logarithms
a token would cost more than all the rest, and few tokens can win: E >= w, and the bits of w read as an integer bound
its log2 from below, within 0.09. Only a block in which that bound passes the best score so far evaluates the noise, of
the token with the highest bound first, and mostly of no other.

Every grid comes from shapes and from the number of SMs. How a row was divided leaves no trace in its token: a maximum
is exact, the mass is summed block by block and then over the blocks, whoever did which, and on the list, whose order is
left to chance, in integers.

Rejection from a superset is how FlashInfer samples without a sort (its blog, "Sorting-Free GPU Kernels for LLM
Sampling", 2025), there with fresh random numbers in each round; with the noise of the Gumbel-max trick fixed for each
token, the rounds agree with each other and the draw is a function of the row alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference import sampling as truth
from octavo.kernels.triton import settings
from octavo.kernels.triton.plan import multiprocessors, overlaps_launches
from octavo.kernels.triton.tiles import LOG2E

MAX_SCALE = tl.constexpr(truth.MAX_SCALE)
GOLDEN64 = tl.constexpr(0x9E3779B97F4A7C15)
MIX64_A, MIX64_B = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
GOLDEN32 = tl.constexpr(0x9E3779B9)
MIX32_A, MIX32_B = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)
TO_UNIT, HALF_STEP = tl.constexpr(2.0**-32), tl.constexpr(2.0**-33)
BELOW_ONE, SMALL = tl.constexpr(1 - 2.0**-24), tl.constexpr(2.0**-6)
ONE_BITS = tl.constexpr(0x3F800000)  # 1.0
MANTISSA = tl.constexpr(2.0**-23)
BOUND_BIAS = tl.constexpr(127.01)  # the exponent's bias, and a little more than any rounding
FIXED_POINT = tl.constexpr(2.0**40)
FIRST_SHARE = tl.constexpr(8)  # of a row that is weighed again, this part first
LEAST_SHARE = tl.constexpr(1e-30)  # a top-p of 0 keeps the first token, too
NO_TOKEN = tl.constexpr(2**31 - 1)
LOWEST_KEY = tl.constexpr(-(2**31))
CELLS, TOKENS, ARRIVED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the counters of a row

LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Bits of an fp32 number that no logit of a dtype uses: the search of a k-th largest leaves them out."""


@triton.jit
def _row_key(seeds, draws, b):
    """Both words of the row's key, uint32; ``reference.row_keys``."""
    seed = tl.load(seeds + b).to(tl.uint64)
    draw = tl.load(draws + b).to(tl.uint64)
    key = _splitmix(_splitmix(seed + GOLDEN64) + (draw + 1) * GOLDEN64)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _splitmix(x):
    x = (x ^ (x >> 30)) * MIX64_A
    x = (x ^ (x >> 27)) * MIX64_B
    return x ^ (x >> 31)


@triton.jit
def _hashes(tokens, low, high):
    """The 32 bits of each token, uint32."""
    bits = tokens.to(tl.uint32) * GOLDEN32 + low
    bits = (bits ^ (bits >> 16)) * MIX32_A
    return (bits ^ (bits >> 15) ^ high) * MIX32_B


@triton.jit
def _log2_exponentials(bits):
    """log2 of E; ``reference.exponentials``."""
    w = tl.minimum(bits.to(tl.float32) * TO_UNIT + HALF_STEP, BELOW_ONE)
    series = w * (1 + w * (0.5 + w * (1 / 3 + w * 0.25)))
    return tl.log2(tl.where(w < SMALL, series, -tl.log(1 - w)))


@triton.jit
def _noise_bounds(bits):
    """No less than -log2 of E, without a logarithm: w, rounded down to 23 bits, and its own bits as log2."""
    w = ((bits >> 9) + ONE_BITS).to(tl.float32, bitcast=True) - 1.0
    return BOUND_BIAS - w.to(tl.int32, bitcast=True).to(tl.float32) * MANTISSA


@triton.jit
def _load(row, tokens, vocabulary, MASKED: tl.constexpr):
    """Logits in fp32; what is past the end is minus infinity. NaN stays: see ``_real``.

    Whole blocks do without the mask, which costs two instructions a token. The loops around it keep STAGES - 1 blocks
    on their way into shared memory (``num_stages``, asynchronous copies).
    """
    if MASKED:
        return tl.load(row + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32)
    else:
        return tl.load(row + tokens).to(tl.float32)


@triton.jit
def _real(x):
    """NaN becomes minus infinity. Maxima and comparisons pass over NaN anyhow; sums and sorted keys do not."""
    return tl.maximum(x, float("-inf"))


@triton.jit
def _before(x, tokens, x_than, token_than):
    """Which tokens come before another one in the order of all."""
    return (x > x_than) | ((x == x_than) & (tokens < token_than))


@triton.jit
def _raise_best(row, x, tokens, scale, low, high, best, winner):
    """The best score so far and its token, after one more block; and a bound of the block's scores.

    Of a block that can win, the noise is evaluated a token at a time, the highest bound first, until no bound is above
    the best score: mostly of one.
    """
    most = x * scale + _noise_bounds(_hashes(tokens, low, high))
    bound = tl.max(most)
    reach = bound
    while reach > best:
        token = tl.min(tl.where(most == reach, tokens, NO_TOKEN))
        score = tl.load(row + token).to(tl.float32) * scale - _log2_exponentials(_hashes(token, low, high))
        if score > best:
            best = score
            winner = token
        most = tl.where(tokens == token, float("-inf"), most)
        reach = tl.max(most)
    return best, winner, bound


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
        x = _load(row, first * BLOCK + lanes, vocabulary, False)
        for block in range(first, whole):
            ahead = _load(row, tl.minimum(block + 1, whole - 1) * BLOCK + lanes, vocabulary, False)
            tops = tl.maximum(tops, x)
            best, winner, bound = _raise_best(row, x, block * BLOCK + lanes, scale, low, high, best, winner)
            tl.store(bounds + block, bound)
            x = ahead
    if whole < last:
        x = _load(row, whole * BLOCK + lanes, vocabulary, True)
        tops = tl.maximum(tops, x)
        best, winner, bound = _raise_best(row, x, whole * BLOCK + lanes, scale, low, high, best, winner)
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
        x = _load(row, tokens, vocabulary, False)
        top = tl.max(x)
        if top > best:
            best = top
            winner = tl.min(tl.where(x == top, tokens, NO_TOKEN))
    if whole < last:
        tokens = whole * BLOCK + tl.arange(0, BLOCK)
        x = _load(row, tokens, vocabulary, True)
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
        x = _load(row, block * BLOCK + tl.arange(0, BLOCK), vocabulary, False)
        tl.store(peaks + block * (BLOCK // CELL) + cells, _real(tl.max(tl.reshape(x, [BLOCK // CELL, CELL]), 1)))
    if whole < last:
        x = _load(row, whole * BLOCK + tl.arange(0, BLOCK), vocabulary, True)
        tl.store(peaks + whole * (BLOCK // CELL) + cells, _real(tl.max(tl.reshape(x, [BLOCK // CELL, CELL]), 1)))


@triton.jit
def _next_noisiest(
    row, vocabulary, scale, low, high, bounds, least, x_than, token_than, SPAN: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Of the tokens before ``token_than``, whose logit is ``x_than``, and not below ``least``: that of the best score.

    Blocks of SPAN tokens are visited from the highest of their ``bounds`` [BLOCK_N] down to the best score. Gives the
    bounds back, closer where a block was visited: the next token wanted is before this one.
    """
    at = tl.arange(0, BLOCK_N)
    best = float("-inf")
    winner = 0
    open = bounds
    reach = tl.max(open)
    while reach > best:
        block = tl.min(tl.where(open == reach, at, NO_TOKEN))
        tokens = block * SPAN + tl.arange(0, SPAN)
        x = _load(row, tokens, vocabulary, True)
        x = tl.where((x >= least) & _before(x, tokens, x_than, token_than), x, float("-inf"))
        best, winner, bound = _raise_best(row, x, tokens, scale, low, high, best, winner)
        bounds = tl.where(at == block, bound, bounds)
        open = tl.where(at == block, float("-inf"), open)
        reach = tl.max(open)
    return winner, bounds


@triton.jit
def _flip(bits):
    """From the bits of an fp32 number to an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kth_listed(x, k, LOW_BITS: tl.constexpr):
    """k-th largest of a vector, at most as long as k asks for, bit by bit from the highest."""
    keys = _flip(x.to(tl.int32, bitcast=True))
    kth = tl.where(tl.sum((keys >= 0).to(tl.int32)) >= k, 0, LOWEST_KEY)
    for i in range(31 - LOW_BITS):
        trial = kth | (1 << (30 - i))
        kth = tl.where(tl.sum((keys >= trial).to(tl.int32)) >= k, trial, kth)
    return _flip(tl.min(tl.where(keys >= kth, keys, NO_TOKEN))).to(tl.float32, bitcast=True)


@triton.jit
def _reaching(row, blocks, vocabulary, key, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """How many tokens of the row have a key of at least ``key``, and the lowest such key."""
    count = tl.zeros([BLOCK], tl.int32)
    lowest = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        keys = _flip(_real(_load(row, tokens, vocabulary, True)).to(tl.int32, bitcast=True))
        reach = (keys >= key) & (tokens < vocabulary)
        count += reach.to(tl.int32)
        lowest = tl.minimum(lowest, tl.where(reach, keys, NO_TOKEN))
    return tl.sum(count), tl.min(lowest)


@triton.jit
def _kth_of_row(row, blocks, vocabulary, k, LOW_BITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """k-th largest logit of the row; a pass over the row for each bit."""
    reach, _ = _reaching(row, blocks, vocabulary, 0, BLOCK, STAGES)
    kth = tl.where(reach >= k, 0, LOWEST_KEY)
    for i in range(31 - LOW_BITS):
        trial = kth | (1 << (30 - i))
        reach, _ = _reaching(row, blocks, vocabulary, trial, BLOCK, STAGES)
        kth = tl.where(reach >= k, trial, kth)
    _, kth = _reaching(row, blocks, vocabulary, kth, BLOCK, STAGES)
    return _flip(kth).to(tl.float32, bitcast=True)


@triton.jit
def _preceding(row, blocks, vocabulary, x_than, token_than, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """How many tokens come before ``token_than``, whose logit is ``x_than``."""
    count = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        count += _before(_load(row, tokens, vocabulary, True), tokens, x_than, token_than).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _weigh_block(x, scale, top, over, masses, block, blocks):
    """To ``masses`` [2, blocks]: the block's mass above ``over``, and all its mass. One sum of pairs, one reduction."""
    weights = tl.exp2((_real(x) - top) * scale)
    pair = tl.sum(tl.join(tl.where(x > over, weights, 0.0), weights), 0)
    tl.store(masses + tl.arange(0, 2) * blocks + block, pair)


@triton.jit
def _weigh(
    row,
    first,
    last,
    blocks,
    vocabulary,
    scale,
    top,
    x_than,
    token_than,
    masses,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """To ``masses`` [2, blocks], of blocks ``first`` to ``last``: mass before ``token_than``, and all mass.

    A block that lies before the token's own takes its logit's equals in: they are above the next lower number. In the
    block of the token itself they are left out here; see ``_mass_before``.
    """
    key = tl.where(x_than == 0, -1, _flip(x_than.to(tl.int32, bitcast=True)))  # -1: of minus zero
    lower = _flip(key - 1).to(tl.float32, bitcast=True)
    own = token_than // BLOCK
    whole = tl.minimum(last, vocabulary // BLOCK)
    for block in tl.range(first, whole, num_stages=STAGES):
        x = _load(row, block * BLOCK + tl.arange(0, BLOCK), vocabulary, False)
        _weigh_block(x, scale, top, tl.where(block < own, lower, x_than), masses, block, blocks)
    if whole < last:
        x = _load(row, whole * BLOCK + tl.arange(0, BLOCK), vocabulary, True)
        _weigh_block(x, scale, top, tl.where(whole < own, lower, x_than), masses, whole, blocks)


@triton.jit
def _mass_before(
    row, blocks, vocabulary, scale, top, x_than, token_than, masses, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Mass before ``token_than``, and of the whole row, from what ``_weigh`` left."""
    at = tl.arange(0, BLOCK_N)
    # Written by other programs, or by other threads of this one: read past the L1.
    mass = tl.sum(tl.load(masses + at, mask=at < blocks, other=0.0, cache_modifier=".cg"))
    total = tl.sum(tl.load(masses + blocks + at, mask=at < blocks, other=0.0, cache_modifier=".cg"))
    tokens = token_than // BLOCK * BLOCK + tl.arange(0, BLOCK)
    x = _load(row, tokens, vocabulary, True)
    ties = tl.sum(((x == x_than) & (tokens < token_than)).to(tl.int32))
    return tl.where(ties > 0, mass + ties * tl.exp2((x_than - top) * scale), mass), total


@triton.jit
def _too_late(
    row,
    blocks,
    vocabulary,
    scale,
    top,
    x_than,
    token_than,
    goal,
    limited,
    masses,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Whether a mass of ``goal`` or more comes before ``token_than``.

    What comes before it comes before the winner of the last round, too. So the masses of that round are upper bounds of
    those of this one, and their sum, with ever more blocks weighed anew, may fall below the goal early: of a filter
    that keeps 0.9 of the mass, mostly after the first eighth or third of the blocks. A row with top-k begins the walk
    without a winner, and weighs all blocks.
    """
    done = 0
    step = tl.where(limited, blocks, tl.cdiv(blocks, FIRST_SHARE))
    late = done < blocks
    while late & (done < blocks):
        tl.debug_barrier()  # the masses so far have been read
        last = tl.minimum(done + step, blocks)
        _weigh(row, done, last, blocks, vocabulary, scale, top, x_than, token_than, masses, BLOCK, STAGES)
        tl.debug_barrier()
        mass, _ = _mass_before(row, blocks, vocabulary, scale, top, x_than, token_than, masses, BLOCK, BLOCK_N)
        late = mass >= goal
        done = last
        step *= 2
    return late


@triton.jit
def _append(values, hit, counter, listed, CAPACITY: tl.constexpr):
    """List the values that hit, as far as they fit, in no fixed order; ``counter`` counts them all."""
    at = tl.atomic_add(counter + tl.zeros_like(values), 1, mask=hit, sem="relaxed", scope="cta")
    tl.store(listed + at, values, mask=hit & (at < CAPACITY))
    tl.debug_barrier()  # the list is read by other threads of this program


@triton.jit
def _shortlist(
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
    bound = _kth_listed(peak, k, LOW_BITS)
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
def _draw_listed(
    row, listed, count, scale, low, high, top, k, p, floor, LOW_BITS: tl.constexpr, CAPACITY: tl.constexpr
):
    """The token drawn from the ``count`` listed ones, under top-k and the other filters."""
    at = tl.arange(0, CAPACITY)
    tokens = tl.load(listed + at, mask=at < count, other=0)
    x = tl.load(row + tokens, mask=at < count, other=float("-inf")).to(tl.float32)
    kth = _kth_listed(x, k, LOW_BITS)
    weights = (tl.exp2((x - top) * scale) * FIXED_POINT).to(tl.int64)
    tie = (tl.exp2((kth - top) * scale) * FIXED_POINT).to(tl.int64)
    larger = x > kth
    ties = k - tl.sum(larger.to(tl.int32))
    goal = p * (tl.sum(tl.where(larger, weights, 0)) + ties * tie).to(tl.float32)

    scores = x * scale - _log2_exponentials(_hashes(tokens, low, high))
    scores = tl.where(x >= tl.maximum(kth, floor), scores, float("-inf"))
    winner = 0
    cut = count >= 0
    while cut:
        best = tl.max(scores)
        winner = tl.min(tl.where(scores == best, tokens, NO_TOKEN))
        before = _before(x, tokens, tl.load(row + winner).to(tl.float32), winner)
        preceding = tl.sum(before.to(tl.int32))
        mass = tl.sum(tl.where(before, weights, 0)).to(tl.float32)
        cut = (preceding > 0) & ((preceding >= k) | ((p < 1) & (mass >= goal)))
        scores = tl.where(before, scores, float("-inf"))
    return winner


@triton.jit(do_not_specialize=["share"])
def _survey_kernel(
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
        low, high = _row_key(seeds, draws, b)
        scale = tl.minimum(1 / heat * LOG2E, MAX_SCALE)
        best, winner, top = _noisiest(row, first, last, vocabulary, scale, low, high, summary, BLOCK)
    else:
        top, winner = _largest(row, first, last, vocabulary, BLOCK, STAGES)
        best = top
    at = b * tl.num_programs(0) + part
    tl.store(part_score + at, best)
    tl.store(part_id + at, winner)
    tl.store(part_top + at, top)


@triton.jit(do_not_specialize=["parts", "share"])
def _settle_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    draws,
    part_score,
    part_id,
    part_top,
    summary,
    masses,
    counters,
    listed,
    out,
    row_stride,
    vocabulary,
    parts,
    share,
    LOW_BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CELL: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """SPAN is the survey's BLOCK. Powers of two hold its blocks, and so its parts (BLOCK_N), the blocks of this kernel
    (BLOCK_M) and the cells of a row (BLOCK_C): they follow from the vocabulary, so that every batch runs this code."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    worker = tl.program_id(0)
    b = tl.program_id(1)
    heat = tl.load(temperature + b)
    k = tl.load(top_k + b)
    p = tl.load(top_p + b)
    share_of_top = tl.load(min_p + b)
    limited = (heat > 0) & (k > 0) & (k < vocabulary)
    weighed = (heat > 0) & (limited == 0) & (p < 1)
    if (worker > 0) & (weighed == 0):
        return

    part = tl.arange(0, BLOCK_N)
    at = b * parts + part
    surveyed = (part < parts) & (limited == 0)
    scores = tl.load(part_score + at, mask=surveyed, other=float("-inf"))
    ids = tl.load(part_id + at, mask=surveyed, other=0)
    top = tl.max(tl.load(part_top + at, mask=surveyed, other=float("-inf")))
    winner = tl.min(tl.where(scores == tl.max(scores), ids, NO_TOKEN))
    if (heat <= 0) | ((limited == 0) & (p >= 1) & (share_of_top <= 0)):
        tl.store(out + b, winner.to(tl.int64))
        return

    row = logits + b.to(tl.int64) * row_stride
    blocks = tl.cdiv(vocabulary, BLOCK)
    spans = tl.cdiv(vocabulary, SPAN)
    summary += b.to(tl.int64) * spans * (SPAN // CELL)
    masses += b * 2 * blocks
    counters += b * 4
    listed += b * 2 * CAPACITY
    scale = tl.minimum(1 / heat * LOG2E, MAX_SCALE)
    x = _real(tl.load(row + winner).to(tl.float32))
    arrived = 0
    if weighed:
        first = worker * share
        last = tl.minimum(first + share, blocks)
        _weigh(row, first, last, blocks, vocabulary, scale, top, x, winner, masses, BLOCK, STAGES)
        tl.debug_barrier()  # what all threads have stored is there when the atomic is
        arrived = tl.atomic_add(counters + ARRIVED, 1, sem="acq_rel") + 1
    if weighed & (arrived < tl.num_programs(0)):
        return
    mass = 0.0
    total = 0.0
    if weighed:
        mass, total = _mass_before(row, blocks, vocabulary, scale, top, x, winner, masses, BLOCK, BLOCK_M)

    low, high = _row_key(seeds, draws, b)
    count = CAPACITY + 1
    if limited:
        cells = spans * (SPAN // CELL)
        top, count = _shortlist(
            row, summary, cells, vocabulary, k, counters, listed, LOW_BITS, CAPACITY, CELL, SPAN, BLOCK_C
        )
    floor = top + tl.log2(share_of_top) / scale
    if count <= CAPACITY:
        winner = _draw_listed(row, listed + CAPACITY, count, scale, low, high, top, k, p, floor, LOW_BITS, CAPACITY)
    else:
        least = floor
        span = tl.arange(0, BLOCK_N)
        bounds = tl.load(summary + span, mask=span < spans, other=float("-inf"))
        goal = tl.maximum(p, LEAST_SHARE) * total
        if limited:  # the survey has neither winner nor bounds
            x = float("-inf")
            winner = NO_TOKEN
            bounds = tl.where(span < spans, float("inf"), float("-inf"))
            kth = _kth_of_row(row, blocks, vocabulary, k, LOW_BITS, BLOCK, STAGES)
            least = tl.maximum(kth, floor)
            ties = k - _preceding(row, blocks, vocabulary, kth, 0, BLOCK, STAGES)  # equal to kth, and kept
            if p < 1:
                _weigh(row, 0, blocks, blocks, vocabulary, scale, top, kth, 0, masses, BLOCK, STAGES)
                tl.debug_barrier()
                above, _ = _mass_before(row, blocks, vocabulary, scale, top, kth, 0, masses, BLOCK, BLOCK_M)
                goal = tl.maximum(p, LEAST_SHARE) * (above + ties * tl.exp2((kth - top) * scale))
        cut = limited | (x < least) | ((p < 1) & (mass >= goal))
        while cut:
            winner, bounds = _next_noisiest(row, vocabulary, scale, low, high, bounds, least, x, winner, SPAN, BLOCK_N)
            x = _real(tl.load(row + winner).to(tl.float32))
            cut = limited & (_preceding(row, blocks, vocabulary, x, winner, BLOCK, STAGES) >= k)
            if (p < 1) & (cut == 0):
                cut = _too_late(
                    row, blocks, vocabulary, scale, top, x, winner, goal, limited, masses, BLOCK, STAGES, BLOCK_M
                )
    tl.store(out + b, winner.to(tl.int64))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    draws: Tensor,
) -> Tensor:
    """See ``reference.sample``."""
    batch, vocabulary = logits.shape
    out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if not batch:
        return out
    assert logits.stride(1) == 1
    key = str(logits.element_size())
    survey = settings.launch("sample_survey", key, logits.device)
    settle = settings.launch("sample_settle", key, logits.device)
    spans, parts, survey_share = _divided(vocabulary, batch, survey, logits.device)
    blocks, workers, settle_share = _divided(vocabulary, batch, settle, logits.device)
    cells = spans * (survey["BLOCK"] // survey["CELL"])
    overlap = overlaps_launches(logits.device)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits.device)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    part_score, part_top = floats(2, batch, parts)
    summary, masses = floats(batch, cells), floats(batch, 2, blocks)
    part_id, counters, listed = ints(batch, parts), ints(batch, 4), ints(batch, 2, settle["CAPACITY"])
    _survey_kernel[parts, batch](
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
        logits.stride(0),
        vocabulary,
        survey_share,
        CELL=survey["CELL"],
        BLOCK=survey["BLOCK"],
        STAGES=survey["STAGES"],
        num_warps=survey["num_warps"],
        maxnreg=survey["maxnreg"],
        OVERLAP=overlap,
    )
    _settle_kernel[workers, batch](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        draws,
        part_score,
        part_id,
        part_top,
        summary,
        masses,
        counters,
        listed,
        out,
        logits.stride(0),
        vocabulary,
        parts,
        settle_share,
        LOW_BITS=LOW_BITS[logits.dtype],
        CAPACITY=settle["CAPACITY"],
        CELL=survey["CELL"],
        SPAN=survey["BLOCK"],
        BLOCK=settle["BLOCK"],
        STAGES=settle["STAGES"],
        BLOCK_N=triton.next_power_of_2(spans),
        BLOCK_M=triton.next_power_of_2(blocks),
        BLOCK_C=triton.next_power_of_2(cells),
        num_warps=settle["num_warps"],
        maxnreg=settle["maxnreg"],
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
    return out


def _divided(vocabulary: int, batch: int, launch: Mapping[str, int], device: torch.device) -> tuple[int, int, int]:
    """Blocks of a row, programs that share them, and blocks of each."""
    blocks = triton.cdiv(vocabulary, launch["BLOCK"])
    wanted = max(multiprocessors(device) * launch["programs_per_sm"] // batch, 1)  # no second, short round
    share = triton.cdiv(blocks, min(wanted, blocks))
    return blocks, triton.cdiv(blocks, share), share
