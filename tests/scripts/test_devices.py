"""Two devices against each other: what counts as the same, as a near tie, and as a mismatch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.scripts.experiments import devices
from octavo.scripts.experiments.devices import Place, compare
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema import TaskSettings

from .conftest import Command, samples

HERE = "devices=[cpu:cpu,cpu:reference]"


def entries(*gaps: float) -> list[dict[int, float]]:
    """Positions whose two most likely tokens, 0 and 1, are so far apart."""
    return [{0: -1.0, 1: -1.0 - gap} for gap in gaps]


def test_equal_tokens_are_identical() -> None:
    verdict = compare([[0, 0], [0, 0]], [entries(1, 1), [{0: -1.25, 1: -2.0}, *entries(1)]], 1e-3)
    assert verdict == {"outcome": "identical", "equal_tokens": 2, "logprob_difference_max": 0.25}


@pytest.mark.parametrize(
    ("gaps", "outcome"),
    [((0.0005, 0.0008), "near_tie"), ((0.0005, 0.5), "mismatch"), ((0.5, 0.0005), "mismatch"), ((2, 2), "mismatch")],
)
def test_the_first_difference_decides_by_both_gaps(gaps: tuple[float, float], outcome: str) -> None:
    logprobs = [entries(1, gap, 1) for gap in gaps]
    verdict = compare([[0, 0, 0], [0, 1, 1]], logprobs, 1e-3)
    assert verdict["outcome"] == outcome
    assert (verdict["equal_tokens"], verdict["first_difference"]) == (1, 1)
    assert verdict["top_two_gaps"] == pytest.approx(gaps)


def test_a_third_entry_does_not_count() -> None:
    assert devices._gap({5: -3.0, 6: -1.0, 7: -1.5}) == 0.5


def test_places() -> None:
    assert Place.parse("cpu") == Place("cpu", "auto")
    assert Place.parse("cpu:reference") == Place("cpu", "reference")
    with pytest.raises(ConfigError, match=r"devices: cpu:refrence=refrence: unknown; did you mean 'reference'\?"):
        Place.parse("cpu:refrence")
    with pytest.raises(ConfigError, match=r"devices: warp"):
        Place.parse("warp")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is for machines without CUDA")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"devices: cuda:1: .+"):
        Place.parse("cuda:1")


def test_two_sets_of_kernels_agree(octavo: Command, tiny: list[str]) -> None:
    outcome = octavo("experiment=devices", HERE, "limit=3", *tiny)
    assert outcome.code == 0, outcome.err
    found = outcome.metrics["rows"]
    assert [r["method"] for r in found] == ["dense", "streaming", "quest"]
    for row in found:
        assert row["devices"] == "cpu:cpu and cpu:reference"
        assert (row["items"], row["failed"], row["mismatches"]) == (3, 0, 0)
        assert row["identical"] + row["near_ties"] == 3
        assert 0 <= row["logprob_difference_max"] < 1e-3
    assert "dense: 3 items, 3 identical, 0 near ties, 0 mismatches" in outcome.out
    taken = samples(outcome.folder)
    assert len(taken) == 9 and all(len(side) == 6 for s in taken for side in s["token_ids"])


def test_the_reference_pair_is_small_unless_told() -> None:
    assert devices._small(TaskSettings()) == TaskSettings(max_prompt_tokens=800, max_new_tokens=8)
    assert devices._small(TaskSettings(max_prompt_tokens=900)) == TaskSettings(max_prompt_tokens=900)


def test_a_mismatch_ends_the_run_badly_after_all_rows(
    octavo: Command, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines_of = devices._engines

    def broken(*arguments: Any) -> Any:
        """The second engine's model has another output layer."""
        import copy

        engines, tokenizer = engines_of(*arguments)
        hf = engines[1]._model
        hf.model = copy.deepcopy(hf.model)
        hf._configs = [hf.model.config]
        with torch.no_grad():
            hf.model.lm_head.weight.neg_()
        return engines, tokenizer

    monkeypatch.setattr(devices, "_engines", broken)
    outcome = octavo("experiment=devices", HERE, "limit=2", *tiny)
    assert outcome.code == 1
    assert outcome.metrics["complete"] is True
    assert [r["mismatches"] for r in outcome.metrics["rows"]] == [2, 2, 2]
    assert "cpu:cpu and cpu:reference differ in 6 cases that are no near ties" in outcome.err
    first = samples(outcome.folder)[0]
    assert first["outcome"] == "mismatch" and len(first["top_two_gaps"]) == 2


def test_an_interrupted_run_goes_on(octavo: Command, tiny: list[str]) -> None:
    folder = octavo("experiment=devices", HERE, "limit=3", *tiny).folder
    file = folder / "samples.jsonl"
    whole = file.read_text()
    file.write_text("".join(whole.splitlines(keepends=True)[:4]))
    assert octavo(f"resume={folder}").code == 0
    assert [(s["item"], s["method"], s["token_ids"]) for s in samples(folder)] == [
        (s["item"], s["method"], s["token_ids"]) for s in map(json.loads, whole.splitlines())
    ]


def test_an_item_that_is_too_long_is_recorded(octavo: Command, tiny: list[str]) -> None:
    outcome = octavo("experiment=devices", HERE, "limit=2", *tiny, "task.max_prompt_tokens=20")
    assert outcome.code == 0, outcome.err
    assert all(row["items"] == 0 and row["failed"] == 2 for row in outcome.metrics["rows"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("devices=[cpu]", "two are compared"),
        ("devices=[cpu,cpu:refrence]", "did you mean 'reference'?"),
        ("model.device=cuda", "takes both from devices"),
        ("engine.backend=cpu", "takes both from devices"),
        ("near_tie_nats=-1", "near_tie_nats=-1.0: must be at least 0"),
    ],
)
def test_refusals(override: str, message: str, octavo: Command, tiny_model: Path) -> None:
    outcome = octavo("experiment=devices", f"model.path={tiny_model}", override)
    assert outcome.code == 1 and message in outcome.err
