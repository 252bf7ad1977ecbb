"""Sampling without a sort: a noisy arg-max over all tokens, and a walk up from it to the first token that is kept.

    logits                        [B, V]       contiguous rows
    part_score, part_id, part_top [B, S]       best noisy score, its token and the largest logit of each part of a row
    found, listed                 int32 [B], [B, CAPACITY]   rows with top-k: how many candidates, and their ids

What is kept is a prefix of the tokens in order (largest logit first, equal ones by id). The arg-max over a set that
contains the prefix is therefore the arg-max over the prefix as soon as it falls inside. So:

1. *survey*, S programs a row: the arg-max of logit / temperature + noise over all tokens, filters or not. This is one
   read of the logits, and all that greedy rows and rows without a filter need.
2. *settle*, one program a row: sum up how many tokens, and how much mass, come before the winner (one pass, out of L2).
   Less than the limits: done. Else the kept prefix ends before the winner: take the arg-max over the tokens before it
   and ask again. A filter that keeps the share s of the mass is met at once in s of all draws, and after
   1 + ln(1 / s) questions on average. Nothing is sorted and no threshold is searched, and the result is that of the
   exact thresholds, ties by id included.

That walk is long for a top-k of few among many, so these rows go another way, and leave the survey out. The maxima of
BLOCK interleaved stripes (*lanes*) of the row have a k-th largest, found bit by bit in registers, and at least k tokens
reach it: rarely more than a few above k. Their ids are listed in memory, and the walk is done on the list. More than
CAPACITY candidates (k is as large, or very many logits are equal) send the row down the first way, with the k-th
largest logit found bit by bit in as many passes over the row.

The noise is -log2 of an exponential E = -log(1 - w), where the hash gives w (``reference/sampling.py``). Two logarithms
a token would cost more than all the rest, and few tokens can win: E >= w, and the bits of w read as an integer bound
its log2 from below, within 0.09. Only a block in which that bound passes the best score so far evaluates the noise.

Every grid comes from shapes and from the number of SMs. How a row was divided leaves no trace in its token: a maximum
is exact, the mass is summed by one program in the order of the row, and on the list, whose order is left to chance, in
integers.

Rejection from a superset is how FlashInfer samples without a sort (its blog, "Sorting-Free GPU Kernels for LLM
Sampling", 2025), there with fresh random numbers in each round; with the noise of the Gumbel-max trick fixed for each
token, the rounds agree with each other and the draw is a function of the row alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference import sampling as truth
from octavo.kernels.triton import settings
from octavo.kernels.triton.plan import multiprocessors
from octavo.kernels.triton.tiles import LOG2E

MAX_SCALE = tl.constexpr(truth.MAX_SCALE)
GOLDEN64 = tl.constexpr(0x9E3779B97F4A7C15)
MIX64_A, MIX64_B = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
GOLDEN32 = tl.constexpr(0x9E3779B9)
MIX32_A, MIX32_B = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)
TO_UNIT, HALF_STEP = tl.constexpr(2.0**-32), tl.constexpr(2.0**-33)
BELOW_ONE, SMALL = tl.constexpr(1 - 2.0**-24), tl.constexpr(2.0**-6)
MANTISSA = tl.constexpr(2.0**-23)
BOUND_BIAS = tl.constexpr(127.01)  # the exponent's bias, and a little more than any rounding
FIXED_POINT = tl.constexpr(2.0**40)
NO_TOKEN = tl.constexpr(2**31 - 1)
LOWEST_KEY = tl.constexpr(-(2**31))

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
def _uniforms(tokens, low, high):
    """w of each token, fp32 in (0, 1]."""
    bits = tokens.to(tl.uint32) * GOLDEN32 + low
    bits = (bits ^ (bits >> 16)) * MIX32_A
    bits = (bits ^ (bits >> 15) ^ high) * MIX32_B
    bits = bits ^ (bits >> 16)
    return bits.to(tl.float32) * TO_UNIT + HALF_STEP


@triton.jit
def _log2_exponentials(w):
    """log2 of E; ``reference.exponentials``."""
    w = tl.minimum(w, BELOW_ONE)
    series = w * (1 + w * (0.5 + w * (1 / 3 + w * 0.25)))
    return tl.log2(tl.where(w < SMALL, series, -tl.log(1 - w)))


@triton.jit
def _load(row, tokens, vocabulary):
    """Logits in fp32; NaN, and what is past the end, is minus infinity.

    The loops around it keep STAGES - 1 blocks on their way into shared memory (``num_stages``, asynchronous copies).
    """
    x = tl.load(row + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.maximum(x, float("-inf"))


@triton.jit
def _before(x, tokens, x_than, token_than):
    """Which tokens come before another one in the order of all."""
    return (x > x_than) | ((x == x_than) & (tokens < token_than))


@triton.jit
def _noisiest(
    row,
    first,
    last,
    vocabulary,
    scale,
    low,
    high,
    least,
    x_than,
    token_than,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of blocks ``first`` to ``last``: best score and its token, and the largest logit.

    BOUNDED leaves out what is below ``least`` or does not come before the token ``token_than``, whose logit is
    ``x_than``; the largest logit is not taken then.
    """
    best = float("-inf")
    winner = 0
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        x = _load(row, tokens, vocabulary)
        if BOUNDED:
            x = tl.where((x >= least) & _before(x, tokens, x_than, token_than), x, float("-inf"))
        else:
            tops = tl.maximum(tops, x)
        w = _uniforms(tokens, low, high)
        most = x * scale + (BOUND_BIAS - w.to(tl.int32, bitcast=True).to(tl.float32) * MANTISSA)
        if tl.max(most) > best:
            scores = tl.where(most > best, x * scale - _log2_exponentials(w), float("-inf"))
            top = tl.max(scores)
            if top > best:
                best = top
                winner = tl.min(tl.where(scores == top, tokens, NO_TOKEN))
    return best, winner, tl.max(tops)


