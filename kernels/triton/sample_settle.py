"""The settlement, second kernel of the sampler (see sample.py): which token of a row is drawn under its filters."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl

from octavo.kernels.triton.sample_list import NOT_DRAWN, draw_short, kth_listed
from octavo.kernels.triton.sample_noise import row_key
from octavo.kernels.triton.sample_row import MAX_SCALE, NO_TOKEN, real
from octavo.kernels.triton.sample_walk import kth_of_row, mass_before, next_noisiest, preceding, too_late, weigh
from octavo.kernels.triton.tiles import LOG2E

LEAST_SHARE = tl.constexpr(1e-30)  # a top-p of 0 keeps the first token, too
PROMISING = tl.constexpr(0.75)  # of the goal in peaks alone: with the other tokens above them it is likely reached


@triton.jit
def _total(bounds, grains, spans, top, scale, GRAIN: tl.constexpr, SPAN: tl.constexpr, BLOCK_G: tl.constexpr):
    """Mass of the whole row, in units of the first token's, from what the survey left of its grains."""
    grain = tl.arange(0, BLOCK_G)
    inside = grain < spans * (SPAN // GRAIN)
    bound = tl.load(bounds + grain // (SPAN // GRAIN), mask=inside, other=float("-inf"))
    mass = tl.load(grains + grain, mask=inside, other=0.0)
    return tl.sum(mass * tl.exp2(tl.fma(top, -scale, bound)))


@triton.jit(do_not_specialize=["parts", "share"])
def settle_kernel(
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
    bounds,
    grains,
    peaks,
    masses,
    arrivals,
    listed,
    out,
    row_stride,
    vocabulary,
    parts,
    share,
    LOW_BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CELL: tl.constexpr,
    GRAIN: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """SPAN is the survey's BLOCK. Powers of two hold its blocks, and so its parts (BLOCK_N), the blocks of this kernel
    (BLOCK_M), the cells of a row (BLOCK_C) and its grains (BLOCK_G): they follow from the vocabulary, so that every
    batch runs this code."""
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
    bounds += b * spans
    grains += b.to(tl.int64) * spans * (SPAN // GRAIN)
    peaks += b.to(tl.int64) * spans * (SPAN // CELL)
    masses += b * 2 * blocks
    listed += b.to(tl.int64) * 2 * CAPACITY
    scale = tl.minimum(1 / heat * LOG2E, MAX_SCALE)
    low, high = row_key(seeds, draws, b)
    x = real(tl.load(row + winner).to(tl.float32))

    # The short way, of one program. All programs of a row decide alike whether it is tried.
    short = limited
    drawn = tl.full([], NOT_DRAWN, tl.int32)
    if limited | weighed:
        cell = tl.arange(0, BLOCK_C)
        peak = tl.load(peaks + cell, mask=cell < spans * (SPAN // CELL), other=float("-inf")).to(tl.float32)
        top = tl.max(peak)
        goal = 0.0
        if weighed:
            total = _total(bounds, grains, spans, top, scale, GRAIN, SPAN, BLOCK_G)
            goal = tl.maximum(p, LEAST_SHARE) * total
            short = (total >= 0.5) & (total < float("inf"))  # not with NaN, infinities, or a scale beyond fp32
        bound = x
        partial = weighed & (tl.sum((peak >= x).to(tl.int32)) > CAPACITY // 2)
        if limited | partial:
            bound = kth_listed(peak, tl.where(limited, k, CAPACITY // 2), LOW_BITS)
        if partial:
            seen = tl.sum(tl.where(peak >= bound, tl.exp2((peak - top) * scale), 0.0))
            short = short & (seen >= goal * PROMISING)
        if short & (worker == 0):
            drawn = draw_short(
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
                top + tl.log2(share_of_top) / scale,
                goal,
                limited,
                listed,
                LOW_BITS,
                CAPACITY,
                CELL,
                BLOCK,
                BLOCK_C,
            )
    if drawn != NOT_DRAWN:
        tl.store(out + b, drawn.to(tl.int64))
    if (drawn != NOT_DRAWN) | (short & (worker > 0)):
        return

    # The long way, of all programs for the first sum, and of the last one to finish from there on.
    floor = top + tl.log2(share_of_top) / scale
    arrived = 0
    if weighed:
        first = tl.where(short, 0, worker * share)
        last = tl.where(short, blocks, tl.minimum(first + share, blocks))
        weigh(row, first, last, blocks, vocabulary, scale, top, x, winner, masses, BLOCK, STAGES)
        tl.debug_barrier()  # what all threads have stored is there when the atomic is
        arrived = tl.atomic_add(arrivals + b, 1, sem="acq_rel") + 1
    if weighed & (short == 0) & (arrived < tl.num_programs(0)):
        return
    mass = 0.0
    total = 0.0
    if weighed:
        mass, total = mass_before(row, blocks, vocabulary, scale, top, x, winner, masses, BLOCK, BLOCK_M)
    least = floor
    span = tl.arange(0, BLOCK_N)
    bounds = tl.load(bounds + span, mask=span < spans, other=float("-inf"))
    goal = tl.maximum(p, LEAST_SHARE) * total
    if limited:  # the survey has neither winner nor bounds
        x = float("-inf")
        winner = NO_TOKEN
        bounds = tl.where(span < spans, float("inf"), float("-inf"))
        kth = kth_of_row(row, blocks, vocabulary, k, LOW_BITS, BLOCK, STAGES)
        least = tl.maximum(kth, floor)
        ties = k - preceding(row, blocks, vocabulary, kth, 0, BLOCK, STAGES)  # equal to kth, and kept
        if p < 1:
            weigh(row, 0, blocks, blocks, vocabulary, scale, top, kth, 0, masses, BLOCK, STAGES)
            tl.debug_barrier()
            above, _ = mass_before(row, blocks, vocabulary, scale, top, kth, 0, masses, BLOCK, BLOCK_M)
            goal = tl.maximum(p, LEAST_SHARE) * (above + ties * tl.exp2((kth - top) * scale))
    cut = limited | (x < least) | ((p < 1) & (mass >= goal))
    while cut:
        winner, bounds = next_noisiest(row, vocabulary, scale, low, high, bounds, least, x, winner, SPAN, BLOCK_N)
        x = real(tl.load(row + winner).to(tl.float32))
        cut = limited & (preceding(row, blocks, vocabulary, x, winner, BLOCK, STAGES) >= k)
        if (p < 1) & (cut == 0):
            cut = too_late(
                row, blocks, vocabulary, scale, top, x, winner, goal, limited, masses, BLOCK, STAGES, BLOCK_M
            )
    tl.store(out + b, winner.to(tl.int64))
