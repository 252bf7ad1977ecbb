"""The sharing experiment: the closed form against every page that an engine holds, rows, figure, command, refusals."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from octavo.core import SamplingParams
from octavo.scripts.experiments import sharing
from octavo.scripts.experiments.sharing import Cell, extra_percent, predicted_copies, predicted_pages, rows
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema import EngineSettings, ModelSettings, Sharing

from .conftest import Command, samples


@pytest.mark.parametrize(
    ("cell", "pages", "copies"),
    [
        (Cell(1, 32, 1), 2, 0),  # two full pages, and the one token is never stored
        (Cell(100, 32, 1), 2, 0),
        (Cell(100, 33, 1), 3, 0),  # nothing is written after the prompt
        (Cell(1, 32, 2), 3, 0),
        (Cell(3, 32, 2), 2 + 3, 0),
        (Cell(3, 33, 2), 2 + 3, 2),  # the last to write keeps the page
        (Cell(3, 33, 16), 2 + 3, 2),
        (Cell(3, 33, 17), 2 + 3 * 2, 2),
        (Cell(3, 5, 2), 3, 2),
    ],
)
def test_predictions(cell: Cell, pages: int, copies: int) -> None:
    assert (predicted_pages(cell, 16), predicted_copies(cell, 16)) == (pages, copies)


@pytest.mark.parametrize("page", [4, 12])
def test_an_engine_holds_what_is_predicted(page: int, t_model: Any, engine_for: Any, drain: Any) -> None:
    """Prompts around a page's end, outputs around it, in pages of one and of three units."""
    for cell in (
        Cell(*lengths) for lengths in product((1, 2, 5), (page - 1, page, page + 1, 2 * page), (1, 2, page + 2))
    ):
        policies = {"text": page, "image": 4}  # units of 4
        engine = engine_for(t_model, page_policies=policies, page_tokens=16, pool_tokens=50 * page)
        params = SamplingParams(n=cell.samples, max_tokens=cell.new_tokens, temperature=1.0, seed=0, ignore_eos=True)
        engine.submit(list(range(3, 3 + cell.prompt_tokens)), params)
        drain(engine)
        stats = engine.stats()
        assert stats.units_held_peak == predicted_pages(cell, page) * page // 4, cell
        assert stats.copies == predicted_copies(cell, page), cell


def test_where_the_claim_holds() -> None:
    """100 samples take 15 % more than one from 659 times as many shared pages as each has of its own."""
    for own in (1, 3):
        new = 16 * own + 1
        cell = Cell(100, 16 * 659 * own, new)
        assert extra_percent(cell, predicted_pages(cell, 16), 16) == pytest.approx(15.0)
        shorter = cell._replace(prompt_tokens=cell.prompt_tokens - 16)
        assert extra_percent(shorter, predicted_pages(shorter, 16), 16) > 15


def sample(cell: Cell, pages: int, copies: int, item: str = "random weights") -> dict[str, Any]:
    return {"item": item, **cell._asdict(), "page_tokens": 16, "pages_held_peak": pages, "copies": copies,
            "preemptions": 0, "seconds": 1.0}  # fmt: skip


def test_rows_and_what_is_said_of_them() -> None:
    found = rows([sample(Cell(1, 33, 2), 3, 0), sample(Cell(3, 33, 2), 5, 2), sample(Cell(3, 32, 2), 6, 0)])
    one, three, wrong = found
    assert (one["task"], one["weights"], one["extra_percent"]) == ("33 + 2", "random weights", 0)
    assert (three["predicted_pages"], three["predicted_copies"]) == (5, 2)
    assert three["extra_percent"] == pytest.approx(100 * 2 / 3)
    assert wrong["predicted_pages"] == 5
    said = sharing._findings(found)
    assert said[0] == "pages and copies are as predicted in 2 of 3 cells"
    assert said[1].startswith("NOT as predicted: random weights, 3 x (32 + 2): 6 pages, predicted 5")
    assert said[2] == "3 samples take at most 15 % more than one for 0 of 2 lengths (prompt + new): none"


def test_the_figure_has_a_panel_for_every_number_of_samples() -> None:
    cells = [Cell(n, 512, 16) for n in (1, 2, 5, 10, 100)]
    figure = sharing.surface(rows([sample(c, predicted_pages(c, 16), 0) for c in cells]), 16, 4096)
    titles = [axes.get_title() for axes in figure.axes if axes.get_visible() and axes.get_title()]
    assert titles == ["2 samples", "5 samples", "10 samples", "100 samples"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"samples": []}, "samples is empty"),
        ({"samples": [1, 1]}, "samples lists 1 twice"),
        ({"new_tokens": [0]}, "new_tokens=0: must be at least 1"),
        ({"model_prompt_tokens": [-1]}, "model_prompt_tokens=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"surface_tokens": 1000}, "surface_tokens=1000: must be at least 32768"),
        ({"engine": EngineSettings(max_seqs=64)}, "samples=100: more than decode in one step, engine.max_seqs=64"),
        ({"engine": EngineSettings(step_tokens=64)}, "engine.step_tokens=64"),
        ({"engine": EngineSettings(pool_tokens=64)}, "engine.pool_tokens=64: this experiment sets it itself"),
    ],
)
def test_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sharing("sharing", model=ModelSettings("nowhere"), **more)


class TestCommand:
    ARGUMENTS = (
        "experiment=sharing", "samples=[1,7]", "prompt_tokens=[40,64]", "new_tokens=[9]", "model_samples=[3]",
        "model_prompt_tokens=[50]", "model_new_tokens=[20]", "surface_tokens=1024",
    )  # fmt: skip

    def test_a_run(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "engine.page_tokens=24")
        assert outcome.code == 0, outcome.err
        found = outcome.metrics["rows"]
        assert [(row["weights"], row["samples"], row["task"]) for row in found] == [
            ("random weights", 1, "40 + 9"), ("random weights", 7, "40 + 9"), ("random weights", 1, "64 + 9"),
            ("random weights", 7, "64 + 9"), ("model", 3, "50 + 20"),
        ]  # fmt: skip
        assert [row["pages_held_peak"] for row in found] == [2, 1 + 7, 3, 2 + 7, 2 + 3]
        assert [row["copies"] for row in found] == [0, 6, 0, 6, 2]
        assert "pages and copies are as predicted in 5 of 5 cells" in outcome.out and "% over one sample" in outcome.out
        assert [file.name for file in (outcome.folder / "plots").iterdir()] == ["sharing.png"]

    def test_an_interrupted_run_goes_on(self, octavo: Command, tiny_model: Path) -> None:
        folder = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "limit=2").folder
        file = folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:1]))
        outcome = octavo(f"resume={folder}")
        assert outcome.code == 0, outcome.err
        assert file.read_text().startswith(lines[0])
        cells = [(s["item"], s["samples"], s["prompt_tokens"]) for s in samples(folder)]
        assert cells == [("random weights", 1, 40), ("random weights", 7, 40), ("model", 3, 50)]

    def test_a_prompt_that_the_model_cannot_hold_is_refused(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "model_prompt_tokens=[1010]")
        assert outcome.code == 1
        assert "1030 tokens, and the model at most 1024; lower model_prompt_tokens" in outcome.err


def test_the_yaml_says_what_the_types_say() -> None:
    from .test_configs import composed

    config = composed("experiment=sharing")
    assert config == Sharing("sharing", model=config.model)
