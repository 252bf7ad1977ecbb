"""The page-size experiment on a tiny model: waste to the slot, what a page costs, rules, rows, resumption, refusals."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core import EngineConfig
from octavo.scripts import page_waste
from octavo.scripts.experiments.page_size import formula_rows, page_rules, sweep_rows
from octavo.scripts.page_costs import Facts, measure, serve
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema import EngineSettings, ModelSettings, PageSize
from octavo.scripts.workloads import Workload

from .conftest import Command, samples

SMALL = Workload("small", ([1, 2, 3, 4, 5], [6, 7], [8]), (4, 2, 1))


def settings(**more: Any) -> PageSize:
    return PageSize("page_size", model=ModelSettings("nowhere"), **more)


def test_serving_counts_waste_to_the_slot(t_model: Any, engine_for: Any) -> None:
    """Pages of 4. The first step computes all prompts and draws a token each, which ends the third request. The second
    stores 6 and 3 tokens and ends the second request, the third and fourth store 7 and 8 of the first."""
    engine = engine_for(t_model, page_tokens=4)
    found = serve(engine, t_model, SMALL, "salt")
    assert (found["requests"], found["prompt_tokens"], found["new_tokens"], found["steps"]) == (3, 8, 7, 4)
    assert found["pages"] == 2 + 1 + 1
    # After the second step the first request holds 8 slots and stores 6; after the third 8 and 7; then nothing is left.
    assert found["held_slot_steps"] == 8 + 8
    assert found["waste_slot_steps"] == found["predicted_waste_slot_steps"] == 2 + 1
    assert 0 < found["host_seconds"] < found["seconds"] and 0 < found["step_p99_seconds"] < found["seconds"]
    assert not t_model._forward_hooks and not t_model._forward_pre_hooks
    again = serve(engine, t_model, SMALL, "another salt")
    assert engine.stats().hit_tokens == 0 and again["held_slot_steps"] == 16
    serve(engine, t_model, SMALL, "salt")
    assert engine.stats().hit_tokens == 4  # the full page of the first prompt


@pytest.mark.parametrize("page", [4, 5, 16, 24])
def test_predicted_waste_is_measured_waste(page: int, t_model: Any, engine_for: Any) -> None:
    longer = Workload("longer", tuple([n] * n for n in (3, 9, 16, 20)), (9, 14, 3, 11))
    found = serve(engine_for(t_model, page_tokens=page), t_model, longer, "salt")
    assert found["waste_slot_steps"] == found["predicted_waste_slot_steps"] > 0


def sample(item: str, page: int, number: int, *, pages: int = 10, seconds: float = 2.0, **more: Any) -> dict[str, Any]:
    return {"item": item, "round": number, "page_tokens": page, "requests": 3, "prompt_tokens": 8, "new_tokens": 60,
            "pages": pages, "seconds": seconds, "steps": 10, "host_seconds": 0.1, "step_p99_seconds": 0.2,
            "held_slot_steps": 200, "waste_slot_steps": 50, "predicted_waste_slot_steps": 50, "token_bytes": 1024,
            "read_bytes_per_s": 1e9, "load_1m": 0.5, "free_cores": 2.0, "cores": 2, **more}  # fmt: skip


class TestCost:
    def test_a_page_costs_the_slope_of_host_time(self) -> None:
        """10 microseconds a page; one round in three was disturbed."""
        swept = [
            sample("sweep", page, number, pages=pages, host_seconds=0.5 + 10e-6 * pages + (number == 1) * page)
            for page, pages in ((8, 400), (16, 200), (32, 100))
            for number in range(3)
        ]
        facts = measure([*swept, sample("formulas", 8, 0, pages=9999)], SMALL)
        assert facts.page_seconds == pytest.approx(10e-6)
        assert facts.page_bytes == pytest.approx(10e-6 * 1e9 + 36)
        assert (facts.mean_tokens, facts.sequences, facts.token_bytes) == (pytest.approx(12 / 3), 3, 1024)

    @pytest.mark.parametrize("host", [0.0, -1e-3], ids=["one_size", "falling"])
    def test_noise_costs_nothing(self, host: float) -> None:
        swept = [sample("sweep", 8, 0, pages=5), sample("sweep", 16, 0, pages=9, host_seconds=0.1 + host)]
        facts = measure(swept if host else swept[:1], SMALL)
        assert facts.page_seconds == 0 and facts.page_bytes == 36

    def test_rules(self) -> None:
        """The square root of 2 x 576 x 64 KiB / 128 KiB is 24; the quoted rule is out of range, whatever its unit."""
        rules = page_rules(Facts(576, 32, 128 * 1024, 64 * 1024, 1.0), largest=256)
        assert rules["sqrt"] == (24, 24)
        assert rules["sqrt + 30 %"] == (pytest.approx(31.2), 32)
        assert rules["quoted"] == (pytest.approx(math.sqrt(2 * 576 * 128 * 1024 * 32)), 256)
        assert rules["quoted + 30 %"][1] == 336
        assert rules["quoted in bytes"] == (pytest.approx(math.sqrt(2 * 576 * 32 / (128 * 1024))), 8)
        assert rules["quoted in bytes + 30 %"][1] == 16


class TestRows:
    def test_a_sweep(self) -> None:
        swept = [sample("sweep", page, n, seconds=s) for n, s in enumerate((1.0, 3.0, 2.0)) for page in (8, 16)]
        first, second = sweep_rows([*swept, sample("formulas", 24, 0)])
        assert (first["page_tokens"], second["page_tokens"], first["rounds"]) == (8, 16, 3)
        assert (first["tokens_per_s"], first["tokens_per_s_min"], first["tokens_per_s_max"]) == (30, 20, 60)
        assert first["waste_percent"] == first["predicted_waste_percent"] == 25
        assert first["host_ms_per_step"] == pytest.approx(10) and first["step_p99_ms"] == pytest.approx(200)
        assert first["pages_per_sequence"] == pytest.approx(10 / 3)

    def test_a_larger_page_is_compared_round_by_round(self) -> None:
        """It is 25 % faster, and its p99 30 % less, in each round, also in one that is ten times slower."""
        rules = {"sqrt": (24.0, 24), "sqrt + 30 %": (31.2, 32)}
        own = [
            sample("formulas", page, n, seconds=slow * seconds, step_p99_seconds=slow * p99)
            for n, slow in enumerate((1, 10, 1))
            for page, seconds, p99 in ((24, 2.0, 1.0), (32, 1.6, 0.7))
        ]
        base, larger = formula_rows(own, rules)
        assert base["policy"] == "sqrt" and "tokens_per_s_change_percent" not in base
        assert larger["formula_tokens"] == 31.2 and larger["page_tokens"] == 32
        assert larger["tokens_per_s_change_percent"] == pytest.approx(25)
        assert larger["step_p99_change_percent"] == pytest.approx(-30)


class TestOffline:
    def test_every_waste_is_predicted(self) -> None:
        rows = page_waste.waste_rows(settings(page_sizes=[8, 24], images=[49, 576, 150], sequences=20))
        assert [row["page_tokens"] for row in rows if row["policy"] == "fixed"] == [8, 24]
        assert all(row["waste_percent"] == row["predicted_waste_percent"] > 0 for row in rows)
        pages = {row["policy"]: row["page_tokens"] for row in rows if row["task"] == "4 images of 576"}
        assert pages == {"text's page": 16, "ratio 1.5": 24, "divisor up to 48": 48, "whole": 576, "rows": 24}
        assert not [row for row in rows if row["task"] == "4 images of 150" and row["policy"] == "rows"]  # no square

    def test_larger_pages_for_images_cost_nothing_where_they_divide(self) -> None:
        """576 tokens are 36 pages of 16 and 24 pages of 24: the same waste, and 12 pages less an image."""
        rows = page_waste.waste_rows(settings(images=[576], sequences=50))
        by_policy = {row["policy"]: row for row in rows if row["task"] == "4 images of 576"}
        small, large = by_policy["text's page"], by_policy["ratio 1.5"]
        assert small["waste_percent"] == large["waste_percent"]
        assert small["pages_per_sequence"] - large["pages_per_sequence"] == 4 * 12

    def test_half_a_page_of_text_is_empty_on_average(self) -> None:
        rows = page_waste.waste_rows(settings(page_sizes=[16, 64], images=[], sequences=2000))
        texts = page_waste.text_prompts(np.random.default_rng(0), 2000, 400)
        tokens = [prompt[0].tokens for prompt in texts]
        assert np.mean(tokens) == pytest.approx(400, rel=0.1)
        for row in rows:
            empty = sum(-n % row["page_tokens"] for n in tokens)
            assert row["waste_percent"] == pytest.approx(100 * empty / (sum(tokens) + empty))
            assert empty / 2000 == pytest.approx((row["page_tokens"] - 1) / 2, rel=0.1)

    def test_the_seed_decides(self) -> None:
        first, again, other = (page_waste.waste_rows(settings(sequences=5, seed=seed)) for seed in (1, 1, 2))
        assert first == again != other


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"page_sizes": [16]}, r"page_sizes=\[16\].*at least two sizes"),
        ({"page_sizes": [16, 0]}, "page_sizes=0: must be at least 1"),
        ({"page_sizes": [16, 16]}, "page_sizes lists 16 twice"),
        ({"images": [-4]}, "images=-4: must be at least 1"),
        ({"repeats": 0}, "repeats=0: must be at least 1"),
        ({"largest_page": 4}, "largest_page=4: must be at least 8"),
        ({"engine": EngineSettings(page_tokens=32)}, "engine.page_tokens=32: this experiment sets"),
        ({"engine": EngineSettings(pool_tokens=999)}, "engine.pool_tokens=999: this experiment sets"),
        ({"engine": EngineSettings(page_policies={"text": 8})}, "engine.page_policies"),
    ],
)
def test_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**more)


class TestCommand:
    ARGUMENTS = ("experiment=page_size", "limit=2", "page_sizes=[8,16]", "images=[64]")

    def test_a_run(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}")
        assert outcome.code == 0, outcome.err
        rows = outcome.metrics["rows"]
        served = [row for row in rows if row["name"] == "octavo"]
        assert [row["policy"] for row in served] == [
            "fixed", "fixed", "sqrt", "sqrt + 30 %", "quoted", "quoted + 30 %", "quoted in bytes",
            "quoted in bytes + 30 %",
        ]  # fmt: skip
        assert all(row["waste_percent"] == row["predicted_waste_percent"] for row in rows)
        assert all(row["tokens_per_s"] > 0 and row["new_tokens"] == 16 for row in served)
        assert served[4]["formula_tokens"] > 100 > served[6]["formula_tokens"]
        taken = [(s["item"], s["round"], s["page_tokens"]) for s in samples(outcome.folder)]
        assert taken[:2] == [("sweep", 0, 8), ("sweep", 0, 16)]
        assert len(set(taken)) == len(taken) and {item for item, _, _ in taken} == {"sweep", "formulas"}
        assert "claimed: +19 % and -31 %" in outcome.out and "predicted %" in outcome.out
        plots = sorted(file.name for file in (outcome.folder / "plots").iterdir())
        assert plots == ["page_cost.png", "page_size.png", "page_waste.png"]

    def test_a_request_that_the_model_cannot_hold_is_refused(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo("experiment=page_size", f"model.path={tiny_model}")
        assert outcome.code == 1
        assert "workload ragged has a request of" in outcome.err and "the model at most 1024" in outcome.err

    def test_an_interrupted_run_goes_on(self, octavo: Command, tiny_model: Path) -> None:
        folder = octavo(*self.ARGUMENTS, f"model.path={tiny_model}").folder
        file = folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:1]))
        outcome = octavo(f"resume={folder}")
        assert outcome.code == 0, outcome.err
        assert file.read_text().startswith(lines[0])
        taken = [(s["item"], s["round"], s["page_tokens"]) for s in samples(folder)]
        assert taken[:2] == [("sweep", 0, 8), ("sweep", 0, 16)] and len(set(taken)) == len(taken)
        assert outcome.metrics["complete"] is True


def test_the_yaml_says_what_the_types_say() -> None:
    from .test_configs import composed

    config = composed("experiment=page_size")
    assert dataclasses.replace(config, model=ModelSettings("x"), tracking=settings().tracking) == dataclasses.replace(
        settings(), model=ModelSettings("x")
    )
    assert config.engine.page_tokens == EngineConfig().page_tokens
