"""The races of attention, pages and append: on a small part of each shape, octavo is right and all contenders run."""

import pytest
import torch

from octavo.kernels.layout import entry_units, entry_valid
from octavo.scripts.kernel_races import append_decode, append_fused, attention, pages, rivals
from octavo.scripts.kernel_races.checking import mismatch, poisoned_memory, relative_error
from octavo.scripts.kernel_races.paged import Paged, Shape

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
CPU = torch.device("cpu")
RACES = [*attention.races(), *pages.races(), *append_fused.races(), *append_decode.races()]
ON_A_GPU_ONLY = ("flashinfer", "flex", "sdpa")


@interpreted
@pytest.mark.parametrize("race", RACES, ids=lambda race: race.name)
def test_a_race_is_right_and_runs(race):
    """In the interpreter: what a race does, not how fast."""
    field = race.build(CPU)
    with poisoned_memory():
        assert field.error() <= field.tolerance
    assert next(iter(field.contenders)) == "octavo"
    for name, calls in field.contenders.items():
        if not name.startswith(ON_A_GPU_ONLY):
            calls[-1]()


@pytest.mark.gpu
@pytest.mark.parametrize("race", [race for race in RACES if race.moved_bytes < 1e9], ids=lambda race: race.name)
def test_gpu_a_race_is_right(race):
    field = race.build(torch.device("cuda"))
    with poisoned_memory():
        assert field.error() <= field.tolerance


@pytest.mark.gpu
def test_gpu_a_table_may_have_more_room_than_the_sequences_need():
    assert Paged(Shape((1024,), capacity=4096), torch.device("cuda")).table.shape == (1, 1, 1, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [Shape((1024,) * 3), Shape((100, 1600, 7)), Shape((300,) * 2, queries=4)], ids=str)
def test_rivals_compute_the_same(shape):
    """Nobody wins by doing something else; who is not installed or has no kernel for this card is passed over."""
    paged = Paged(shape, torch.device("cuda"))
    want = attention._attend(paged, 0, "reference")
    for name, calls in rivals.attention(paged).items():
        try:
            got = calls[0]()
        except RuntimeError as problem:
            print(f"{name}: {problem}")
            continue
        assert relative_error(got.reshape(want.shape), want) < attention.TOLERANCE, name


def test_shapes_say_what_must_be_read():
    by_name = {race.name: race for race in RACES}
    assert by_name["K1 decode, 32 x 8k"].moved_bytes == 32 * 8192 * 2 * 8 * 128 * 2
    assert by_name["K1 decode, 36 x 220k, 4 heads on 1"].moved_bytes == 36 * 220_000 * 2 * 128 * 2
    assert by_name["K9 append, 256 tokens"].moved_bytes == 2 * 256 * 4096
    assert by_name["K11 copy, 32 MB"].moved_bytes == 2 * 2**25
    assert by_name["K12 transfer, 8 KB to host"].moved_bytes == 2**28
    assert len(by_name) == len(RACES)


def test_pages_are_contiguous_and_lie_in_random_order():
    shape = Shape((64, 40), unit=8, pages=(16, 24))
    paged = Paged(shape, CPU)
    held = [[int(unit) for unit in entry_units(row[row > 0])] for row in paged.table[0, :, 0]]
    assert [len(row) for row in held] == [8, 5]
    assert len({*held[0], *held[1]}) == 13 and min(*held[0], *held[1]) >= 1
    for row in held:
        start = 0
        for size in (2, 3, 2, 3)[: 4 if len(row) == 8 else 2]:
            page = row[start : start + size]  # the last may be cut off
            assert page == list(range(row[start], row[start] + len(page)))
            start += size
    assert set(entry_valid(paged.table[paged.table > 0]).tolist()) == {8}
    assert paged.lengths.flatten().tolist() == [64, 40] and paged.q_pos.tolist() == [63, 39]
    assert max(*held[0], *held[1]) < len(paged.pool)


def test_in_the_interpreter_a_shape_is_cut_to_a_small_part():
    shape = Shape((32768, 256, 1024), capacity=65536).fitting(CPU)
    assert (shape.lengths, shape.heads, shape.kv_heads, shape.capacity) == ((64, 1), 8, 2, 0)


def test_contiguous_keys_are_those_of_the_pages():
    paged = Paged(Shape((48, 48)), CPU)
    k, v = paged.contiguous(1)
    assert k.shape == v.shape == (2, 2, 64, 128)
    units = entry_units(paged.table[0, 1, 0])
    assert torch.equal(k[1, :, 16:32], paged.pool[units[1], 1, 0]) and torch.equal(
        v[1, :, :16], paged.pool[units[0], 1, 1]
    )


def test_flashinfer_gets_its_own_table():
    paged = Paged(Shape((64, 17)), CPU)
    ends, ids, last = rivals._pages(paged.table, paged.lengths, 16)
    assert ends.tolist() == [0, 4, 6] and last.tolist() == [16, 1]
    assert ids.tolist() == [
        *entry_units(paged.table[0, 0, 0]).tolist(),
        *entry_units(paged.table[0, 1, 0, :2]).tolist(),
    ]
    assert all(x.dtype == torch.int32 for x in (ends, ids, last))


def test_a_rival_costs_nothing_until_it_races():
    made = []

    def make():
        made.append(1)
        return [lambda: "a", lambda: "b"]

    calls = rivals.lazily(make, 2)
    assert not made
    assert [call() for call in calls] == ["a", "b"] and made == [1]


def test_uninitialised_memory_is_poisoned_and_only_inside():
    with poisoned_memory():
        assert torch.empty(4).isnan().all() and torch.ones(3).new_empty(2).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_errors():
    one = torch.ones(4)
    assert relative_error(one, one) == 0 and relative_error(one * 1.5, one) == 0.5
    assert relative_error(torch.full((4,), torch.nan), one) == torch.inf
    assert relative_error(torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, -torch.inf])) == 0
    nan = torch.full((2,), torch.nan)
    assert mismatch(nan, nan.clone()) == 0 and mismatch(torch.tensor([0.0]), torch.tensor([-0.0])) == torch.inf


@interpreted
@pytest.mark.parametrize("programs", [1, 3])
def test_streams_touch_everything(programs):
    from octavo.kernels.triton import streams

    x = torch.randint(2**20, (1024,), dtype=torch.int32)
    x[1023] |= 2**30  # the last element alone has this bit
    out = torch.zeros(programs, dtype=torch.int32)
    streams.read(x, out, 64, 4)
    assert (out & 2**30).any()
    order = torch.randperm(32, dtype=torch.int32)
    streams.read_pieces(x.view(32, 32), order, out.zero_(), 4, 4)
    assert (out & 2**30).any()
    copied = torch.zeros_like(x)
    streams.copy(x, copied, 64, programs, 4)
    assert torch.equal(copied, x)
