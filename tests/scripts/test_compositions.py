"""A run keeps what its methods are made of and goes on with the same only; runs that differ in it can be told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Command

YAML = """
_target_: octavo.sparse.method.Method
name: own
digest: {_target_: octavo.sparse.digests.MinMax}
scorer: {_target_: own_parts.Own, power: 1}
budget: {_target_: octavo.sparse.budgets.Uniform, tokens: 128}
selector: {_target_: octavo.sparse.selectors.TopK}
placement: {_target_: octavo.sparse.placements.Resident}
keep: {_target_: octavo.sparse.keep.Keep, sink_tokens: 16, recent_tokens: 16}
dense_layers: []
"""
CODE = """
from dataclasses import dataclass
from octavo.sparse.scorers import UpperBound

@dataclass(frozen=True)
class Own(UpperBound):
    power: int = 1
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a method whose scorer is the user's."""
    (tmp_path / "own.yaml").write_text(YAML)
    (tmp_path / "own_parts.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_of_a_run(octavo: Command, tiny_model: Path, items_file: Path, own: Path) -> None:
    arguments = (
        f"task.path={items_file}", "task.max_new_tokens=4", f"model.path={tiny_model}", "limit=1",
        f"sparse.methods=[dense,{own}/own.yaml]",
    )  # fmt: skip
    first = octavo(*arguments)
    assert first.code == 0, first.err
    kept = json.loads((first.folder / "methods.json").read_text())
    assert list(kept) == ["own"] and "Own(" in kept["own"] and "power=1" in kept["own"]
    assert kept["own"].split("; ")[1].startswith("own_parts ")
    assert octavo(f"resume={first.folder}").code == 0

    (own / "own.yaml").write_text(YAML.replace("power: 1", "power: 2"))
    refused = octavo(f"resume={first.folder}")
    assert refused.code == 1 and "method own is not what" in refused.err and "power=2" in refused.err

    second = octavo(*arguments)
    outcome = octavo("compare", str(first.folder), str(second.folder))
    assert outcome.code == 0, outcome.err
    assert "methods.own" in (outcome.folder / "report.html").read_text()

    (own / "own.yaml").write_text(YAML)
    (own / "own_parts.py").write_text(CODE + "# another thought\n")
    assert "is not what" in octavo(f"resume={first.folder}").err
    (first.folder / "methods.json").unlink()  # a run of before they were kept
    assert octavo(f"resume={first.folder}").code == 0
