"""Requests at once, dense and with heads that keep different numbers of tokens: the command and its rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Command, samples

ARGUMENTS = (
    "experiment=heads", "requests=8", "prompt_tokens=128", "new_tokens=12", "pool_requests=3", "engine.step_tokens=128",
    "sparse.budget_tokens=40", "sparse.methods=[dense,snapkv,duo_attention]",
    "sparse.overrides={snapkv: {keep: {recent_tokens: 16}, scorer: {window: 16}}, "
    "duo_attention: {keep: {sink_tokens: 16, recent_tokens: 16}, retrieval_share: 0.25}}",
)  # fmt: skip


def test_a_run(octavo: Command, tiny_model: Path) -> None:
    outcome = octavo(*ARGUMENTS, f"model.path={tiny_model}")
    assert outcome.code == 0, outcome.err
    found = {row["method"]: row for row in json.loads((outcome.folder / "metrics.json").read_text())["rows"]}
    assert list(found) == ["dense", "snapkv", "duo_attention"]
    assert found["dense"]["decoding_peak"] <= 3 and found["dense"]["admission_ratio"] == 1.0
    for name in ("snapkv", "duo_attention"):
        assert found[name]["decoding_peak"] > found["dense"]["decoding_peak"]
        assert found[name]["admission_ratio"] > 1 and found[name]["steps"] < found["dense"]["steps"]
        assert found[name]["units_held_peak"] <= found[name]["pool_units"] == 3 * 9
    assert found["snapkv"]["runs_used_percent"] == 100.0, "equal heads leave no part of a unit over"
    assert len(samples(outcome.folder)) == 3 and (outcome.folder / "plots" / "heads.png").is_file()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("requests=0", "requests=0: must be at least 1"),
        ("engine.pool_tokens=512", "engine.pool_tokens: the pool is set by pool_requests"),
        ("prompt_tokens=4096", "the model's sequences have at most 1024"),
        ("sparse.budget_tokens=8", "the budget is 8"),
    ],
)
def test_refusals(override: str, message: str, octavo: Command, tiny_model: Path) -> None:
    outcome = octavo(*ARGUMENTS, f"model.path={tiny_model}", override)
    assert outcome.code == 1 and message in outcome.err
