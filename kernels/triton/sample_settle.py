"""The settlement, second kernel of the sampler (see sample.py): which token of a row is drawn under its filters."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl

from octavo.kernels.triton.sample_list import ARRIVED, draw_listed, shortlist
from octavo.kernels.triton.sample_noise import row_key
from octavo.kernels.triton.sample_row import MAX_SCALE, NO_TOKEN, real
from octavo.kernels.triton.sample_walk import kth_of_row, mass_before, next_noisiest, preceding, too_late, weigh
from octavo.kernels.triton.tiles import LOG2E

LEAST_SHARE = tl.constexpr(1e-30)  # a top-p of 0 keeps the first token, too


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
    x = real(tl.load(row + winner).to(tl.float32))
    arrived = 0
    if weighed:
        first = worker * share
        last = tl.minimum(first + share, blocks)
        weigh(row, first, last, blocks, vocabulary, scale, top, x, winner, masses, BLOCK, STAGES)
        tl.debug_barrier()  # what all threads have stored is there when the atomic is
        arrived = tl.atomic_add(counters + ARRIVED, 1, sem="acq_rel") + 1
    if weighed & (arrived < tl.num_programs(0)):
        return
    mass = 0.0
    total = 0.0
    if weighed:
        mass, total = mass_before(row, blocks, vocabulary, scale, top, x, winner, masses, BLOCK, BLOCK_M)

    low, high = row_key(seeds, draws, b)
    count = CAPACITY + 1
    if limited:
        cells = spans * (SPAN // CELL)
        top, count = shortlist(
            row, summary, cells, vocabulary, k, counters, listed, LOW_BITS, CAPACITY, CELL, SPAN, BLOCK_C
        )
    floor = top + tl.log2(share_of_top) / scale
    if count <= CAPACITY:
        winner = draw_listed(row, listed + CAPACITY, count, scale, low, high, top, k, p, floor, LOW_BITS, CAPACITY)
    else:
        least = floor
        span = tl.arange(0, BLOCK_N)
        bounds = tl.load(summary + span, mask=span < spans, other=float("-inf"))
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
