"""Runs side by side: what is paired with what, what the differences are, and which runs do not match."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Command, samples


def write_run(folder: Path, scores: dict[str, list[float]], experiment: str = "ruler", **more: Any) -> Path:
    """A run of ``ruler`` with accuracies by method, an item each."""
    folder.mkdir()
    about = {"task": "needle", "length": 100, "depth": 0.5, "answers": ["7"]}
    lines = [
        {
            "item": f"needle/{number}", "method": method, "accuracy": score, **about, "prompt_tokens": 90,
            "decode_steps": 4, "new_tokens": 5, "seconds": 1.0, "units_held_peak": 3, "device_bytes_peak": 9,
            "kv_bytes_read": 40, "digest_bytes_read": 4, **more,
        }
        for method, values in scores.items()
        for number, score in enumerate(values)
    ]  # fmt: skip
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics.json").write_text(json.dumps({"experiment": experiment, "complete": True, "rows": []}))
    (folder / "config.yaml").write_text(f"experiment: {experiment}\nmodel: {{path: /no/longer/there}}\nseed: 3\n")
    return folder


def test_the_same_method_is_paired_item_by_item(octavo: Command, tmp_path: Path) -> None:
    one = write_run(tmp_path / "one run", {"dense": [100, 100, 50], "quest": [0, 100, 50]})
    two = write_run(tmp_path / "two", {"quest": [100, 100, 80], "streaming": [0, 0]})
    outcome = octavo("compare", str(one), str(two))
    assert outcome.code == 0, outcome.err
    assert outcome.metrics["experiment"] == "compare" and outcome.metrics["complete"]
    rows = {(row["name"], row["method"]): row for row in outcome.metrics["rows"]}
    assert rows.keys() == {("A", "dense"), ("A", "quest"), ("B", "quest"), ("B", "streaming")}
    quest = rows["B", "quest"]
    assert quest["against"] == "A quest" and quest["pairs"] == 3
    assert quest["accuracy"] == pytest.approx(280 / 3) and quest["accuracy_vs_first"] == pytest.approx(130 / 3)
    low, high = quest["accuracy_vs_first_ci"]
    assert 0 <= low < 130 / 3 < high <= 100
    assert quest["kv_bytes_per_token"] == 10
    streaming = rows["B", "streaming"]  # the first run has none: its first method, on the items that both have
    assert streaming["against"] == "A dense" and streaming["pairs"] == 2 and streaming["accuracy_vs_first"] == -100
    assert "accuracy_vs_first" not in rows["A", "quest"]
    taken = samples(outcome.folder)
    assert [(s["method"], s["item"]) for s in taken] == [
        ("quest", "needle/0"), ("quest", "needle/1"), ("quest", "needle/2"), ("streaming", "needle/0"),
        ("streaming", "needle/1"),
    ]  # fmt: skip
    assert taken[0]["scores"] == {"accuracy": 100} and taken[0]["first"] == {"accuracy": 0}
    report = (outcome.folder / "report.html").read_text()
    assert "one run" in report and report.count("data:image/png;base64,") == 1


def test_only_items_of_all_runs_count(octavo: Command, tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", {"dense": [100, 0, 0, 0]})
    two = write_run(tmp_path / "two", {"dense": [0, 0]})
    first, second = octavo("compare", str(one), str(two)).metrics["rows"]
    assert (first["items"], first["accuracy"], second["accuracy_vs_first"]) == (2, 50, -50)
    (only, _) = octavo("compare", str(one), str(two), "limit=1").metrics["rows"]
    assert (only["items"], only["accuracy"]) == (1, 100)


def test_real_runs_and_what_differs_in_their_settings(octavo: Command, tiny: list[str]) -> None:
    folders = [octavo(*tiny, "limit=2", f"sparse.budget_tokens={tokens}").folder for tokens in (128, 256)]
    outcome = octavo("compare", *map(str, folders))
    assert outcome.code == 0, outcome.err
    rows = outcome.metrics["rows"]
    assert [(row["method"], row["name"]) for row in rows] == [
        (method, name) for method in ("dense", "streaming", "quest") for name in "AB"
    ]
    dense = rows[1]
    assert dense["edit_similarity_vs_first"] == 0 and dense["edit_similarity_vs_first_ci"] == [0, 0]
    assert dense["exact_match_vs_first"] == 0 and dense["mcnemar_p"] == 1
    assert dense["gold_log_likelihood_per_token_vs_first"] == pytest.approx(0, abs=1e-5)
    assert rows[3]["kv_bytes_per_token"] > rows[2]["kv_bytes_per_token"]
    assert "sparse.budget_tokens" in outcome.out and "256" in outcome.out
    again = octavo(f"resume={outcome.folder}")
    assert again.code == 0 and len(samples(again.folder)) == 6


def test_turns_are_tasks(octavo: Command, tmp_path: Path) -> None:
    folders = []
    for name, last in (("one", 100.0), ("two", 0.0)):
        turns = [{"task": "turn 1", "accuracy": 100.0}, {"task": "turn 2", "accuracy": last}]
        folders.append(write_run(tmp_path / name, {"quest": [50, 50]}, "multi_turn", turns=turns))
    rows = octavo("compare", *map(str, folders)).metrics["rows"]
    found = {(row["task"], row["name"]): row.get("accuracy_vs_first") for row in rows}
    assert found == {("turn 1", "A"): None, ("turn 1", "B"): 0, ("turn 2", "A"): None, ("turn 2", "B"): -100}


def test_runs_that_do_not_match_are_refused_with_the_reason(octavo: Command, tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", {"dense": [1, 2]})
    cases = {
        "other": (write_run(tmp_path / "other", {"dense": [1]}, "perplexity"), "experiment=perplexity do not match"),
        "answers": (write_run(tmp_path / "answers", {"dense": [1]}, answers=["8"]), "answers is ['7'] in the first"),
        "items": (write_run(tmp_path / "items", {"dense": [1]}, item="needle/9"), "no item is in both, of 2 and 1"),
        "scores": (write_run(tmp_path / "scores", {"dense": [1]}, accuracy=None), "no quality by item and method"),
        "none": (tmp_path, "no run of octavo can be read there"),
        "self": (one, "that is one run"),
    }
    for folder, message in cases.values():
        outcome = octavo("compare", str(one), str(folder))
        assert outcome.code == 1 and message in outcome.err, outcome.err
    assert "give 2 to 26" in octavo("compare", str(one)).err
    assert "'limti'" in octavo("compare", str(one), str(one), "limti=2").err
