"""The allocator experiment: traffic, contenders, where units lie, rows, resumption, refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.core.policies.allocators import ALLOCATORS
from octavo.scripts import allocator_traffic as traffic
from octavo.scripts import schema_memory
from octavo.scripts.allocator_traffic import MIXES, Octavo, Waste
from octavo.scripts.experiments.allocators import POOL_PAGES, Task, rows

from .conftest import Command, samples


def test_the_names_are_those_of_the_registries() -> None:
    assert tuple(ALLOCATORS) == schema_memory.ALLOCATOR_NAMES and tuple(MIXES) == schema_memory.MIX_NAMES


class TestTraffic:
    def test_a_sequence_grows_every_16_steps_and_ends_at_32_pages(self) -> None:
        """Of every sequence: the steps between its growths, and those between its ends."""
        load = traffic.traffic((2, 3), sequences=5, steps=3 * traffic.LIFETIME, seed=0)
        grown: dict[int, list[int]] = {who: [] for who in range(5)}
        ended: dict[int, list[int]] = {who: [] for who in range(5)}
        for number, step in enumerate(load.steps):
            for who in [who for growing in step.growing for who in growing]:
                grown[who].append(number)
            for who in step.ended:
                ended[who].append(number)
        assert all(set(np.diff(numbers)) == {16} for numbers in grown.values())
        assert all(set(np.diff(numbers)) == {512} for numbers in ended.values())

    def test_the_peak_is_what_the_tables_hold_at_most(self) -> None:
        load = traffic.traffic((1, 4), sequences=20, steps=600, seed=1)
        held = []

        def look(number: int, given: list[Any], tables: dict[int, list[Any]]) -> None:
            held.append(sum(page.size for table in tables.values() for page in table))

        traffic.replay(Octavo("stack", 20 * 32 * 4), load, look)
        begin = sum(
            pages * units for units, first in zip(load.mix, load.first, strict=True) for pages in first.values()
        )
        assert load.peak_units == max(begin, *held)

    def test_the_seed_decides(self) -> None:
        first, again, other = (traffic.traffic((2, 3), 20, 600, seed) for seed in (1, 1, 2))
        assert first == again and first != other

    def test_every_size_is_drawn(self) -> None:
        load = traffic.traffic((2, 3), 20, 600, 0)
        assert all(load.first) and all(sum(len(step.growing[kind]) for step in load.steps) > 200 for kind in (0, 1))


class TestContenders:
    @pytest.mark.parametrize("name", ALLOCATORS)
    @pytest.mark.parametrize("mix", MIXES)
    def test_each_serves_a_pool_that_is_full_at_the_peak(self, name: str, mix: str) -> None:
        load = traffic.traffic(MIXES[mix], sequences=12, steps=600, seed=0)
        who = Octavo(name, load.peak_units)
        tables: dict[int, list[Any]] = {}
        outing = traffic.replay(who, load, lambda number, given, held: tables.update(held))
        expected = sum(32 * len(step.ended) + sum(map(len, step.growing)) for step in load.steps)
        assert outing.operations == expected and len(outing.call_seconds) == 600
        held = np.sort(np.concatenate([page for table in tables.values() for page in table]))
        assert np.array_equal(np.setdiff1d(np.arange(1, load.peak_units + 1), held), who.allocator.check())
        firsts = [page[0] for table in tables.values() for page in table]
        assert np.flatnonzero(who._refs).tolist() == sorted(firsts) and who._refs.max() == 1

    def test_bulk(self) -> None:
        who = Octavo("stack", 10)
        assert traffic.bulk(who, pages=8, calls=3).operations == 48
        assert who.allocator.free_units == 10 and not who._refs.any()

    def test_vllm_serves_the_same_traffic(self, block_pool: Callable[[], Any]) -> None:
        load = traffic.traffic((1,), sequences=12, steps=600, seed=0)
        ours = traffic.replay(Octavo("stack", load.peak_units), load)
        who = traffic.contender("vllm", load.peak_units)
        assert traffic.replay(who, load).operations == ours.operations
        assert block_pool().blocks == load.peak_units + 1
        held = sum(block_pool().refs)
        assert held == len(block_pool().refs) - len(block_pool().free)

    def test_vllm_that_cannot_be_imported_is_noted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(traffic.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setitem(sys.modules, "vllm", None)
        assert "its block pool cannot be imported" in str(traffic.vllm_is_missing())
        monkeypatch.setattr(traffic.importlib.util, "find_spec", lambda name: None)
        assert traffic.vllm_is_missing() == "it is not installed"


@pytest.fixture
def block_pool(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A stand-in for vLLM's pool of blocks 1, 2, ...; block 0 is its own. The pool that was made last."""
    made = []

    class BlockPool:
        def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int) -> None:
            assert not enable_caching and hash_block_size == 16
            self.blocks = num_gpu_blocks
            self.free = list(range(1, num_gpu_blocks))
            self.refs = [0] * (num_gpu_blocks - 1)
            made.append(self)

        def get_new_blocks(self, count: int) -> list[Any]:
            taken = [self.free.pop(0) for _ in range(count)]
            for block in taken:
                self.refs[block - 1] += 1
            return [SimpleNamespace(block_id=block) for block in taken]

        def free_blocks(self, blocks: list[Any]) -> None:
            for block in blocks:
                self.refs[block.block_id - 1] -= 1
                assert self.refs[block.block_id - 1] == 0
                self.free.append(block.block_id)

    names = ["vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.block_pool"]
    for name in names:
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules[names[-1]].BlockPool = BlockPool  # type: ignore[attr-defined]
    return lambda: made[-1]


