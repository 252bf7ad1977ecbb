"""The knobs experiment: the workload, the settings that are tried, what is counted, rows, command, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.scripts.experiments import knobs
from octavo.scripts.experiments.knobs import mixed, rows, serve
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema import EngineSettings, Knobs, ModelSettings
from octavo.scripts.schema_memory import KNOB_NAMES
from octavo.scripts.workloads import Workload

from .conftest import Command, samples


def settings(**more: Any) -> Knobs:
    return Knobs("knobs", **{"model": ModelSettings("nowhere"), **more})


def test_every_second_request_begins_like_the_first() -> None:
    prompts = tuple([n] * length for n, length in enumerate((300, 20, 400, 30, 7)))
    load = mixed(Workload("any", prompts, (1, 2, 3, 4, 5)), requests=5)
    assert [len(prompt) for prompt in load.prompts] == [300, 20, 400, 30, 7] and load.new_tokens == (1, 2, 3, 4, 5)
    assert load.prompts[2] == [0] * 256 + [2] * 144 and load.prompts[4] == [0] * 7
    assert load.prompts[1] == [1] * 20 and load.prompts[3] == [3] * 30
    assert len(mixed(Workload("any", prompts, (1, 2, 3, 4, 5)), requests=2).prompts) == 2


def test_one_knob_at_a_time() -> None:
    load = Workload(
        "any", ([1] * 20, [2] * 30), (10, 10)
    )  # 30 and 40 tokens: 80 slots in pages of 16, 96 in pages of 32
    config = settings(
        page_tokens=[32], max_seqs=[4, 8], pool_percent=[50], max_model_percent=[50], step_tokens=[128],
        default_pool_percent=75,
    )  # fmt: skip
    tried = knobs.settings(config, load, positions=128)
    assert tried.pop("default") == EngineSettings(pool_tokens=60)
    assert tried == {
        "page_tokens=32": EngineSettings(page_tokens=32, pool_tokens=72),
        "max_seqs=4": EngineSettings(max_seqs=4, pool_tokens=60),
        "max_seqs=8": EngineSettings(max_seqs=8, pool_tokens=60),
        "pool_percent=50": EngineSettings(pool_tokens=40),
        "max_model_percent=50": EngineSettings(max_model_tokens=64, pool_tokens=60),
        "step_tokens=128": EngineSettings(step_tokens=128, pool_tokens=60),
    }


class TestServing:
    def test_waste_and_hits_to_the_token(self, t_model: Any, engine_for: Any) -> None:
        """Pages of 4, one request after the other, the second beginning with a page of the first. The first stores 5, 6
        and 7 tokens in two pages before it ends, the second 6 and 7."""
        engine = engine_for(t_model, max_seqs=1)
        found = serve(engine, Workload("any", ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7]), (4, 3)), "salt")
        assert (found["requests"], found["prompt_tokens"], found["new_tokens"], found["steps"]) == (2, 11, 7, 7)
        assert (found["hit_tokens"], found["query_tokens"]) == (4, 11)
        assert (found["units_held_peak"], found["unit_tokens"]) == (2, 4)
        assert found["held_slot_steps"] == 5 * 8 and found["waste_slot_steps"] == (3 + 2 + 1) + (2 + 1)
        assert found["preemptions"] == 0 and 0 < found["step_p99_seconds"] < found["seconds"]
        again = serve(engine, Workload("any", ([9, 9],), (2,)), "salt")
        assert (again["hit_tokens"], again["query_tokens"]) == (0, 2)  # what came before does not count

    def test_preempted_requests_waste_nothing_while_they_wait(self, t_model: Any, engine_for: Any) -> None:
        """Three pages of 4: the second request must leave when the first needs its second page."""
        engine = engine_for(t_model, pool_tokens=12)
        found = serve(engine, Workload("any", ([1, 2, 3, 4], [5, 6, 7, 8]), (6, 6)), "salt")
        assert found["preemptions"] == 1 and found["units_held_peak"] == 3
        assert found["new_tokens"] == 12 and found["held_slot_steps"] > 0


def sample(item: str, number: int, **more: Any) -> dict[str, Any]:
    knob, _, value = item.partition("=")
    return {"item": item, "round": number, "knob": knob, "value": int(value) if value else None, "requests": 2,
            "prompt_tokens": 9, "new_tokens": 60, "seconds": 2.0, "steps": 7, "step_p99_seconds": 0.2,
            "units_held_peak": 10, "unit_tokens": 16, "units_total": 12, "held_slot_steps": 200,
            "waste_slot_steps": 50, "preemptions": 1, "evictions": 0, "hit_tokens": 3, "query_tokens": 12,
            "load_1m": 0.5, "free_cores": 2.0, "cores": 2, **more}  # fmt: skip


def test_rows_compare_within_a_round() -> None:
    """Pages of 32 are 25 % faster in every round, also in one that is ten times slower."""
    default, larger = rows(
        [
            s
            for n, slow in enumerate((1, 10, 1))
            for s in (
                sample("default", n, seconds=2.0 * slow),
                sample(
                    "page_tokens=32", n, seconds=1.6 * slow, step_p99_seconds=0.1, unit_tokens=32, units_held_peak=6
                ),
            )
        ]
    )
    assert (default["knob"], default["value"], default["rounds"]) == ("default", None, 3)
    assert default["tokens_per_s_ratio"] == default["step_p99_ratio"] == default["slots_held_ratio"] == 1
    assert (default["tokens_per_s"], default["step_p99_ms"]) == (30, 200)
    assert (default["waste_percent"], default["hit_percent"], default["pool_slots"]) == (25, 25, 192)
    assert (larger["knob"], larger["value"]) == ("page_tokens", 32)
    assert larger["tokens_per_s_ratio"] == pytest.approx(1.25) and larger["step_p99_ratio"] == pytest.approx(0.5)
    assert (larger["slots_held_peak"], larger["slots_held_ratio"]) == (192, 1.2)


def test_the_figure_shows_every_point_and_the_default_in_its_place() -> None:
    others = [sample("page_tokens=8", 0), sample("page_tokens=32", 0), sample("max_seqs=4", 0, seconds=0.5)]
    found = rows([sample("default", 0), *others])
    figure = knobs.small_multiples(found, dict.fromkeys(KNOB_NAMES, 16))
    assert len(figure.axes) == 2 * len(knobs.MEASURES)
    first, second = figure.axes[-2:]
    assert [label.get_text() for label in first.get_xticklabels()] == ["8", "16", "32"]
    assert [label.get_text() for label in second.get_xticklabels()] == ["4", "16"]
    assert [list(axes.lines[1].get_xdata()) for axes in (first, second)] == [[1], [1]]
    assert figure.axes[1].lines[0].get_ydata()[0] == 4.0  # its tokens/s against the default's
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert all(low <= y <= high for line in axes.lines for y in line.get_ydata())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"page_tokens": [16, 16]}, "page_tokens lists 16 twice"),
        ({"pool_percent": [0]}, "pool_percent=0: must be at least 1"),
        ({"max_model_percent": [101]}, "max_model_percent=101: must be at most 100"),
        ({"repeats": 0}, "repeats=0: must be at least 1"),
        ({"engine": EngineSettings(pool_tokens=64)}, r"engine.pool_tokens=64: .*as in pool_percent=\[50,90\]"),
        ({"engine": EngineSettings(page_policies={"text": 8})}, "engine.page_policies"),
    ],
)
def test_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**more)


class TestCommand:
    ARGUMENTS = ("experiment=knobs", "limit=4", "page_tokens=[8]", "max_seqs=[1]", "pool_percent=[50]",
                 "max_model_percent=[50]", "step_tokens=[32]")  # fmt: skip

    def test_a_run(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "engine.max_seqs=8")
        assert outcome.code == 0, outcome.err
        found = {row["knob"]: row for row in outcome.metrics["rows"]}
        assert list(found) == ["default", *KNOB_NAMES]
        assert [row["value"] for row in found.values()] == [None, 8, 1, 50, 50, 32]
        assert all(row["tokens_per_s"] > 0 and row["step_p99_ratio"] > 0 for row in found.values())
        default = found["default"]
        assert found["max_seqs"]["slots_held_peak"] < default["slots_held_peak"]
        assert found["page_tokens"]["waste_percent"] < default["waste_percent"]
        assert found["step_tokens"]["steps"] > default["steps"]
        assert found["pool_percent"]["pool_slots"] < default["pool_slots"] == found["max_model_percent"]["pool_slots"]
        assert "One round: " in outcome.out  # with a limit
        assert "page_tokens=8: " in outcome.out and "x default" in outcome.out
        assert [file.name for file in (outcome.folder / "plots").iterdir()] == ["knobs.png"]

    def test_an_interrupted_run_goes_on(self, octavo: Command, tiny_model: Path) -> None:
        arguments = ("experiment=knobs", "limit=2", *(f"{knob}=[]" for knob in KNOB_NAMES[1:]), "page_tokens=[8]")
        folder = octavo(*arguments, f"model.path={tiny_model}").folder
        file = folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text(lines[0])
        outcome = octavo(f"resume={folder}")
        assert outcome.code == 0, outcome.err
        assert file.read_text().startswith(lines[0])
        assert [(s["item"], s["round"]) for s in samples(folder)] == [("default", 0), ("page_tokens=8", 0)]

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            (
                "max_model_percent=[4]",
                "max_model_percent=4: the longest request has 56 tokens, and a sequence at most 40",
            ),
            ("pool_percent=[1]", "pool_percent=1: the longest request has 56 tokens, and the pool room for 3"),
        ],
    )
    def test_a_setting_that_serves_nobody_is_refused(
        self, override: str, message: str, octavo: Command, tiny_model: Path
    ) -> None:
        outcome = octavo(*self.ARGUMENTS, override, f"model.path={tiny_model}")
        assert outcome.code == 1 and message in outcome.err


def test_the_yaml_says_what_the_types_say() -> None:
    from .test_configs import composed

    config = composed("experiment=knobs")
    assert config == settings(model=config.model)
