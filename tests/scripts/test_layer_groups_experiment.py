"""Layer groups on against off: bytes in closed form, what is counted on an engine, rows, the command, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_layout import PageLayout
from octavo.core.policies import FixedPages
from octavo.scripts.embedded_models import GEMMA3
from octavo.scripts.experiments.layer_groups import agreement, rows, watched_context
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema import EngineSettings, LayerGroups
from octavo.scripts.window_memory import complete, fitting, held_units, measure, steps

from .conftest import Command, samples

WINDOWS = [24] * 5 + [0]


def text_layout(page_tokens: int = 4) -> PageLayout:
    return PageLayout([], {"text": FixedPages(page_tokens)}, page_tokens)


@pytest.fixture(scope="module")
def model(windowed_model: Path) -> Any:
    from transformers import Gemma3ForCausalLM

    return Gemma3ForCausalLM.from_pretrained(windowed_model).eval()


class TestClosedForm:
    def test_steps(self) -> None:
        assert steps(10, 3, 4) == [(0, 4), (4, 8), (8, 10), (10, 11), (11, 12)]

    def test_held_units(self) -> None:
        """Six layers, pages of 4: at token 40 the window begins at token 17, in page 4."""
        plan = LayerPlan.of(WINDOWS)
        assert held_units(plan, text_layout(), 0, 40) == 10 + 5 * 10
        assert held_units(plan, text_layout(), 40, 44) == 11 + 5 * (11 - 4)
        assert held_units(LayerPlan.of(WINDOWS, grouped=False), text_layout(), 40, 44) == 11

    @pytest.mark.parametrize(
        ("context", "peak", "decoding"),
        [(32768, 2046 + 5 * 94, 2048 + 5 * 33), (4096, 254 + 5 * 94, 256 + 5 * 33)],
        ids=["32k", "4k"],
    )
    def test_gemma(self, context: int, peak: int, decoding: int) -> None:
        """Pages of 16: the last chunk, of 992 tokens, sees 511 before it, which makes 94 pages a window slice; a token
        that is decoded sees 33. At 32k that is a fifth of what one group holds."""
        windows = [GEMMA3.facts["sliding_window"] * (kind[0] == "s") for kind in GEMMA3.facts["layer_types"]]
        planned = steps(context - 32, 32, 1024)
        plan, off = (LayerPlan.of(windows, grouped) for grouped in (True, False))
        layout = text_layout(16)
        held = [held_units(plan, layout, *step) for step in planned]
        assert (max(held), held[-1]) == (peak, decoding)
        assert held_units(off, layout, *planned[-1]) == context // 16 and plan.slices == 6
        if context == 32768:
            assert peak / (6 * context // 16) < 0.205

    def test_fitting(self) -> None:
        assert [fitting(pool, 40, 25) for pool in (39, 40, 64, 65, 90)] == [0, 1, 1, 2, 3]


class TestEngine:
    @pytest.mark.parametrize("grouped", [True, False])
    def test_what_is_held_is_what_was_predicted(self, grouped: bool, model: Any, engine_for: Any) -> None:
        """39 + 10 tokens in pages of 4, chunks of 16: after half of the output 43 tokens are stored, the fork shares an
        open page, and each group's table copies it once."""
        engine = engine_for(model, layer_groups=grouped, step_tokens=16)
        prompt = [7 * at % 256 + 1 for at in range(39)]
        found = measure(engine, prompt, 10)
        assert found["units_held"] == found["predicted_units_held"][:-1] and len(found["units_held"]) == 3 + 9 - 1
        assert found["units_held_peak"] == max(found["predicted_units_held"])
        assert found["table_slices"] == (6 if grouped else 1)
        assert found["unit_bytes"] == engine._runner.kv[0].nbytes
        assert found["hit"]["cached_tokens"] == 36 and found["hit"]["tokens"] == found["tokens"]
        fork = found["fork"]
        assert fork["fork_units"] == 0 and fork["copies"] == fork["predicted_copies"] == (2 if grouped else 1)
        assert fork["units_held"] == fork["predicted_units_held"]
        assert [side["tokens"] for side in fork["sides"]] == [found["tokens"]] * 2
        assert len(found["margins"]) == 10 and all(len(side["margins"]) == 10 for side in fork["sides"])
        assert engine.stats().units_held == 0
        engine.check()

    def test_no_page_is_copied_where_none_is_open(self, model: Any, engine_for: Any) -> None:
        engine = engine_for(model, step_tokens=16)
        fork = measure(engine, list(range(1, 41)), 10)["fork"]  # 44 tokens are stored: 11 full pages
        assert fork["copies"] == fork["predicted_copies"] == 0
        assert fork["units_held"] == fork["predicted_units_held"]

    def test_as_many_requests_fit_as_the_bytes_say(self, model: Any, engine_for: Any) -> None:
        """While one computes its prompt the others decode; where only three fit, one is preempted, or waits."""
        from octavo.core import SamplingParams

        prompts = [[start + 1] * 96 for start in range(4)]
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        alone = measure(engine_for(model, step_tokens=32), prompts[0], 40)
        peak, decoding = alone["units_held_peak"], max(alone["units_held"][3:])  # after three chunks

        def serve(units: int) -> tuple[int, int]:
            engine = engine_for(model, step_tokens=32, prefix_cache=False, pool_tokens=-(-units // 6) * 4)
            engine.generate(prompts, params)
            stats = engine.stats()
            return stats.running_peak, stats.preemptions

        assert fitting(peak + 3 * decoding, peak, decoding) == 4
        assert serve(peak + 3 * decoding) == (4, 0)
        assert serve(peak + 2 * decoding) != (4, 0)

    def test_groups_change_no_token(self, model: Any, engine_for: Any) -> None:
        prompt = [5 * at % 256 + 1 for at in range(100)]
        on, off = (complete(engine_for(model, layer_groups=g, step_tokens=32), prompt, 20) for g in (True, False))
        assert on.tokens == off.tokens and min(on.margins) > 1e-3


def sample(context: int, groups: str, tokens: list[int], **more: Any) -> dict[str, Any]:
    side = {"tokens": tokens, "margins": [0.5, 0.25, 1.0]}
    return {
        "item": str(context), "groups": groups, "prompt_tokens": context - 3, "new_tokens": 3, "unit_bytes": 10,
        "table_slices": 6, **side, "units_held": [30, 40, 20], "units_held_peak": 40,
        "predicted_units_held": [30, 40, 20, 20], "prefill_seconds": 2.0, "decode_seconds": 0.5,
        "hit": {"cached_tokens": 8, "seconds": 0.1, **side},
        "fork": {"fork_us": 9.0, "fork_units": 0, "copies": 2, "predicted_copies": 2, "units_held": 22,
                 "predicted_units_held": 22, "sides": [side, {**side, "tokens": [1, 9, 3]}]},
        "load_1m": 1.0, "free_cores": 1.5, "cores": 2, **more,
    }  # fmt: skip


class TestRows:
    def test_rows(self) -> None:
        off = sample(64, "off", [1, 2, 3], unit_bytes=60, units_held=[10, 19, 20], units_held_peak=20)
        first, second, third = rows([sample(128, "on", [1, 2, 3]), sample(64, "on", [1, 2, 4]), off])
        assert [row["task"] for row in (first, second, third)] == ["64 tokens", "64 tokens", "128 tokens"]
        assert [row["policy"] for row in (first, second)] == ["layer groups", "one group"]
        assert (first["kv_bytes_held_peak"], first["kv_bytes_held_decoding"]) == (400, 200)
        assert (first["kv_ratio"], first["kv_decoding_ratio"]) == (pytest.approx(1 / 3), pytest.approx(1 / 6))
        assert (first["same_tokens"], first["margin_nats"], second["margin_nats"]) == (2, 1.0, None)
        assert first["requests_fit"] == 1 + (8 * 1200 - 400) // 200 and second["requests_fit"] == 8
        assert (first["unpredicted_steps"], second["unpredicted_steps"]) == (0, 2)
        assert first["tokens_per_s"] == 4 and first["hit_same_tokens"] == 3 and first["fork_same_tokens"] == 1
        assert "kv_ratio" not in third, "nothing to compare with yet"

    def test_agreement_gives_the_clearer_margin(self) -> None:
        one = {"tokens": [1, 2], "margins": [3.0, 0.1]}
        assert agreement(one, {"tokens": [1, 5], "margins": [3.0, 0.2]}) == (1, 0.2)
        assert agreement(one, one) == (2, None)


@pytest.mark.parametrize(
    ("contexts", "watched"), [([1024, 8192, 4096, 2048], 4096), ([16384, 8192], 8192), ([100], 100)]
)
def test_the_context_of_the_page_maps(contexts: list[int], watched: int) -> None:
    assert watched_context(contexts) == watched


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"contexts": []}, "contexts is empty"),
        ({"contexts": [96, 96]}, "contexts lists 96 twice"),
        ({"contexts": [64]}, "contexts=64: must be more than twice new_tokens=32"),
        ({"new_tokens": 1}, "new_tokens=1: must be at least 2"),
        ({"engine": EngineSettings(pool_tokens=99)}, "engine.pool_tokens=99: this experiment"),
        ({"engine": EngineSettings(prefix_cache=False)}, "engine.prefix_cache=False: this experiment"),
    ],
)
def test_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerGroups("layer_groups", **{"contexts": [128], **more})


