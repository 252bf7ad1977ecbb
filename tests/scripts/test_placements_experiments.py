"""Hits in frames, and placements side by side, on a tiny model with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.scripts.experiments import host_tier, placements
from octavo.sparse.host_placement import PREFETCHES

from .conftest import Command, Outcome, samples

SMALL = (
    "sparse.overrides.quest.dense_layers=[]", "sparse.budget_tokens=160", "slack_tokens=32", "context_tokens=500",
    "new_tokens=8", "kinds=[text]", "model.dtype=fp32",
)  # fmt: skip


class TestHostTier:
    ARGUMENTS = ("experiment=host_tier", "page_sizes=[16]", "replacements=[lru,clock]", "requests=2", *SMALL)

    def test_a_run(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}")
        assert outcome.code == 0, outcome.err
        rows = outcome.metrics["rows"]
        assert [(row["prefetch"], row["replacement"]) for row in rows] == [
            (prefetch, policy) for prefetch in PREFETCHES for policy in ("lru", "clock")
        ]
        for row in rows:
            assert row["agreeing_percent"] == 100 and row["frames"] == 12 and row["page_tokens"] == 16
            assert row["lookups"] > row["misses"] > 0 and 0 < row["first_percent"] < 100
            assert row["fetched_bytes_per_token"] > 0 and 0 < row["waited_percent"] < 100
            assert row["replayed_hit_rate_percent"] <= row["belady_hit_rate_percent"]
            if row["prefetch"] == "none":
                assert row["hit_rate_percent"] == row["replayed_hit_rate_percent"]
                assert row["prefetched_percent"] == row["useless_bytes_per_token"] == 0
            else:
                useful = row["prefetched_percent"] * row["prefetch_accuracy_percent"] / 100
                in_vain = row["fetched_bytes_per_token"] * (row["prefetched_percent"] - useful) / 100
                assert row["useless_bytes_per_token"] == pytest.approx(in_vain) and 0 < useful < 100
            assert (row["prefetch_scoring_bytes_per_token"] > 0) is (row["prefetch"] == "next_query")
            assert row["host_bytes_held_decoding"] > 0
        assert (outcome.folder / "plots/host_tier.png").stat().st_size > 5000
        assert "the bound on demand is" in outcome.out and "belady %" in outcome.out

    def test_an_interrupted_run_goes_on(self, octavo: Command, tiny_model: Path) -> None:
        def rows(outcome: Outcome) -> list[tuple[object, ...]]:
            assert outcome.code == 0, outcome.err
            timed = ("seconds", "waited_percent")
            return [tuple(v for k, v in row.items() if k not in timed) for row in outcome.metrics["rows"]]

        first = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "prefetches=[none]", "limit=1")
        before, file = rows(first), first.folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:2]))
        assert rows(octavo(f"resume={first.folder}")) == before
        assert file.read_text().splitlines(keepends=True)[:2] == lines[:2]
        assert len(samples(first.folder)) == len(lines) == 3

    def test_prompts_that_all_stay_are_refused(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "context_tokens=100")
        assert outcome.code == 1
        assert (
            "context_tokens=100: no page of these prompts leaves the device under sparse.budget_tokens=160"
            in outcome.err
        )

    def test_rows(self) -> None:
        recorded = {
            "item": "16", "prefetch": "recorded", "replacement": "recorded", "frames": 5, "lookups": 10, "first": 2,
            "belady_misses": 3, "replayed_misses": {"lru": 4}, "tokens": [[1, 2, 3, 4]],
        }  # fmt: skip
        served = {
            "item": "16", "prefetch": "next_query", "replacement": "lru", "lookups": 10, "misses": 4,
            "prefetched": 4, "prefetched_read": 1, "prefetch_scoring_bytes_read": 30,
            "tokens": [[1, 2, 3, 5]], "decode_steps": 3, "host_bytes_read": 1200, "kv_bytes_read": 900,
            "units_held_decoding": 7, "host_units_pinned": 9, "unit_bytes": 10, "decoding_seconds": 2.0,
            "waited_seconds": 0.5, "seconds": 4.0,
        }  # fmt: skip
        (row,) = host_tier.rows([recorded, served])
        assert row == {
            "name": "octavo", "page_tokens": 16, "replacement": "lru", "prefetch": "next_query", "frames": 5,
            "hit_rate_percent": 60.0, "replayed_hit_rate_percent": 60.0, "belady_hit_rate_percent": 70.0,
            "first_percent": 20.0, "lookups": 10, "misses": 4, "prefetched_percent": 50.0,
            "prefetch_accuracy_percent": 25.0, "useless_bytes_per_token": 150.0,
            "prefetch_scoring_bytes_per_token": 10.0, "fetched_bytes_per_token": 400.0,
            "kv_bytes_per_token": 300.0, "waited_percent": 25.0, "agreeing_percent": 75.0,
            "kv_bytes_held_decoding": 70, "host_bytes_held_decoding": 90, "seconds": 4.0,
        }  # fmt: skip
        assert host_tier.findings([row]) == [
            "pages of 16: lru with prefetch next_query finds 60.0 % on the device and fetches 400 B a token, 150 B of "
            "them in vain; the bound on demand is 70.0 %"
        ]


class TestPlacements:
    ARGUMENTS = ("experiment=placements", "requests=4", "pool_requests=1", *SMALL)

    def test_a_run(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "pool_requests=3")
        assert outcome.code == 0, outcome.err
        resident, host = outcome.metrics["rows"]
        assert (resident["policy"], host["policy"]) == ("resident", "host")
        assert resident["requests"] == host["requests"] == resident["same_requests"] == host["same_requests"] == 4
        assert resident["kv_bytes_per_token"] == host["kv_bytes_per_token"] > 0
        assert resident["fetched_bytes_per_token"] == resident["host_bytes_held_decoding"] == 0
        assert host["fetched_bytes_per_token"] > 0 and host["host_bytes_held_decoding"] > 0
        assert host["running_peak"] > resident["running_peak"]
        assert (outcome.folder / "plots/placements.png").stat().st_size > 5000
        assert "4 write the tokens of resident" in outcome.out

    def test_random_weights_get_random_tokens(self, octavo: Command) -> None:
        random = ("model=random", "model.shape=tiny", "placements=[host]", "pool_requests=1.5")
        outcome = octavo(*self.ARGUMENTS, *random)
        assert outcome.code == 0, outcome.err
        (host,) = outcome.metrics["rows"]
        assert host["requests"] == 4 and host["fetched_bytes_per_token"] > 0
        (sample,) = samples(outcome.folder)
        assert all(len(tokens) == 8 for tokens in sample["tokens"])

    def test_one_alone_compares_with_nothing(self) -> None:
        sample = {
            "placement": "host", "tokens": [[1]], "decode_steps": 1, "host_bytes_read": 2, "kv_bytes_read": 3,
            "units_held_decoding": 4, "host_units_pinned": 5, "unit_bytes": 6, "running_peak": 1, "preemptions": 0,
            "seconds": 1.0, "decoding_seconds": 0.5, "decoded_tokens": 4, "waited_seconds": 0.1,
        }  # fmt: skip
        (row,) = placements.rows([sample])
        assert "same_requests" not in row and row["tokens_per_s"] == 8 and row["waited_percent"] == 20


REFUSALS = {
    "host_tier replacements=[lru,lur]": "replacements=lur: unknown; did you mean 'lru'?",
    "host_tier page_sizes=[]": "page_sizes is empty; give at least one, as in page_sizes=[16]",
    "host_tier engine.page_tokens=32": "engine.page_tokens=32: this experiment tries page_sizes=[16,32]",
    "host_tier slack_tokens=0": "prefetches=previous_step: fetches into the slack, and slack_tokens=0 leaves none",
    "placements engine.host_tokens=64": "engine.host_tokens=64: this experiment sets it itself",
    "placements placements=[host,hots]": "placements=hots: unknown; did you mean 'host'?",
    "placements sparse.methods=[quest,knorm]": "this experiment places the pages of one method, as in sparse.methods=[",
    "host_tier engine.prefix_cache=false": "pages in host memory are found by their keys; leave it out",
    "placements engine.prefix_cache=false": "found by their keys; leave it out",
    "placements new_tokens=2": "new_tokens=2: must be at least 3",
}


@pytest.mark.parametrize("arguments", REFUSALS)
def test_refusals(arguments: str, octavo: Command) -> None:
    outcome = octavo(*f"experiment={arguments}".split())
    assert outcome.code == 1 and REFUSALS[arguments] in outcome.err


ORACLE = ("sparse.methods=[oracle]", "sparse.overrides={oracle: {dense_layers: []}}")


def test_a_method_that_reads_all_keys_is_refused(octavo: Command, tiny_model: Path) -> None:
    outcome = octavo("experiment=placements", *SMALL[1:], f"model.path={tiny_model}", "placements=[host]", *ORACLE)
    assert outcome.code == 1 and "reads keys of all pages to choose" in outcome.err


def test_a_method_that_chooses_nothing_is_said(octavo: Command) -> None:
    outcome = octavo(
        "experiment=placements", *SMALL[1:], "model=random", "model.shape=tiny", "requests=1", "placements=[resident]"
    )
    assert outcome.code == 0, outcome.err
    said = (outcome.folder / "run.log").read_text()
    assert "quest chooses nothing: none of the 2 layers of LlamaForCausalLM" in said
