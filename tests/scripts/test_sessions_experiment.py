"""The sessions experiment: what is counted of turns, forks and producers, on a demo model with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.scripts.experiments.sessions import ANEW, FORK, FOUND, KEPT, PRODUCER, rows

from .conftest import Command, samples

ARGUMENTS = ("experiment=sessions", "conversations=2", "turns=3", "forks=2", "new_tokens=4", "page_map=false")
IMAGE = 16


def test_a_run(octavo: Command, tiny_demo: Path) -> None:
    outcome = octavo(*ARGUMENTS, f"model.path={tiny_demo}")
    assert outcome.code == 0, outcome.err
    found = outcome.metrics["rows"]
    assert [(row["task"], row["policy"]) for row in found] == [
        *((f"turn {turn}", policy) for turn in (1, 2, 3) for policy in (KEPT, FOUND, ANEW)),
        (FORK, KEPT),
        (PRODUCER, KEPT),
    ]
    assert {row["as_anew_percent"] for row in found} == {100.0} and {row["conversations"] for row in found} == {2}
    turns = {(row["task"], row["policy"]): row for row in found}
    for turn in (1, 2, 3):
        kept, cached, anew = (turns[f"turn {turn}", policy] for policy in (KEPT, FOUND, ANEW))
        assert kept["prompt_tokens"] == cached["prompt_tokens"] == anew["prompt_tokens"] == anew["computed_tokens"]
        assert (kept["images_encoded"], cached["images_encoded"], anew["images_encoded"]) == (1, 1, turn)
        assert kept["computed_tokens"] <= cached["computed_tokens"] <= anew["computed_tokens"]
        assert IMAGE < kept["computed_tokens"] < IMAGE + 40 and kept["ttft_p50_ms"] > 0
    fork, made = found[-2:]
    assert fork["fork_units"] == 0 and fork["units_held"] > 0 and fork["own_units"] > 0 and fork["fork_us"] > 0
    assert fork["copies"] >= 1 and fork["computed_tokens"] < IMAGE
    assert made["inserted"] == 1 and made["computed_tokens"] == 1 + IMAGE + 1
    taken = samples(outcome.folder)
    assert [sample["item"] for sample in taken] == ["conversation 0", "conversation 1"]
    assert rows(taken) == found
    assert {file.name for file in (outcome.folder / "plots").iterdir()} == {"sessions.png"}


def test_an_interrupted_run_goes_on(octavo: Command, tiny_demo: Path) -> None:
    first = octavo(*ARGUMENTS, f"model.path={tiny_demo}")
    file = first.folder / "samples.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0])
    assert octavo(f"resume={first.folder}").code == 0
    again = samples(first.folder)
    assert len(again) == 2 and file.read_text().startswith(lines[0])
    assert again[1]["turns"][2][KEPT]["tokens"]


def test_limit_and_page_map(octavo: Command, tiny_demo: Path) -> None:
    outcome = octavo(*ARGUMENTS[:-1], "limit=1", f"model.path={tiny_demo}")
    assert outcome.code == 0 and {row["conversations"] for row in outcome.metrics["rows"]} == {1}
    assert "conversation 0" in (outcome.folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("turns=0", "turns=0: must be at least 1"),
        ("new_tokens=1", "new_tokens=1: must be at least 2"),
        ("forks=0", "forks=0: must be at least 1"),
        ("engine.prefix_cache=false", "this experiment compares sessions with what the cache finds"),
        ("turns=40", "turns=40: at up to 60 tokens a turn, and one more after a fork, that is more than the 1024"),
    ],
)
def test_refusals(override: str, message: str, octavo: Command, tiny_demo: Path) -> None:
    outcome = octavo(*ARGUMENTS, f"model.path={tiny_demo}", override)
    assert outcome.code == 1 and message in outcome.err
