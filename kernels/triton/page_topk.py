"""Page top-k: the best pages of each row and, in the same launch, the table by which a decode kernel reads them.

    scores      fp32 [B, H, P]                 one program a row
    shortlist   int32 [B, H, LANES]            scratch, ascending: the pages among which the choice is made
    pages       int32 [B, H, S]                ascending
    entries     int32 [B, H, S * page_units]   what the sequence's table says of those pages
                | page a: unit 0, unit 1 | page b: unit 0, unit 1 | ... | open page | 0 ...

1. A float's bits, read as an integer, ascend with it once the negative ones are turned over: scores become int32 keys.
   Kept pages get a key above that of every score, the open page one above that: from here on they are scores like
   others.
2. The row is dealt out to LANES lanes, at least two for each page that may be listed. Where k lanes have a page that
   reaches t, so have k pages of the row: the k-th largest of the lanes' best scores is a lower bound of the k-th
   largest of all, and few pages more than k reach it (about 1.4 k where scores are in random order).
3. Those make a shortlist in memory, in order. Which they are, a lane has in the bits of a word; the words change places
   so that each lane has neighbouring pages, one running count gives each lane its place, and it lists them bit by bit.
4. The rest happens on the shortlist, a page a lane. Search for the largest key that at least k pages reach; every page
   above it is chosen, and of those at it the lowest, up to k. A running count gives each its place, so pages come out
   in ascending order, the open page last, without a sort.

Both searches ask how many keys reach each of WAYS thresholds in one pass and go on between two of them, so that few
passes wait for the whole program; one that exactly k reach ends the search.

A row of at most BLOCK pages stays in registers. A longer one is read again, block by block, from the L2; so is one of
which more pages reach the bound than there are lanes (equal scores, or lanes that hold many of the best). Its bound is
raised by bisection until the pages that reach it fit, or until it is exact. Neither the row's length nor its budget are
launch arguments, so a captured graph replays with others.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings
from octavo.kernels.triton.plan import overlaps_launches

ABSENT = tl.constexpr(-(2**31))  # what is no page
LOWEST = tl.constexpr(-(2**31) + 1)  # what every page reaches
KEPT = tl.constexpr(2**31 - 3)  # above the key of infinity
OPEN = tl.constexpr(2**31 - 2)
HIGHEST = tl.constexpr(2**31 - 1)  # what no page reaches
WORD = 32
"""Bits of a lane's word, and so the most pages of a block that a lane may have."""


@triton.jit
def _load_scores(scores, page, sealed):
    """Scores of pages, fp32; minus infinity if they are not sealed."""
    return tl.load(scores + page, mask=page < sealed, other=float("-inf"))