@triton.jit
def _largest(row, first, last, vocabulary, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Of blocks ``first`` to ``last``: the largest logit and the lowest token that has it."""
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(first, last, num_stages=STAGES):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        x = _load(row, tokens, vocabulary)
        at = tl.where(x > tops, tokens, at)
        tops = tl.maximum(tops, x)
    top = tl.max(tops)
    return top, tl.min(tl.where(tops == top, at, NO_TOKEN))


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
        keys = _flip(_load(row, tokens, vocabulary).to(tl.int32, bitcast=True))
        reach = (keys >= key) & (tokens < vocabulary)
        count += reach.to(tl.int32)
        lowest = tl.minimum(lowest, tl.where(reach, keys, NO_TOKEN))
    return tl.sum(count), tl.min(lowest)


@triton.jit
def _kth_of_row(row, blocks, vocabulary, k, LOW_BITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """k-th largest logit of the row, and how many are larger; a pass over the row for each bit."""
    reach, _ = _reaching(row, blocks, vocabulary, 0, BLOCK, STAGES)
    kth = tl.where(reach >= k, 0, LOWEST_KEY)
    for i in range(31 - LOW_BITS):
        trial = kth | (1 << (30 - i))
        reach, _ = _reaching(row, blocks, vocabulary, trial, BLOCK, STAGES)
        kth = tl.where(reach >= k, trial, kth)
    _, kth = _reaching(row, blocks, vocabulary, kth, BLOCK, STAGES)
    x = _flip(kth).to(tl.float32, bitcast=True)
    above, _, _ = _preceding(row, blocks, vocabulary, 1.0, x, x, x, 0, BLOCK, STAGES)
    return x, above


@triton.jit
def _preceding(row, blocks, vocabulary, scale, top, kth, x_than, token_than, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """How many tokens come before ``token_than``, their mass, and the mass of all that are larger than ``kth``."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        x = _load(row, tokens, vocabulary)
        weights = tl.exp2((x - top) * scale)
        before = _before(x, tokens, x_than, token_than)
        count += before.to(tl.int32)
        mass += tl.where(before, weights, 0.0)
        total += tl.where(x > kth, weights, 0.0)
    return tl.sum(count), tl.sum(mass), tl.sum(total)


@triton.jit
def _shortlist(
    row,
    blocks,
    vocabulary,
    k,
    found,
    listed,
    LOW_BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """List tokens that are sure to hold the k largest; gives the largest logit and how many are listed."""
    lanes = tl.full([BLOCK], float("-inf"), tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        lanes = tl.maximum(lanes, _load(row, block * BLOCK + tl.arange(0, BLOCK), vocabulary))
    count = CAPACITY + 1
    if k <= CAPACITY:
        bound = _kth_listed(lanes, k, LOW_BITS)
        for block in tl.range(0, blocks, num_stages=STAGES):
            tokens = block * BLOCK + tl.arange(0, BLOCK)
            x = _load(row, tokens, vocabulary)
            hit = (x >= bound) & (x > float("-inf"))
            at = tl.atomic_add(found + tl.zeros_like(tokens), 1, mask=hit, sem="relaxed", scope="cta")
            tl.store(listed + at, tokens, mask=hit & (at < CAPACITY))
        tl.debug_barrier()  # the list was written by other threads of this program
        count = tl.load(found, volatile=True)
    return tl.max(lanes), count


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

    scores = x * scale - _log2_exponentials(_uniforms(tokens, low, high))
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
    found,
    row_stride,
    vocabulary,
    share,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    part = tl.program_id(0)
    b = tl.program_id(1)
    heat = tl.load(temperature + b)
    k = tl.load(top_k + b)
    if (heat > 0) & (k > 0) & (k < vocabulary):
        if part == 0:
            tl.store(found + b, 0)
        return

    row = logits + b.to(tl.int64) * row_stride
    first = part * share
    last = tl.minimum(first + share, tl.cdiv(vocabulary, BLOCK))
    if heat > 0:
        low, high = _row_key(seeds, draws, b)
        scale = tl.minimum(1 / heat * LOG2E, MAX_SCALE)
        best, winner, top = _noisiest(row, first, last, vocabulary, scale, low, high, 0.0, 0.0, 0, False, BLOCK, STAGES)
    else:
        top, winner = _largest(row, first, last, vocabulary, BLOCK, STAGES)
        best = top
    at = b * tl.num_programs(0) + part
    tl.store(part_score + at, best)
    tl.store(part_id + at, winner)
    tl.store(part_top + at, top)


@triton.jit(do_not_specialize=["parts"])
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
    found,
    listed,
    out,
    row_stride,
    vocabulary,
    parts,
    LOW_BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    b = tl.program_id(0)
    heat = tl.load(temperature + b)
    k = tl.load(top_k + b)
    p = tl.load(top_p + b)
    share_of_top = tl.load(min_p + b)
    limited = (heat > 0) & (k > 0) & (k < vocabulary)

    part = tl.arange(0, BLOCK_S)
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
    low, high = _row_key(seeds, draws, b)
    scale = tl.minimum(1 / heat * LOG2E, MAX_SCALE)
    count = CAPACITY + 1
    listed += b * CAPACITY
    if limited:
        top, count = _shortlist(row, blocks, vocabulary, k, found + b, listed, LOW_BITS, CAPACITY, BLOCK, STAGES)
    floor = top + tl.log2(share_of_top) / scale
    if count <= CAPACITY:
        winner = _draw_listed(row, listed, count, scale, low, high, top, k, p, floor, LOW_BITS, CAPACITY)
    else:
        kth = float("-inf")
        ties = 0.0  # mass of the tokens that equal the k-th largest and are among the k
        most = vocabulary
        if limited:
            kth, above = _kth_of_row(row, blocks, vocabulary, k, LOW_BITS, BLOCK, STAGES)
            ties = (k - above) * tl.exp2((kth - top) * scale)
            most = k
        least = tl.maximum(kth, floor)
        x = tl.maximum(tl.load(row + winner).to(tl.float32), float("-inf"))
        if limited | (x < least):
            _, winner, _ = _noisiest(
                row, 0, blocks, vocabulary, scale, low, high, least, float("-inf"), NO_TOKEN, True, BLOCK, STAGES
            )
        cut = limited | (p < 1)
        while cut:
            x = tl.maximum(tl.load(row + winner).to(tl.float32), float("-inf"))
            preceding, mass, total = _preceding(row, blocks, vocabulary, scale, top, kth, x, winner, BLOCK, STAGES)
            cut = (preceding > 0) & ((preceding >= most) | ((p < 1) & (mass >= p * (total + ties))))
            if cut:
                _, winner, _ = _noisiest(
                    row, 0, blocks, vocabulary, scale, low, high, least, x, winner, True, BLOCK, STAGES
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
    assert settle["CAPACITY"] <= settle["BLOCK"]  # a k that a list can hold is one that the lanes have
    blocks = triton.cdiv(vocabulary, survey["BLOCK"])
    wanted = max(multiprocessors(logits.device) * survey["programs_per_sm"] // batch, 1)  # no second, short round
    share = triton.cdiv(blocks, min(wanted, blocks))
    parts = triton.cdiv(blocks, share)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    part_score, part_top = torch.empty((2, batch, parts), dtype=torch.float32, device=logits.device)
    part_id, found, listed = ints(batch, parts), ints(batch), ints(batch, settle["CAPACITY"])
    _survey_kernel[parts, batch](
        logits,
        temperature,
        top_k,
        seeds,
        draws,
        part_score,
        part_id,
        part_top,
        found,
        logits.stride(0),
        vocabulary,
        share,
        BLOCK=survey["BLOCK"],
        STAGES=survey["STAGES"],
        num_warps=survey["num_warps"],
    )
    _settle_kernel[(batch,)](
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
        found,
        listed,
        out,
        logits.stride(0),
        vocabulary,
        parts,
        LOW_BITS=LOW_BITS[logits.dtype],
        BLOCK_S=triton.next_power_of_2(parts),
        **settle,
    )
    return out
