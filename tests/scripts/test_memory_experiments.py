"""Eviction, fragmentation and concurrency: rows, commands, resumption and refusals, all without a model."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.scripts.experiments import concurrency, eviction, fragmentation
from octavo.scripts.schema_memory import EVICTIONS, MIXES, TRACES

from .conftest import Command, Outcome, samples


class TestEviction:
    ARGUMENTS = ("experiment=eviction", "traces=[chat,bursty]", "cache_percent=[10,100]", "requests=20")
    QUICK = (*ARGUMENTS, "traces=[bursty]", "evictions=[lru,belady]")

    def test_rows(self) -> None:
        def sample(name: str, found: int, **more: Any) -> dict[str, Any]:
            return {"item": "t", "cache_percent": 5, "eviction": name, "pool_tokens": 64, "hit_tokens": found,
                    "hit_rate_percent": float(found), "evictions": 2, "failures": 1, **more}  # fmt: skip

        small, large = eviction.rows(
            [sample("lru", 3), sample("fifo", 4), sample("belady", 5), sample("lru", 9, cache_percent=9)]
        )
        assert small == {
            "name": "replay", "task": "t", "cache_percent": 5, "pool_tokens": 64, "lru_hit_rate_percent": 3.0,
            "fifo_hit_rate_percent": 4.0, "belady_hit_rate_percent": 5.0, "best": "fifo", "evictions": 6, "failures": 3,
        }  # fmt: skip
        assert (large["cache_percent"], large["best"]) == (9, "lru")
        assert eviction.findings([small], ["lru", "belady"]) == ["t: belady 5.0 %, lru 3.0 %"]

    def test_a_run(self, octavo: Command) -> None:
        outcome = octavo(*self.ARGUMENTS)
        assert outcome.code == 0, outcome.err
        rows = outcome.metrics["rows"]
        assert [(row["task"], row["cache_percent"]) for row in rows] == [
            ("chat", 10), ("chat", 100), ("bursty", 10), ("bursty", 100),
        ]  # fmt: skip
        for row in rows:
            rates = [row[f"{name}_hit_rate_percent"] for name in EVICTIONS]
            assert max(rates) == row["belady_hit_rate_percent"] > 0
            if row["cache_percent"] == 100:
                assert row["evictions"] == row["failures"] == 0 and len(set(rates)) == 1
            else:
                assert row["evictions"] > 0 and len(set(rates)) > 1
        assert (outcome.folder / "plots/eviction.png").stat().st_size > 5000
        assert "bursty: belady" in outcome.out and "belady %" in outcome.out

    def test_a_limit_takes_the_first_traces(self, octavo: Command) -> None:
        outcome = octavo("experiment=eviction", "limit=1", "evictions=[lru]", "cache_percent=[0]", "requests=1")
        assert [row["task"] for row in outcome.metrics["rows"]] == ["main_job"] == [TRACES[0]]


class TestFragmentation:
    ARGUMENTS = ("experiment=fragmentation", "mixes=[mixed]", "page_sizes=[8,16]", "limit=4")
    QUICK = ARGUMENTS

    def test_a_run(self, octavo: Command) -> None:
        outcome = octavo(*self.ARGUMENTS)
        assert outcome.code == 0, outcome.err
        rows = outcome.metrics["rows"]
        assert [(row["name"], row["policy"], row["page_tokens"]) for row in rows] == [
            ("contiguous", "longest", None), ("contiguous", "power of two", None),
            ("contiguous", "final length", None), ("octavo", "paged", 8), ("octavo", "paged", 16),
        ]  # fmt: skip
        longest, power, final, small, large = rows
        assert all(row["requests"] == 40 for row in rows)
        assert longest["waste_percent"] > power["waste_percent"] > final["waste_percent"] > large["waste_percent"]
        assert large["waste_percent"] > small["waste_percent"] > 0
        assert longest["largest_batch"] == 65536 // 2048 and longest["batch_ratio"] == 1
        assert large["batch_ratio"] == large["largest_batch"] / 32 > 2
        for row in (small, large):
            assert row["waste_percent"] == row["predicted_waste_percent"]
        assert "mixed: reservations waste" in outcome.out and "the batch fits" in outcome.out
        assert (outcome.folder / "plots/fragmentation.png").stat().st_size > 5000

    @pytest.mark.parametrize("mix", MIXES)
    def test_pages_of_16_use_96_percent(self, mix: str) -> None:
        config = fragmentation.Fragmentation("fragmentation", requests=60)
        found = fragmentation.paged(fragmentation.traffic(mix, config), 16, config)
        assert found["utilisation_percent"] >= 96
        assert found["waste_slot_steps"] == found["predicted_waste_slot_steps"] > 0


class TestConcurrency:
    ARGUMENTS = ("experiment=concurrency", "mixes=[mixed,chat]", "memory_tokens=[4096]", "requests=60")
    QUICK = ARGUMENTS

    def test_a_run(self, octavo: Command) -> None:
        outcome = octavo(*self.ARGUMENTS)
        assert outcome.code == 0, outcome.err
        rows = outcome.metrics["rows"]
        assert [row["policy"] for row in rows] == ["longest", "power of two", "final length", "paged"] * 2
        for longest, power, final, paged in (rows[:4], rows[4:]):
            assert longest["running_mean"] == longest["running_peak"] == 2 and longest["running_ratio"] == 1
            assert longest["used_percent"] < power["used_percent"] < final["used_percent"] < paged["used_percent"] < 100
            assert paged["running_ratio"] == paged["running_mean"] / 2 > 2 and paged["page_tokens"] == 16
        assert "mixed, 4,096 slots:" in outcome.out and "memory used %" in outcome.out
        assert (outcome.folder / "plots/concurrency.png").stat().st_size > 5000

    def test_too_few_requests_are_refused(self, octavo: Command) -> None:
        outcome = octavo(*self.ARGUMENTS, "requests=3", "memory_tokens=[65536]")
        assert outcome.code == 1 and "requests=3: all 3 requests fit at once into 65536 slots" in outcome.err


@pytest.mark.parametrize("case", [TestEviction, TestFragmentation, TestConcurrency])
def test_an_interrupted_run_goes_on(case: Any, octavo: Command) -> None:
    def rows(outcome: Outcome) -> Any:
        assert outcome.code == 0, outcome.err
        return outcome.metrics["rows"]

    whole = octavo(*case.QUICK)
    before, file = rows(whole), whole.folder / "samples.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]))
    assert rows(octavo(f"resume={whole.folder}")) == before
    assert file.read_text().splitlines(keepends=True) == lines
    assert len(samples(whole.folder)) == len(lines) > 3


REFUSALS = {
    "eviction traces=[chats]": "traces=chats: unknown; did you mean 'chat'?",
    "eviction evictions=[lru,lur]": "evictions=lur: unknown; did you mean 'lru'?",
    "eviction evictions=[]": "evictions is empty; give at least one, as in evictions=[lru]",
    "eviction traces=[chat,chat]": "traces lists chat twice",
    "eviction cache_percent=[101]": "cache_percent=101: must be between 0 and 100",
    "eviction engine.eviction=lfu": "engine.eviction=lfu: no engine runs in this experiment; of its keys it takes",
    "fragmentation page_sizes=[0]": "page_sizes=0: must be at least 1",
    "fragmentation mixes=[chat,mix]": "mixes=mix: unknown; did you mean 'mixed'?",
    "fragmentation engine.page_tokens=32": "engine.page_tokens=32: no engine runs",
    "fragmentation memory_tokens=100": "memory_tokens=100: must be at least 2048",
    "fragmentation longest=8": "longest=8: must be at least 64",
    "concurrency memory_tokens=[]": "memory_tokens is empty",
    "concurrency memory_tokens=[4096,1024]": "memory_tokens=1024: must be at least 2048",
    "concurrency requests=1": "requests=1: must be at least 2",
}


@pytest.mark.parametrize("arguments", REFUSALS)
def test_refusals(arguments: str, octavo: Command) -> None:
    outcome = octavo(*f"experiment={arguments}".split())
    assert outcome.code == 1 and REFUSALS[arguments] in outcome.err


def test_a_backlog_is_drawn_from_the_seed() -> None:
    config = concurrency.Concurrency("concurrency", requests=5)
    assert concurrency.backlog("chat", config) == concurrency.backlog("chat", config)
    assert all(request.total <= config.longest for request in concurrency.backlog("mixed", config))
