"""A growing pool against one allocation: the waves of demand, what the rows say of them, and the command."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo.scripts.experiments import elastic
from octavo.scripts.experiments.elastic import demand, rows

from .conftest import Command, samples

MIB = 1 << 20
PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # of the tiny model: 16 tokens, 2 layers, K and V, 2 heads of 16, fp32


def test_demand_comes_in_two_waves_that_reach_the_whole_pool() -> None:
    needed = demand(1000)
    assert len(needed) == 61 and needed[0] == 300 and max(needed) == 1000 and min(needed) == 300
    rises = [after > before for before, after in pairwise(needed)]
    assert [index for index, (one, two) in enumerate(pairwise(rises)) if one != two] == [14, 29, 44]


def sample(item: str, number: int, grow: list[float], committed: list[int], **more: Any) -> dict[str, Any]:
    return {"item": item, "round": number, "chunk_bytes": 10, "base_bytes": 20, "pool_bytes": 40, "start_us": 5.0,
            "grow_us": grow, "shrink_us": [], "needed_bytes": [10, 20], "committed_bytes": committed,
            "reason": None, **more}  # fmt: skip


def test_rows() -> None:
    whole = sample("one_allocation", 0, [], [40, 40], reason="no driver")
    ours, other = rows([sample("c", 0, [1.0, 9.0], [20, 30]), whole, sample("c", 1, [2.0], [20, 20], start_us=7.0)])
    assert (ours["name"], ours["rounds"], ours["start_us"]) == ("octavo", 2, 6.0)
    assert (ours["grow_calls"], ours["grow_us"], ours["grow_us_max"]) == (3, 2.0, 9.0)
    assert (ours["shrink_calls"], ours["shrink_us"], ours["shrink_us_max"]) == (0, None, None)
    assert (ours["committed_bytes_mean"], ours["committed_bytes_min"], ours["committed_bytes_max"]) == (22.5, 20, 30)
    assert (ours["committed_ratio"], ours["elastic"]) == (1.5, True)
    assert (other["name"], other["grow_us"], other["elastic"]) == ("one_allocation", None, False)


class TestCommand:
    ARGUMENTS = ("experiment=elastic", "pool_mib=32", "chunk_mib=[2,8]", "repeats=2")

    def test_a_run(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}")
        assert outcome.code == 0, outcome.err
        small, large, whole = outcome.metrics["rows"]
        assert [row["name"] for row in (small, large, whole)] == ["octavo", "octavo", "one_allocation"]
        assert [row["chunk_bytes"] for row in (small, large, whole)] == [2 * MIB, 8 * MIB, None]
        assert all(row["rounds"] == 2 and row["elastic"] and row["pool_bytes"] == 32 * MIB for row in (small, whole))
        assert small["base_bytes"] == -(-0.6 * 32 * MIB // PAGE_BYTES) * PAGE_BYTES
        assert small["grow_calls"] > large["grow_calls"] > whole["grow_calls"] == whole["shrink_calls"] == 0
        assert small["committed_bytes_mean"] < whole["committed_bytes_mean"]
        assert whole["committed_bytes_max"] >= 32 * MIB and small["committed_bytes_min"] < 24 * MIB
        taken = [(s["round"], s["item"]) for s in samples(outcome.folder)]
        turns = ("chunks of 2 MiB", "chunks of 8 MiB", "one_allocation")
        assert taken == [(n, item) for n in range(2) for item in turns]
        assert "chunks of 2.10 MB: a growth takes" in outcome.out and "µs to grow" in outcome.out
        assert (outcome.folder / "plots/elastic.png").stat().st_size > 5000

    def test_an_interrupted_run_goes_on(self, octavo: Command, tiny_model: Path) -> None:
        folder = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "limit=1").folder
        file = folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        assert len(lines) == 4
        file.write_text("".join(lines[:3]))
        outcome = octavo(f"resume={folder}")
        assert outcome.code == 0, outcome.err
        assert file.read_text().splitlines(keepends=True)[:3] == lines[:3]
        assert [(s["round"], s["item"]) for s in samples(folder)] == [
            (n, item) for n in range(2) for item in ("chunks of 2 MiB", "one_allocation")
        ]

    def test_a_machine_that_cannot_says_so(self) -> None:
        notes = elastic._fallbacks([sample("c", n, [], [1], reason="no driver") for n in range(2)])
        assert notes == ["Not elastic here, everything was allocated at once: no driver."]

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("pool_mib=0", "pool_mib=0: must be at least 1"),
            ("chunk_mib=[]", "chunk_mib is empty"),
            ("chunk_mib=[0]", "chunk_mib=0: must be at least 1"),
            ("chunk_mib=[8,8]", "chunk_mib lists 8 twice"),
            ("chunk_mib=[64]", "chunk_mib=64: a growth step larger than the pool, pool_mib=32"),
            ("base_share=0", "base_share=0.0: must be more than 0 and at most 1"),
            ("base_share=1.1", "base_share=1.1: must be more than 0 and at most 1"),
            ("repeats=0", "repeats=0: must be at least 1"),
            ("engine.page_tokens=131072", "pool_mib=32: less than a page of this model, which takes"),
        ],
    )
    def test_refusals(self, override: str, message: str, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", override)
        assert outcome.code == 1 and message in outcome.err