def test_waste_is_exact() -> None:
    """Pages of 1 and 3 in a pool of 12: a page of 1, 2 and 11; one in a piece; 4 to 7 and 12 are free, 8 is lost."""
    allocator = ALLOCATORS["stack"](12)
    allocator.allocate(12)
    allocator.free(np.array([4, 5, 6, 7, 12], np.int32))
    load = traffic.Traffic((1, 3), ({}, {}), (traffic.Step([], ([], [])),), 7)
    waste = Waste(allocator, load)
    single, large = np.array([[3]], np.int32), np.array([[1, 2, 11], [9, 10, 11]], np.int32)
    waste.look(0, [single, large], {0: [single[0]], 1: list(large)})
    assert waste.found() == {
        "pages": 3,
        "split_pages": 1,
        "calls": 2,
        "split_calls": 1,
        "runs": 1 + 3,
        "units": 7,
        "free_units": 5,
        "external_waste_units": 1 + 1,  # the fourth of 4 to 7, and 12
        "internal_waste_units": 0,
    }
    waste.look(16, [], {0: [single[0]], 1: [large[0]]})
    assert waste.found()["internal_waste_units"] == 3


def test_pools_are_as_full_as_asked_at_the_peak() -> None:
    load = traffic.Traffic((1,), ({},), (), 90)
    assert Task("t", fill=90).total_units(load) == 100 and Task("t", fill=98).total_units(load) == 92
    assert Task("t").total_units(load) == POOL_PAGES


def sample(name: str, number: int, seconds: float) -> dict[str, Any]:
    return {"item": "growth", "round": number, "name": name, "mix": "1", "fill": None, "total_units": 8,
            "operations": 12, "seconds": seconds, "p99_us": seconds, "free_cores": 2.0 - number}  # fmt: skip


def test_rows_pair_the_rounds() -> None:
    """The stack is twice as fast as vLLM and four times as fast as linear in each round, also in a slow one."""
    turns = (("stack", 1), ("vllm", 2), ("linear", 4))
    stack, vllm, linear = rows([sample(who, n, t * slow) for n, t in enumerate((1.0, 3.0, 1.0)) for who, slow in turns])
    assert (stack["operations_per_s"], stack["operations_per_s_min"], stack["operations_per_s_max"]) == (12, 4, 12)
    assert (stack["vllm_ratio"], stack["linear_ratio"]) == (2, 4)
    assert (vllm["vllm_ratio"], vllm["linear_ratio"], linear["vllm_ratio"]) == (1, 2, 0.5)
    assert (stack["p99_us"], stack["free_cores_min"], stack["rounds"]) == (1, 0, 3)
    assert rows([sample("stack", 0, 1.0)])[0]["vllm_ratio"] is None


class TestCommand:
    ARGUMENTS = (
        "experiment=allocators", "limit=6", "repeats=2", "allocators=[stack,best_fit]", "mixes=['1:1.5']", "fills=[90]",
    )  # fmt: skip

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from octavo.scripts.experiments import allocators
        from octavo.scripts.machine_load import Load

        monkeypatch.setattr(allocators, "watch", lambda: Load(0.0, 2.0, 2))

    def test_a_run_beside_vllm(self, octavo: Command, block_pool: Callable[[], Any]) -> None:
        outcome = octavo(*self.ARGUMENTS)
        assert outcome.code == 0, outcome.err
        turns = [("growth", "stack"), ("growth", "best_fit"), ("growth", "vllm"),
                 ("bulk", "stack"), ("bulk", "best_fit"), ("bulk", "vllm"),
                 ("1:1.5 at 90 %", "stack"), ("1:1.5 at 90 %", "best_fit")]  # fmt: skip
        found = outcome.metrics["rows"]
        assert [(row["task"], row["name"]) for row in found] == turns
        taken = [(s["round"], s["item"], s["name"]) for s in samples(outcome.folder)]
        assert taken == [(n, *turn) for part in (turns[:3], turns[3:6], turns[6:]) for n in range(2) for turn in part]
        assert all(row["operations_per_s"] > 0 and row["rounds"] == 2 for row in found)
        assert all(row["internal_waste_units"] == 0 and row["run_units_mean"] >= 1 for row in found[6:])
        assert "growth: stack is" in outcome.out and "x as fast as vLLM's BlockPool" in outcome.out
        headings = ("pages/s", "p99 µs", "x vLLM", "split pages %", "split calls %", "units a run", "external waste %")
        assert all(heading in outcome.out for heading in headings)
        assert {file.name for file in (outcome.folder / "plots").iterdir()} == {"speed.png", "layout.png"}

    def test_an_interrupted_run_goes_on(self, octavo: Command) -> None:
        folder = octavo(*self.ARGUMENTS, "rivals=[]").folder
        file = folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:3]))  # the first round, and one allocator of the second
        outcome = octavo(f"resume={folder}")
        assert outcome.code == 0, outcome.err
        assert file.read_text().splitlines(keepends=True)[:3] == lines[:3]
        assert [(s["item"], s["round"], s["name"]) for s in samples(folder)] == [
            (item, n, name) for item in ("growth", "bulk", "1:1.5 at 90 %") for n in range(2)
            for name in ("stack", "best_fit")
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("allocators=[bestfit]", "allocators=bestfit: unknown; did you mean 'best_fit'?"),
            ("allocators=[]", "allocators is empty"),
            ("mixes=['1:2']", "mixes=1:2: unknown"),
            ("fills=[90,101]", "fills=101: must be a percentage from 1 to 100"),
            ("fills=[90,90]", "fills lists 90 twice"),
            ("sequences=2049", "sequences=2049: at most 2048"),
            ("steps=0", "steps=0: must be at least 1"),
        ],
    )
    def test_refusals(self, override: str, message: str, octavo: Command) -> None:
        outcome = octavo("experiment=allocators", override)
        assert outcome.code == 1 and message in outcome.err
