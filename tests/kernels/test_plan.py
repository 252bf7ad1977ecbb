"""The plan of decode: shares partition the tiles, parts have places of their own, and who joins them finds them there.

Each function of the kernels runs in a small kernel of its own and is compared with plain Python.
"""

import random
from bisect import bisect_right
from itertools import accumulate, pairwise

import pytest
import torch
import triton
import triton.language as tl
from test_decode_shared import grouping

from octavo.kernels.triton import plan
from octavo.kernels.triton.combine import group_part

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def fresh_numbers(request):
    seed = random.randrange(1 << 30)
    random.seed(seed)
    torch.manual_seed(seed)
    yield
    print(f"{request.node.name}: seed {seed}")


@triton.jit(do_not_specialize=["total", "most", "min_tiles"])
def _shares_kernel(used_out, begins, owners, total, most, min_tiles, S: tl.constexpr, T: tl.constexpr):
    used = plan.programs_used(total, most, min_tiles)
    tl.store(used_out, used)
    s = tl.arange(0, S)
    tl.store(begins + s, plan.share_begin(s, total, used), mask=s <= used)
    t = tl.arange(0, T)
    tl.store(owners + t, plan.program_of(t, total, used), mask=t < total)


def shares(total, most, min_tiles, device):
    """Programs used, first tile of each and of the one after the last, and the program of each tile."""
    s, t = triton.next_power_of_2(most + 1), triton.next_power_of_2(total)
    used, begins, owners = (torch.full((n,), -1, dtype=torch.int32, device=device) for n in (1, s, t))
    _shares_kernel[(1,)](used, begins, owners, total, most, min_tiles, S=s, T=t)
    return used.item(), begins.tolist()[: used.item() + 1], owners.tolist()[:total]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", range(20))
