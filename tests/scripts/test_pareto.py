"""Equal bytes for all methods, on a tiny model with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.scripts import benchmarks
from octavo.scripts.schema import TaskSettings

from .conftest import Command, samples

METHODS = (
    "sparse.methods=[dense,streaming,quest,oracle,random]",
    "sparse.overrides={streaming: {dense_layers: []}, quest: {dense_layers: []}, oracle: {dense_layers: [], keep: "
    "{recent_tokens: 16}}, random: {dense_layers: []}}",
)
PUZZLES = (
    "experiment=pareto", "benchmark=ruler", "tasks=[needle_single]", "lengths=[700]", "depths=[0.0,1.0]", "repeats=1",
    "max_new_tokens=6", "levels=[0.3,0.6]", *METHODS,
)  # fmt: skip
NAMES = [f"{name} {level} %" for level in (30, 60) for name in ("streaming", "quest", "oracle", "random")]


def test_all_methods_read_the_same_share(octavo: Command, tiny_model: Path) -> None:
    outcome = octavo(*PUZZLES, f"model.path={tiny_model}")
    assert outcome.code == 0, outcome.err
    rows = {row["method"]: row for row in outcome.metrics["rows"]}
    assert list(rows) == ["dense", *NAMES]
    page_percent = 100 * 16 / 690  # of a method's bytes, at a context of 690 tokens
    for name in NAMES:
        row = rows[name]
        assert row["read_percent"] <= row["level_percent"] < row["read_percent"] + 1.5 * page_percent
        assert row["failed"] == 0 and row["items"] == 2 and "accuracy_vs_dense_ci" in row
        assert row["composition"] == name.split()[0]
    # What quest reads to choose comes out of its budget; what the oracle reads does not.
    assert rows["quest 30 %"]["budget_tokens"] < rows["streaming 30 %"]["budget_tokens"]
    assert rows["oracle 30 %"]["budget_tokens"] == rows["streaming 30 %"]["budget_tokens"]
    assert rows["oracle 30 %"]["digest_bytes_per_token"] > 0.4 * rows["dense"]["kv_bytes_per_token"]
    assert rows["quest 60 %"]["captured_mass_percent"] > rows["quest 30 %"]["captured_mass_percent"]
    assert {file.name for file in (outcome.folder / "plots").iterdir()} == {"pareto.png", "choices.png"}
    again = octavo(f"resume={outcome.folder}")
    assert again.code == 0 and len(samples(again.folder)) == 2 * 9


def test_lines_of_code(octavo: Command, tiny_model: Path, items_file: Path) -> None:
    outcome = octavo(
        "experiment=pareto", f"task.path={items_file}", "task.max_new_tokens=6", "limit=2", "levels=[0.7]", *METHODS,
        f"model.path={tiny_model}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    rows = outcome.metrics["rows"]
    assert [row["method"] for row in rows] == [
        "dense",
        *(f"{m} 70 %" for m in ("streaming", "quest", "oracle", "random")),
    ]
    assert all(row["read_percent"] <= 70 and "edit_similarity" in row for row in rows[1:])


def test_lines_that_are_made_for_a_tokenizer(
    octavo: Command, tiny_model: Path, items_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def made(task: TaskSettings, tokenizer: Any, seed: int) -> list[benchmarks.Item]:
        given.append((tokenizer is not None, task.lengths, seed))
        return benchmarks.load(TaskSettings(path=str(items_file)), 1)

    monkeypatch.setattr(benchmarks, "_project_lines", made)
    outcome = octavo(
        "experiment=pareto", "task=project_lines", "task.lengths=[700]", "task.max_new_tokens=6",
        "levels=[0.7]", "seed=3",
        "sparse.methods=[dense,random]", "sparse.overrides.random.dense_layers=[]", f"model.path={tiny_model}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert given == [(True, [700], 3)] and len(outcome.metrics["rows"]) == 2


def test_what_cannot_read_so_little_fails_and_says_so(octavo: Command, tiny_model: Path) -> None:
    outcome = octavo(*PUZZLES, f"model.path={tiny_model}", "levels=[0.05]", "limit=1")
    assert outcome.code == 0, outcome.err
    errors = [sample for sample in samples(outcome.folder) if "error" in sample]
    assert any(s["method"] == "quest 5 %" and "bytes are too few" in s["error"] for s in errors)
    said = (outcome.folder / "report.html").read_text()
    assert "Not in the table" in said and "quest 5 %" in said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("levels=[0]", "levels=0.0: must be a share"),
        ("levels=[]", "levels is empty"),
        ("budgets=[64]", "leave budgets and sparse.match alone"),
        ("question=sparse", "question=sparse: bytes are those of decoded answers here"),
        ("benchmark=rule", "benchmark=rule: unknown; did you mean 'ruler'?"),
    ],
)
def test_refusals(override: str, message: str, octavo: Command, tiny_model: Path) -> None:
    outcome = octavo(*PUZZLES, f"model.path={tiny_model}", override)
    assert outcome.code == 1 and message in outcome.err
