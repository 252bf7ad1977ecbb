"""Drafts that are verified: how many are right on documents, and what forced ones are worth in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.outputs import Sample
from octavo.scripts.experiments import lossless
from octavo.scripts.lossless_timing import predicted_speed_up, rows

from .conftest import Command, samples

METHODS = (
    "sparse.methods=[quest,streaming]", "sparse.budget_tokens=128",
    "sparse.overrides={streaming: {dense_layers: []}, quest: {dense_layers: []}}",
)  # fmt: skip


class TestOnDocuments:
    ARGUMENTS = (
        "experiment=lossless", "contexts=[300,600]", "documents=2", "drafts=[2,3]", "new_tokens=24", *METHODS
    )  # fmt: skip

    def test_a_run(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "model.dtype=fp32")
        assert outcome.code == 0, outcome.err
        found = outcome.metrics["rows"]
        names = ["dense", "quest x 2", "streaming x 2", "quest x 3", "streaming x 3"]
        assert sorted((row["task"], row["length"], row["method"]) for row in found) == sorted(
            (task, length, name) for task in ("code", "text") for length in (300, 600) for name in names
        )
        for row in found:
            assert row["items"] == 2 and row["failed"] == 0
            if row["method"] == "dense":
                assert "acceptance" not in row and "drafted" not in row
                continue
            assert row["tokens_equal_percent"] == 100.0 and row["margin_nats_max"] is None
            assert row["acceptance_ci"][0] <= row["acceptance"] <= row["acceptance_ci"][1] <= 100
            assert 1 <= row["tokens_per_round"] <= 1 + int(row["method"][-1])
            assert row["bytes_ratio"] > 0 and row["kv_bytes_per_token"] > 0
        for sample in samples(outcome.folder):
            if sample["method"] != "dense":
                assert sample["accepted"] + sample["verifications"] in (22, 23)  # the last token may be alone
        assert {file.name for file in (outcome.folder / "plots").iterdir()} == {"acceptance.png"}

    def test_an_interrupted_run_goes_on(self, octavo: Command, tiny_model: Path) -> None:
        first = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "limit=2")
        file = first.folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:7]))
        assert octavo(f"resume={first.folder}").code == 0
        again = samples(first.folder)
        assert [(s["item"], s["method"]) for s in again] == [(s["item"], s["method"]) for s in samples(first.folder)]
        assert len(again) == len(lines) == 10

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("drafts=[]", "drafts is empty"),
            ("drafts=[0]", "drafts"),
            ("contexts=[4,4]", "contexts lists 4 twice"),
            ("forced=[1.5]", "forced=1.5: must be a probability, 0 to 1"),
            ("shapes=[[4]]", "each is [sequences, context]"),
            ("contexts=[1000]", "contexts + new_tokens"),
        ],
    )
    def test_what_makes_no_sense_is_refused(
        self, octavo: Command, tiny_model: Path, override: str, message: str
    ) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "new_tokens=64", override)
        assert outcome.code == 1 and message in outcome.err


class TestOnRandomWeights:
    def test_a_run(self, octavo: Command) -> None:
        outcome = octavo(
            "experiment=lossless", "model=random", "model.shape=tiny", "shapes=[[2,300]]", "rounds=2", "new_tokens=24",
            "forced=[0.0,1.0]", "drafts=[3]", "sparse.methods=[streaming]", "sparse.budget_tokens=128",
            "sparse.overrides.streaming.dense_layers=[0]",
        )  # fmt: skip
        assert outcome.code == 0, outcome.err
        dense, alone, never, always = outcome.metrics["rows"]
        assert [row["method"] for row in (dense, alone, never, always)] == ["dense", *["streaming"] * 3]
        assert [row["forced_acceptance"] for row in (dense, alone, never, always)] == [None, None, 0.0, 1.0]
        assert dense["speed_up"] == 1.0 and "predicted_speed_up" not in alone
        assert (never["acceptance_percent"], always["acceptance_percent"]) == (0.0, 100.0)
        assert all(row["rounds"] == 2 and row["tokens_per_s"] > 0 for row in (dense, alone, never, always))
        assert {file.name for file in (outcome.folder / "plots").iterdir()} == {"speed_up.png"}

    def test_a_sequence_longer_than_the_model(self, octavo: Command) -> None:
        outcome = octavo("experiment=lossless", "model=random", "model.shape=tiny", "shapes=[[2,2040]]",
                         "sparse.methods=[streaming]", "sparse.overrides.streaming.dense_layers=[0]")  # fmt: skip
        assert outcome.code == 1 and "longer than the model's 2048 positions" in outcome.err


def test_rows_of_times() -> None:
    def sample(contender: str, method: str, seconds: float, number: int, drafts: int = 0) -> dict[str, object]:
        return {
            "item": "shape", "contender": contender, "round": number, "method": method, "drafts": drafts, "batch": 2,
            "forced_acceptance": 0.5 if drafts else None, "tokens": 100, "seconds": seconds, "accepted": drafts,
            "rejected": drafts, "device_bytes_peak": None,
        }  # fmt: skip

    found = rows(
        [
            *(sample("dense", "dense", seconds, n) for n, seconds in enumerate((1.0, 2.0, 9.0))),
            *(sample("quest", "quest", 1.0, n) for n in range(3)),
            *(sample("quest x 2 at 0.5", "quest", 1.6, n, 2) for n in range(3)),
        ]
    )
    assert [row["tokens_per_s"] for row in found] == [50.0, 100.0, 62.5]
    assert [row["ms_per_token"] for row in found] == [40.0, 20.0, 32.0]
    assert [row["speed_up"] for row in found] == [1.0, 2.0, 1.25]
    assert found[2]["predicted_speed_up"] == (1 + 0.5 + 0.25) / (2 * 0.5 + 1) and found[2]["acceptance_percent"] == 50


def test_predicted_speed_up() -> None:
    assert predicted_speed_up(1.0, 3, 0.5) == 4 / 2.5
    assert predicted_speed_up(0.0, 3, 0.5) == 1 / 2.5
    assert predicted_speed_up(0.9, 3, 0.44) == pytest.approx(3.439 / 2.32)


def test_margins() -> None:
    dense = Sample([4, 5, 6], "", "length", [{4: -0.1, 1: -3.0}, {5: -0.5, 2: -0.75}, {6: -0.1, 1: -2.0}])
    assert lossless._margin([4, 5, 6], dense) is None
    assert lossless._margin([4, 2, 6], dense) == 0.25


def test_somebody_must_draft(octavo: Command) -> None:
    outcome = octavo("experiment=lossless", "sparse.methods=[dense]")
    assert outcome.code == 1 and "nobody drafts" in outcome.err


def test_who_cannot_draft(octavo: Command) -> None:
    outcome = octavo("experiment=lossless", "sparse.methods=[snapkv]")
    assert outcome.code == 1 and "sparse.methods: draft='snapkv' drops tokens" in outcome.err
    assert "Traceback" not in outcome.err