class TestCommand:
    ARGUMENTS = ("experiment=layer_groups", "contexts=[200,100]", "new_tokens=8", "engine.step_tokens=32")

    def test_a_run(self, octavo: Command, windowed_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={windowed_model}")
        assert outcome.code == 0, outcome.err
        found = outcome.metrics["rows"]
        assert [(row["context_tokens"], row["policy"]) for row in found] == [
            (context, policy) for context in (100, 200) for policy in ("layer groups", "one group")
        ]
        for row in found:
            assert row["unpredicted_steps"] == 0 and row["units_held_peak"] == row["predicted_units_held_peak"]
            assert row["same_tokens"] == row["hit_same_tokens"] == row["fork_same_tokens"] == 8
            assert row["fork_units"] == 0 and row["copies"] == row["predicted_copies"]
            assert row["fork_units_held"] == row["predicted_fork_units_held"]
            assert row["hit_tokens"] == (row["prompt_tokens"] - 1) // 16 * 16
        assert found[2]["kv_ratio"] < found[0]["kv_ratio"] < 1 == found[1]["kv_ratio"]
        assert found[2]["requests_fit"] > 8
        assert "x while decoding; 8 of 8 tokens" in outcome.out and "µs to" in outcome.out
        assert (outcome.folder / "plots/layer_groups.png").stat().st_size > 5000

    def test_an_interrupted_run_goes_on(self, octavo: Command, windowed_model: Path) -> None:
        folder = octavo(*self.ARGUMENTS, f"model.path={windowed_model}", "limit=1").folder
        file = folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text(lines[0])
        outcome = octavo(f"resume={folder}")
        assert outcome.code == 0, outcome.err
        assert file.read_text().startswith(lines[0])
        assert [(s["item"], s["groups"]) for s in samples(folder)] == [("200", "on"), ("200", "off")]
        assert outcome.metrics["complete"] is True

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("contexts=[2000]", "contexts=2000: more than the 1024 tokens that this model may have"),
            ("engine.max_model_tokens=150", "contexts=200: more than the 150 tokens"),
        ],
    )
    def test_a_context_that_is_too_long(
        self, override: str, message: str, octavo: Command, windowed_model: Path
    ) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={windowed_model}", override)
        assert outcome.code == 1 and message in outcome.err

    def test_a_model_without_windows(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}")
        assert outcome.code == 1
        assert "none of its 2 layers has a sliding window" in outcome.err and "model=gemma3" in outcome.err


def test_the_yaml_says_what_the_types_say() -> None:
    from .test_configs import composed

    config, plain = composed("experiment=layer_groups"), LayerGroups("layer_groups")
    assert (config.contexts, config.new_tokens) == (plain.contexts, plain.new_tokens)
    assert config.engine == dataclasses.replace(plain.engine, step_tokens=1024)