def test_shares_partition_the_tiles(number, device):
    total, most, min_tiles = random.randint(1, 2000), random.randint(1, 300), random.randint(1, 8)
    used, begins, owners = shares(total, most, min_tiles, device)
    sizes = [end - begin for begin, end in pairwise(begins)]
    assert 1 <= used <= most and begins[0] == 0 and begins[-1] == total
    assert max(sizes) - min(sizes) <= 1
    assert used == 1 or min(sizes) >= min_tiles
    assert used == most or (used + 1) * min_tiles > total  # one more would have had too little
    assert owners == [program for program, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize("device", DEVICES)
def test_shares_of_more_tiles_than_int32_can_multiply(device):
    """Eight million tiles over 528 programs: a product does not fit 32 bits."""
    total, most = 2**23, 528
    begins = torch.empty(1024, dtype=torch.int32, device=device)
    owners, used = torch.empty(1, dtype=torch.int32, device=device), torch.empty(1, dtype=torch.int32, device=device)
    _shares_kernel[(1,)](used, begins, owners, total, most, 1, S=1024, T=1)
    assert begins.tolist()[: most + 1] == [program * total // most for program in range(most + 1)]


def places_written(begins, ends):
    """(item, first tile, place) of each part that ``decode`` leaves, program by program, and the whole items."""
    parts, whole = [], []
    for program, (now, stop) in enumerate(pairwise(begins)):
        place = 2 * program
        while now < stop:
            item = bisect_right(ends, now)
            begin, until = ends[item - 1] if item else 0, min(stop, ends[item])
            if (now, until) == (begin, ends[item]):
                whole.append(item)
            else:
                parts.append((item, now, place))
            place, now = 2 * program + 1, until
    return parts, whole


def places_read(begins, owners, begin, end):
    """Places of an item's parts in the order of its tiles, as ``combine`` works them out."""
    first, last = owners[begin], owners[end - 1]
    start = 2 * first + (begins[first] != begin)
    return [start, *(2 * program for program in range(first + 1, last + 1))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", range(20))
def test_parts_are_found_where_they_were_left(number, device):
    tiles = [random.choice([0, 1, 2, 7, random.randint(1, 90)]) for _ in range(random.randint(1, 30))] + [1]
    ends = list(accumulate(tiles))
    _, begins, owners = shares(ends[-1], random.randint(1, 60), random.randint(1, 4), device)
    parts, whole = places_written(begins, ends)
    places = [place for _, _, place in parts]
    assert len(places) == len(set(places)) and all(0 <= place < 2 * (len(begins) - 1) for place in places)
    for item, (count, end) in enumerate(zip(tiles, ends, strict=True)):
        left = [place for of, _, place in sorted(parts) if of == item]
        if count and item not in whole:
            assert len(left) > 1 and left == places_read(begins, owners, end - count, end)
        else:
            assert not left and (not count or owners[end - count] == owners[end - 1])
    for program in range(len(begins) - 1):  # one that it began with and one that it did not finish
        assert sum(place // 2 == program for place in places) <= 2


@triton.jit(do_not_specialize=["items"])
def _tiles_kernel(
    out, lengths, q_pos, skips, items, HEADS: tl.constexpr, WINDOW: tl.constexpr, ORDERED: tl.constexpr,
    RUN_TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    tiles = plan.item_tiles(
        lengths, HEADS, 1, q_pos, skips, items, HEADS, WINDOW, ORDERED, RUN_TILE, BLOCK_N, BLOCK_I
    )  # fmt: skip
    tl.store(out + tl.arange(0, BLOCK_I), tiles)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("window", "ordered", "run_tile"),
    [(0, True, 0), (0, False, 0), (1, True, 0), (37, True, 0), (37, False, 0), (0, True, 32), (0, True, 8)],
)
def test_tiles_of_items_hold_what_their_queries_see(window, ordered, run_tile, device):
    batch, heads, tile = 60, 2, 16
    lengths = torch.randint(200, (batch, heads), dtype=torch.int32)
    q_pos = torch.randint(200, (batch,), dtype=torch.int32)
    runs = torch.minimum(torch.randint(200, (batch,)), lengths.amin(1)).int()  # shared leading slots
    q_pos = torch.maximum(q_pos, runs)  # a query stands behind its run
    out = torch.full((128,), -1, dtype=torch.int32, device=device)
    _tiles_kernel[(1,)](
        out, *(x.to(device) for x in (lengths, q_pos, runs)), batch * heads,
        HEADS=heads, WINDOW=window, ORDERED=ordered, RUN_TILE=run_tile, BLOCK_N=tile, BLOCK_I=128,
    )  # fmt: skip
    for item, got in enumerate(out.tolist()):
        if item >= batch * heads:
            assert got == 0
            continue
        b, head = divmod(item, heads)
        first, end = 0, int(lengths[b, head])
        if ordered:  # in logical order the slots that a query sees lie side by side
            end = min(end, int(q_pos[b]) + 1)
            if window:
                first = max(int(q_pos[b]) + 1 - window, 0) // tile * tile  # whole tiles, as the kernel reads them
        if run_tile:
            first = int(runs[b]) // run_tile * run_tile
        assert got == len(range(first, end, tile))


@triton.jit
def _group_part_kernel(groups, out, batch, BLOCK_B: tl.constexpr, MEMBERS: tl.constexpr, RUN_TILE: tl.constexpr):
    b = tl.program_id(0)
    member, first, tiles, total = group_part(groups, b, batch, BLOCK_B, MEMBERS, RUN_TILE)
    tl.store(out + 4 * b, member)
    tl.store(out + 4 * b + 1, first)
    tl.store(out + 4 * b + 2, tiles)
    tl.store(out + 4 * b + 3, total)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", range(20))
def test_a_row_finds_its_place_in_its_group(number, device):
    members_together, tile = random.choice([1, 4, 5]), 32
    parts = [(random.choice([0, 8, 32, 40, 128]), random.randint(1, 9)) for _ in range(random.randint(1, 6))]
    batch = sum(size for _, size in parts)
    rows = random.sample(range(batch), batch)
    want = dict.fromkeys(rows, (0, 0, 0))
    at, total = 0, 0
    for run, size in parts:  # a group's tiles follow each other: for its first members, for the next, ...
        own = rows[at : at + size]
        at += size
        for start in range(0, size if run else 0, members_together):
            for member, b in enumerate(own[start : start + members_together]):
                want[b] = member, total, run // tile
            total += run // tile
    out = torch.full((batch, 4), -1, dtype=torch.int32, device=device)
    groups = grouping(rows, parts).to(device)
    block = max(triton.next_power_of_2(batch), 16)
    _group_part_kernel[(batch,)](groups, out, batch, BLOCK_B=block, MEMBERS=members_together, RUN_TILE=tile)
    for b, (member, first, tiles, all_tiles) in enumerate(out.tolist()):
        assert all_tiles == total and tiles == want[b][2]
        if tiles:  # a row without any has nothing to find
            assert (member, first) == want[b][:2]


@pytest.mark.parametrize(
    ("batch", "lanes", "slots"),
    [(1, 8, 1024), (1, 8, 32768), (8, 8, 32768), (36, 1, 220_000), (512, 8, 4096), (1, 200, 4096), (3, 8, 129)],
)
def test_programs_fill_the_card_once_and_no_more(batch, lanes, slots):
    tuned = {"BLOCK_N": 64, "programs_per_sm": 2, "min_split_tokens": 256}
    most, min_tiles = plan.programs_a_lane(batch, lanes, slots, 132, tuned)
    assert min_tiles == 4  # tiles of 64 in 256 tokens
    if slots <= 256:
        assert most == 0
        return
    most_at_all = batch * -(-slots // 256)  # all rows full, and no share less than 256 tokens
    assert most == min(max(264 // lanes, 1), most_at_all)
    assert lanes * most <= 264
    assert most == most_at_all or lanes * (most + 1) > 264


def test_a_table_of_one_share_is_not_split():
    tuned = {"BLOCK_N": 128, "programs_per_sm": 2, "min_split_tokens": 64}
    assert plan.programs_a_lane(5, 8, 64, 132, tuned) == (0, 1)  # the least share is a tile at least
    assert plan.programs_a_lane(0, 8, 4096, 132, tuned)[0] == 0
