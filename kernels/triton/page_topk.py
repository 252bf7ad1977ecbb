"""Page top-k: the best pages of each row and, in the same launch, the table by which a decode kernel reads them.

    scores      fp32 [B, H, P]                 one program a row
    pages       int32 [B, H, S]                ascending
    entries     int32 [B, H, S * page_units]   what the sequence's table says of those pages
                | page a: unit 0, unit 1 | page b: unit 0, unit 1 | ... | open page | 0 ...

1. A float's bits, read as an integer, ascend with it once the negative ones are turned over: scores become int32 keys.
   Kept pages get a key just above the best score, the open page one above that: from here on they are scores like
   others.
2. Bisect for the largest key t that at least k pages reach, counting pages with a key of t or more in each pass. A pass
   that counts exactly k ends the search (typically after 11 to 19); equal scores need the rest of the 32.
3. Every page above t is listed, and of those at t the lowest, up to k. One running sum gives each its place, so pages
   come out in ascending order, the open page last, without a sort.

A row of at most BLOCK pages stays in registers; a longer one is read again, block by block, from the L2. Neither the
row's length nor its budget are launch arguments, so a captured graph replays with others.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings

ABSENT = tl.constexpr(-(2**31))  # below the key of minus infinity
HIGHEST = tl.constexpr(2**31 - 1)
MOST_PAGES = 2**14
"""Of a block: two counts of its pages share an int32."""


@triton.jit
def _score_keys(scores, sealed, start, BLOCK: tl.constexpr):
    """int32 keys, in the order of the scores, of the sealed pages ``start + [0, BLOCK)``; ABSENT past them."""
    page = start + tl.arange(0, BLOCK)
    score = tl.load(scores + page, mask=page < sealed, other=0.0)
    score = tl.where(score == 0.0, 0.0, score)  # minus zero
    score = tl.where(score == score, score, float("-inf"))  # NaN
    bits = score.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(page < sealed, key, ABSENT)


@triton.jit
def _with_forced(key, keep, sealed, best, start, BLOCK: tl.constexpr):
    """The keys once kept pages stand above the ``best`` score and the open page above them."""
    page = start + tl.arange(0, BLOCK)
    kept = tl.load(keep + page, mask=page < sealed, other=0)
    key = tl.where(kept != 0, best + 1, key)
    return tl.where(page == sealed, best + 2, key)


@triton.jit
def _count(key, threshold, scores, keep, sealed, best, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Pages whose key is ``threshold`` or more; ``key`` are those of the WHOLE row, if it fits a block."""
    if WHOLE:
        return tl.sum((key >= threshold).to(tl.int32))
    else:
        count = sealed * 0
        for start in range(0, sealed + 1, BLOCK):
            block = _with_forced(_score_keys(scores, sealed, start, BLOCK), keep, sealed, best, start, BLOCK)
            count += tl.sum((block >= threshold).to(tl.int32))
        return count