@triton.jit
def _flip(bits):
    """From the bits of an fp32 number to an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(score):
    score = tl.maximum(score, float("-inf")) + 0.0  # neither NaN nor minus zero
    return _flip(score.to(tl.int32, bitcast=True))


@triton.jit
def _page_keys(scores, keep, page, sealed):
    """The keys once kept pages and the open page stand above all scores; ABSENT past the open page."""
    key = _keys(_load_scores(scores, page, sealed))
    kept = tl.load(keep + page, mask=page < sealed, other=0)
    key = tl.where(kept != 0, KEPT, key)
    key = tl.where(page == sealed, OPEN, key)
    return tl.where(page > sealed, ABSENT, key)


@triton.jit
def _block_pages(start, RUN: tl.constexpr, LANES: tl.constexpr):
    """Pages of a block, int32 [RUN, LANES]; neighbours lie in different lanes."""
    return start + tl.arange(0, RUN)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _search(key, k, low, high, count, enough, WAYS: tl.constexpr):
    """The largest threshold that at least k of the keys [N] reach, or a lower one that at most ``enough`` reach; and
    how many reach it.

    At least k keys reach ``low``, no more than ``count``; fewer than k reach ``high``.
    """
    way = tl.arange(1, WAYS + 1).to(tl.uint32)
    while (high.to(tl.int64) - low > 1) & (count > enough):
        span = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
        step = tl.maximum(span // (WAYS + 1), 1)
        threshold = _up(low, tl.minimum(step * way, span - 1))
        counts = tl.sum((key[None, :] >= threshold[:, None]).to(tl.int32), 1)
        reached = tl.sum((counts >= k).to(tl.int32), 0)  # of the thresholds, which ascend
        count = tl.min(tl.where(counts >= k, counts, count), 0)
        rise = reached.to(tl.uint32)
        high = _up(low, tl.where(reached == WAYS, span, tl.minimum(step * (rise + 1), span - 1)))
        low = _up(low, tl.minimum(step * rise, span - 1))
    return low, count


@triton.jit
def _up(low, offset):
    """An int32 raised by a uint32."""
    return (low.to(tl.uint32, bitcast=True) + offset).to(tl.int32, bitcast=True)


@triton.jit
def _pack(flag, RUN: tl.constexpr):
    """Flags [RUN, LANES] as the bits of a word a lane, int32 [LANES]."""
    return tl.sum(tl.where(flag, 1 << tl.arange(0, RUN)[:, None], 0), 0)


@triton.jit
def _neighbours(word, RUN: tl.constexpr, LANES: tl.constexpr):
    """From words whose bit i is of page ``i * LANES + lane`` of a block to words of page ``lane * RUN + i``; and how
    many bits of each are set."""
    word = tl.trans(tl.reshape(word, [LANES // RUN, RUN]))  # bit r of [i, c] is page r * LANES + c * RUN + i
    i = tl.arange(0, RUN)
    bits = (word[:, None, :] >> i[None, :, None]) & 1  # [i, r, c]
    word = tl.reshape(tl.sum(bits << i[:, None, None], 0), [LANES])
    return word, _ones(word)


@triton.jit
def _ones(word):
    """How many bits are set: counted in pairs, in fours, in bytes, in all."""
    count = word.to(tl.uint32, bitcast=True)
    count -= (count >> 1) & 0x55555555
    count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
    count = (count + (count >> 4)) & 0x0F0F0F0F
    return ((count * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _before(count):
    """What the lanes before each lane have counted."""
    return tl.cumsum(count, 0) - count


@triton.jit
def _append(shortlist, word, count, start, RUN: tl.constexpr, LANES: tl.constexpr):
    """Append a block's pages whose bits are set in the words of neighbours; each lane goes from bit to bit."""
    place = _before(count)
    page = start + tl.arange(0, LANES) * RUN
    for _ in range(tl.max(count, 0)):
        bit = (word & -word).to(tl.uint32, bitcast=True)
        i = (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # its place is the float's exponent
        tl.store(shortlist + place, page + i, mask=word != 0)
        place += 1
        word &= word - 1


@triton.jit
def _reaching(threshold, scores, keep, sealed, RUN: tl.constexpr, LANES: tl.constexpr):
    """How many pages of the row reach a threshold."""
    count = sealed * 0
    for start in range(0, sealed + 1, RUN * LANES):
        key = _page_keys(scores, keep, _block_pages(start, RUN, LANES), sealed)
        count += tl.sum((key >= threshold).to(tl.int32))
    return count


@triton.jit
def _shorten(shortlist, scores, keep, sealed, k, low, RUN: tl.constexpr, LANES: tl.constexpr):
    """Raise the bound until a shortlist will do, and list it: of the whole row, block by block. Gives the bound and how
    many pages are listed."""
    total = _reaching(low, scores, keep, sealed, RUN, LANES)
    high = tl.maximum(low, HIGHEST)
    while (total > LANES) & (high.to(tl.int64) - low > 1):
        middle = ((high.to(tl.int64) + low) >> 1).to(tl.int32)
        count = _reaching(middle, scores, keep, sealed, RUN, LANES)
        total = tl.where(count < k, total, count)
        high = tl.where(count < k, middle, high)
        low = tl.where(count < k, low, middle)
    room = total  # for pages at the bound
    if total > LANES:
        room = k - _reaching(low + 1, scores, keep, sealed, RUN, LANES)
        total = k
    listed = k * 0
    for start in range(0, sealed + 1, RUN * LANES):
        key = _page_keys(scores, keep, _block_pages(start, RUN, LANES), sealed)
        word, count = _neighbours(_pack(key > low, RUN), RUN, LANES)
        equal, equals = _neighbours(_pack(key == low, RUN), RUN, LANES)
        left = tl.maximum(room - _before(equals), 0)  # for those of the lane
        count += tl.minimum(left, equals)
        for i in range(RUN):
            is_equal = (equal >> i) & 1
            word |= tl.where(left > 0, is_equal << i, 0)
            left -= is_equal
        _append(shortlist + listed, word, count, start, RUN, LANES)
        listed += tl.sum(count, 0)
        room -= tl.sum(equals, 0)
    return low, total


@triton.jit(do_not_specialize=["width", "listed", "page_tokens", "page_units", "keep_batch", "table_batch"])
def _page_topk_kernel(
    scores,
    budget,
    keep,
    n_pages,
    lengths,
    table,
    shortlist,
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
    LANES: tl.constexpr,
    WAYS: tl.constexpr,
    WHOLE: tl.constexpr,
    SHORT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    row = sequence * tl.num_programs(0) + head
    scores += row.to(tl.int64) * width
    keep += sequence * keep_batch
    table += sequence * table_batch
    shortlist += row.to(tl.int64) * LANES
    pages += row.to(tl.int64) * listed
    entries += row.to(tl.int64) * listed * page_units
    if OVERLAP:
        tl.extra.cuda.gdc_wait()

    n = tl.load(n_pages + sequence)
    tokens = tl.load(lengths + sequence)
    wanted = tl.load(budget + sequence * budget_batch + head * budget_head).to(tl.int32)
    sealed = n - 1
    k = tl.minimum(tl.minimum(tl.maximum(wanted, 1), listed), n)

    RUN: tl.constexpr = BLOCK // LANES
    lane = tl.arange(0, LANES)
    page = lane
    block = _block_pages(0, RUN, LANES)
    score = _load_scores(scores, block, sealed)
    if WHOLE and not SHORT:  # here, so that it travels with the scores
        kept = _pack(tl.load(keep + block, mask=block < sealed, other=0) != 0, RUN)
    best = tl.max(score, 0)
    if not WHOLE:
        for start in range(BLOCK, sealed, BLOCK):
            best = tl.maximum(best, tl.max(_load_scores(scores, _block_pages(start, RUN, LANES), sealed), 0))
    best = _keys(best)
    top = tl.max(best, 0)
    low = tl.min(tl.where(lane < sealed, best, HIGHEST), 0)
    total = n
    if not SHORT:
        filled = tl.minimum(sealed, LANES)
        low = tl.where(filled < k, LOWEST, low)  # then all pages are listed
        low, _ = _search(best, k, low, tl.where(filled < k, LOWEST + 1, top + 1), filled, k + k // 16, WAYS)
        total = LANES + 1
        if WHOLE:
            below = score < _flip(low).to(tl.float32, bitcast=True)  # NaN is not: minus infinity may be the bound
            own = tl.minimum(tl.maximum(sealed - lane + LANES - 1, 0) // LANES, 32)  # sealed pages of the lane
            word = _pack(below == 0, RUN) & tl.where(own < 32, (1 << own) - 1, -1)
            word |= kept | tl.where(sealed % LANES == lane, 1 << (sealed // LANES), 0)
            word, count = _neighbours(word, RUN, LANES)
            total = tl.sum(count, 0)
            if total <= LANES:
                _append(shortlist, word, count, 0, RUN, LANES)
        if total > LANES:
            low, total = _shorten(shortlist, scores, keep, sealed, k, low, RUN, LANES)
        tl.debug_barrier()
        page = tl.load(shortlist + lane, mask=lane < total, other=HIGHEST)
    key = _page_keys(scores, keep, page, sealed)
    entry = tl.load(table + page * page_units, mask=lane < total, other=0)
    # Pages that are kept come before all scores: the threshold is theirs, or it is a score's.
    forced = tl.sum((key >= KEPT).to(tl.int32))
    by_score = forced < k
    low = tl.where(by_score, low, KEPT)
    high = tl.where(by_score, top + 1, HIGHEST)
    low, count = _search(key, k, low, high, tl.where(by_score, total, forced), k, WAYS)
    chosen = key >= low
    if count > k:
        above = key > low
        equal = (key == low).to(tl.int32)
        chosen = above | ((equal != 0) & (tl.cumsum(equal, 0) <= k - tl.sum(above.to(tl.int32), 0)))
    place = tl.cumsum(chosen.to(tl.int32)) - 1
    tl.store(pages + place, page, mask=chosen)
    rest = (lane >= k) & (lane < listed)
    tl.store(pages + lane, 0, mask=rest)
    for unit in range(page_units):
        tl.store(entries + place * page_units + unit, entry, mask=chosen)
        tl.store(entries + lane * page_units + unit, 0, mask=rest)
        entry = tl.load(table + page * page_units + unit + 1, mask=chosen & (unit + 1 < page_units), other=0)
    tl.store(counts + row, k)
    tl.store(slots + row, tl.where(k > 0, (k - 1) * page_tokens + tokens - sealed * page_tokens, 0))


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
    assert keep.stride(1) == table.stride(1) == 1 and n_pages.is_contiguous() and lengths.is_contiguous()
    assert scores.dtype == torch.float32 and table.shape[1] >= width * page_units
    listed = min(most, width)
    tuned = settings.launch("page_topk", "any", scores.device)
    room = triton.next_power_of_2(width)
    lanes = max(triton.next_power_of_2(2 * listed), tuned["LANES"], min(tuned["BLOCK"], room) // WORD)
    lanes = min(lanes, room)
    block = min(max(tuned["BLOCK"], lanes), room)
    assert block // lanes <= min(lanes, WORD)  # a lane's flags are a word, and a word is made of as many lanes
    overlap = overlaps_launches(scores.device)

    def int32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=scores.device)

    pages, counts = int32(batch, heads, listed), int32(batch, heads)
    entries, slots = int32(batch, heads, listed * page_units), int32(batch, heads)
    short = width <= lanes
    _page_topk_kernel[heads, batch](
        scores,
        budget,
        keep.view(torch.uint8),
        n_pages,
        lengths,
        table,
        pages if short else int32(batch, heads, lanes),
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
        LANES=lanes,
        WAYS=max(tuned["COMPARISONS"] // lanes, 1),
        WHOLE=width <= block,
        SHORT=short,
        OVERLAP=overlap,
        num_warps=min(max(tuned["num_warps"], block // 2048, lanes // 512), 32),  # as many as registers ask for
        launch_pdl=overlap,
    )
    return pages, counts, entries, slots