@triton.jit(do_not_specialize=["width", "listed", "page_tokens", "page_units", "keep_batch", "table_batch"])
def _page_topk_kernel(
    scores,
    budget,
    keep,
    n_pages,
    lengths,
    table,
    pages,
    counts,
    entries,
    slots,
    width,
    listed,
    page_tokens,
    page_units,
    budget_batch,
    budget_head,
    keep_batch,
    table_batch,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WHOLE: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    row = sequence * tl.num_programs(0) + head
    scores += row.to(tl.int64) * width
    keep += sequence * keep_batch
    table += sequence * table_batch
    pages += row.to(tl.int64) * listed
    entries += row.to(tl.int64) * listed * page_units

    n = tl.load(n_pages + sequence)
    sealed = n - 1
    wanted = tl.load(budget + sequence * budget_batch + head * budget_head).to(tl.int32)
    k = tl.minimum(tl.minimum(tl.maximum(wanted, 1), listed), n)

    key = _score_keys(scores, sealed, 0, BLOCK)
    best = tl.max(key)
    worst = tl.min(tl.where(key == ABSENT, HIGHEST, key))
    if WHOLE:
        key = _with_forced(key, keep, sealed, best, 0, BLOCK)
    else:
        for start in range(BLOCK, sealed, BLOCK):
            block = _score_keys(scores, sealed, start, BLOCK)
            best = tl.maximum(best, tl.max(block))
            worst = tl.minimum(worst, tl.min(tl.where(block == ABSENT, HIGHEST, block)))

    # At least k pages reach `reached`, fewer reach `missed`; int64, since the two may be 2^32 apart.
    everything = k == n
    reached = tl.where(everything, ABSENT, worst).to(tl.int64)
    missed = tl.where(everything, reached + 1, best.to(tl.int64) + 3)
    while missed - reached > 1:
        middle = (reached + missed) >> 1
        count = _count(key, middle.to(tl.int32), scores, keep, sealed, best, BLOCK, WHOLE)
        reached = tl.where(count >= k, middle, reached)
        missed = tl.where(count > k, missed, tl.where(count == k, middle + 1, middle))
    threshold = reached.to(tl.int32)
    at_threshold = k - _count(key, threshold + 1, scores, keep, sealed, best, BLOCK, WHOLE)

    above_before = k * 0
    equal_before = k * 0
    for start in range(0, n, BLOCK):
        if WHOLE:
            block = key
        else:
            block = _with_forced(_score_keys(scores, sealed, start, BLOCK), keep, sealed, best, start, BLOCK)
        above = block > threshold
        equal = block == threshold
        both = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16))  # two running sums in one
        equals = equal_before + (both >> 16)
        place = above_before + (both & 0xFFFF) + tl.minimum(equals, at_threshold) - 1
        chosen = above | (equal & (equals <= at_threshold))
        tl.store(pages + place, start + tl.arange(0, BLOCK), mask=chosen)
        if not WHOLE:
            above_before += tl.sum(above.to(tl.int32))
            equal_before += tl.sum(equal.to(tl.int32))

    # The list is read back: S lanes copy its entries, where BLOCK lanes would move k pages between them.
    tl.debug_barrier()
    place = tl.arange(0, BLOCK_S)
    meant = place < k
    page = tl.load(pages + place, mask=meant, other=0)
    tl.store(pages + place, 0, mask=(place >= k) & (place < listed))
    for unit in range(page_units):
        entry = tl.load(table + page * page_units + unit, mask=meant, other=0)
        tl.store(entries + place * page_units + unit, entry, mask=place < listed)
    tl.store(counts + row, k)
    open_tokens = tl.load(lengths + sequence) - sealed * page_tokens
    tl.store(slots + row, tl.where(k > 0, (k - 1) * page_tokens + open_tokens, 0))


def page_topk(
    scores: Tensor,
    budget: Tensor,
    keep: Tensor,
    n_pages: Tensor,
    lengths: Tensor,
    table: Tensor,
    page_tokens: int,
    page_units: int,
    most: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``reference.page_topk``."""
    scores = scores.contiguous()
    batch, heads, width = scores.shape
    assert keep.stride(1) == table.stride(1) == n_pages.stride(0) == lengths.stride(0) == 1
    assert scores.dtype == torch.float32 and table.shape[1] >= width * page_units
    listed = min(most, width)
    tuned = settings.launch("page_topk", "any", scores.device)
    block = min(triton.next_power_of_2(width), tuned["BLOCK"])
    assert block <= MOST_PAGES

    def int32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=scores.device)

    pages, counts = int32(batch, heads, listed), int32(batch, heads)
    entries, slots = int32(batch, heads, listed * page_units), int32(batch, heads)
    _page_topk_kernel[heads, batch](
        scores,
        budget,
        keep.view(torch.uint8),
        n_pages,
        lengths,
        table,
        pages,
        counts,
        entries,
        slots,
        width,
        listed,
        page_tokens,
        page_units,
        budget.stride(0),
        budget.stride(1),
        keep.stride(0),
        table.stride(0),
        BLOCK=block,
        BLOCK_S=triton.next_power_of_2(listed),
        WHOLE=width <= block,
        num_warps=min(max(block // tuned["pages_per_warp"], 1), 32),
    )
    return pages, counts, entries, slots
