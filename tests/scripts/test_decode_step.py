"""Decode steps beside their floor, on tiny models: floors by hand, how steps are timed, rows, the command, refusals."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.core.execution.downloads import Download
from octavo.scripts import build, decode_octavo, machine_load, model_shapes, workloads
from octavo.scripts.decode_floor import DeviceRates, Floor, measure_rates
from octavo.scripts.decode_line_up import Models, free, line_up
from octavo.scripts.decode_octavo import Octavo, most_tokens
from octavo.scripts.decode_rivals import VLLM, BySlope, Transformers
from octavo.scripts.decode_rows import bars, rows
from octavo.scripts.decode_shapes import StepShape
from octavo.scripts.experiments import decode_step
from octavo.scripts.experiments.decode_step import GPU_SHAPES
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema_decode import DecodeStep
from octavo.scripts.schema_groups import EngineSettings, ShapedModelSettings
from octavo.scripts.workloads import Workload

from .conftest import Command, samples

H200 = DeviceRates(read_bytes_per_s=4.24e12, product_flop_per_s=790e12)
SMALL = Workload("mixed", ([1, 2, 3, 4, 5], [6, 7], [8]), (4, 2, 1))
SHAPE = StepShape(batch=3, context=20, new_tokens=6)


def on_meta(shape: str, dtype: torch.dtype) -> Any:
    """A model without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            model_shapes.configuration(ShapedModelSettings(shape=shape)), dtype=dtype
        )


def settings(**engine: Any) -> DecodeStep:
    engine = {"page_tokens": 4, "prefix_cache": False, "max_seqs": 8, "step_tokens": 16, **engine}
    return DecodeStep("decode_step", model=ShapedModelSettings(shape="tiny"), engine=EngineSettings(**engine))


class TestFloor:
    def test_an_input_embedding_of_its_own_is_not_read(self) -> None:
        floor = Floor.of(on_meta("tiny", torch.float32), H200)
        layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
        assert floor.parameters == 512 * 64 + 2 * layer + 64 and floor.weight_bytes == 4 * floor.parameters
        assert floor.head_parameters == 512 * 64 and floor.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4

    def test_a_tied_one_is_the_output_layer(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**{**model_shapes.SHAPES["tiny"], "tie_word_embeddings": True}))
        floor = Floor.of(model, H200)
        assert floor.parameters == sum(weight.numel() for weight in model.parameters())
        assert floor == Floor.of(on_meta("tiny", torch.float32), H200)

    def test_the_customary_shapes_on_an_h200(self) -> None:
        """As an 8B Llama's floors have been published with the issue; the largest batch is bound by its products."""
        floor = Floor.of(on_meta("llama-8b", torch.bfloat16), H200)
        shapes = [StepShape(*shape, new_tokens=128) for shape in GPU_SHAPES]
        found = [1e3 * floor.step_s(shape.batch, shape.kv_tokens) for shape in shapes]
        assert found == pytest.approx([3.57, 4.62, 11.71, 7.85, 13.46], abs=0.02)
        assert 1e3 * floor.byte_s(shapes[-1].kv_tokens) == pytest.approx(12.15, abs=0.01)

    def test_the_customary_batch_on_an_h200(self) -> None:
        floor = Floor.of(on_meta("llama-8b", torch.bfloat16), DeviceRates(4.3e12, 750e12))
        mixed = workloads.random_ids("mixed", 100, seed=0)
        seconds = floor.batch_s(list(map(len, mixed.prompts)), mixed.new_tokens)
        assert mixed.total_new / seconds == pytest.approx(13_100, rel=0.05)

    def test_a_batch_by_hand(self) -> None:
        """R = F = 1, k = 1: prompts of 3 and 5 tokens are 2 * (6 * 8 + 4 * 2); then both decode, then the second
        alone, with products of 2 * 10 a row above 20 bytes of weights."""
        floor = Floor(20, 10, 4, 1, 1.0, 1.0)
        assert floor.batch_s([3, 5], [2, 3]) == 2 * (6 * 8 + 4 * 2) + (40 + 4 + 6) + (20 + 7)

    def test_rates_of_a_cpu(self) -> None:
        rates = measure_rates(torch.device("cpu"), torch.float32)
        assert 1e8 < rates.read_bytes_per_s < 1e13 and 1e8 < rates.product_flop_per_s < 1e14


class TestModels:
    def test_random_weights_in_a_shape(self) -> None:
        model = model_shapes.make(ShapedModelSettings(shape="tiny", dtype="bf16", device="cpu"))
        assert model.dtype == torch.bfloat16 and not model.training and model.config.vocab_size == 512
        assert model.lm_head.weight.std() > 0

    def test_a_model_with_windows_is_refused(self, windowed_model: Path) -> None:
        with pytest.raises(ConfigError, match="a sliding window of 24 tokens read less than the floor counts"):
            model_shapes.configuration(ShapedModelSettings(path=str(windowed_model)))

    def test_requests_of_random_tokens_have_the_lengths_of_the_workload(self) -> None:
        class Words:
            def encode(self, text: str, add_special_tokens: bool) -> list[int]:
                return list(text.encode())

        text, drawn = workloads.build("mixed", Words(), seed=3), workloads.random_ids("mixed", 50, seed=3)
        assert [len(p) for p in drawn.prompts] == [len(p) for p in text.prompts]
        assert drawn.new_tokens == text.new_tokens and {t for p in drawn.prompts for t in p} == set(range(50))


@pytest.fixture(scope="module")
def model() -> Any:
    return model_shapes.make(ShapedModelSettings(shape="tiny", dtype="fp32", device="cpu"))


class TestOctavo:
    @pytest.mark.parametrize("execution", ["eager", "graph"])
    def test_timed_steps_decode_every_sequence(self, execution: str, model: Any) -> None:
        """60 prompt tokens in steps of 16, of which up to 3 are for decoding: all prompts are there before the time
        begins, and each timed step brings three tokens."""
        contender = Octavo(settings(), model, execution, [SHAPE], SMALL)
        timed: list[tuple[int, int]] = []
        step = contender.engine.step

        def seen() -> Any:
            running = contender.engine._scheduler.running
            computing = sum(s.computed < len(s.request.prompt) for s in running)
            news = step()
            timed.append((computing, sum(len(output.new_token_ids) for output in news)))
            return news

        contender.engine.step = seen  # type: ignore[method-assign]
        stretch = contender.stretch(SHAPE, seed=0)
        contender.engine.check()
        whole = [news for computing, news in timed if computing == 0 and news]
        assert whole.count(3) >= SHAPE.new_tokens and contender.engine.stats().units_held == 0
        assert stretch.step_s > 0 and stretch.prefill_s > 0
        assert stretch.host_s is stretch.wait_s is stretch.device_bytes_peak is None  # nothing to tell apart on a CPU

    def test_the_longest_output_is_enough(self) -> None:
        """Five steps of at least 13 prompt tokens, four to warm up, six timed, two ahead."""
        assert most_tokens(settings().engine, SHAPE) == 5 + 4 + 6 + 2

    def test_requests_get_their_tokens_and_find_nothing_again(self, model: Any) -> None:
        contender = Octavo(settings(prefix_cache=True), model, "graph", [SHAPE], SMALL)
        assert contender.serve(SMALL) > 0 and contender.serve(SMALL) > 0
        assert contender.engine.stats().hit_tokens == 0

    def test_a_pool_that_cannot_hold_the_batch_is_refused(self, model: Any) -> None:
        contender = Octavo(settings(pool_tokens=64), model, "eager", [SHAPE], None)
        with pytest.raises(ConfigError, match=r"6 steps brought \d+ tokens instead of 18, with a pool of 64 tokens"):
            contender.stretch(SHAPE, seed=0)

    def test_waiting_is_told_from_working(self) -> None:
        before = Download.wait
        with decode_octavo._waiting() as waited:
            assert Download(torch.tensor([7]), None).wait().tolist() == [7]
        assert len(waited) == 1 and Download.wait is before


class TestRivals:
    def test_a_step_is_the_slope(self) -> None:
        class Fake(BySlope):
            device, vocab_size = torch.device("cpu"), 9

            def generate(self, prompts: list[list[int]], new_tokens: int) -> float:
                assert [len(prompt) for prompt in prompts] == [20] * 3
                return 2.0 + 0.5 * new_tokens  # whose first token comes out of the prompt

        stretch = Fake().stretch(SHAPE, seed=0)
        assert (stretch.step_s, stretch.prefill_s, stretch.host_s, stretch.wait_s) == (0.5, 2.5, None, None)

    def test_transformers_generates_all(self, model: Any) -> None:
        assert Transformers(model).generate(SHAPE.prompts(512, 0), 5) > 0

    def test_vllm_gets_the_same_shape(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: dict[str, Any] = {}

        class LLM:
            def __init__(self, **keywords: Any) -> None:
                made.update(keywords, config=json.loads((Path(keywords["model"]) / "config.json").read_text()))

            def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
                made["temperatures"] = [p.temperature for p in params]
                return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * p.max_tokens)]) for p in params]

        stub = ModuleType("vllm")
        stub.LLM, stub.SamplingParams = LLM, lambda **keywords: SimpleNamespace(**keywords)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm", stub)
        for switch in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS"):
            monkeypatch.setenv(switch, "0")
        config = settings()
        rival = VLLM(config, model_shapes.configuration(config.model), "bfloat16", [SHAPE], SMALL)
        assert (made["load_format"], made["dtype"], made["max_model_len"]) == ("dummy", "bfloat16", 20 + 8 + 6)
        assert (made["max_num_seqs"], made["enable_prefix_caching"]) == (8, False)
        assert made["config"]["architectures"] == ["LlamaForCausalLM"] and made["config"]["vocab_size"] == 512
        assert rival.generate(SHAPE.prompts(512, 0), 5) >= 0 and made["temperatures"] == [0.0] * 3
        assert rival.serve(SMALL) >= 0 and made["temperatures"] == [0.6] * 3


FLOOR = {
    "item": "floor",
    "round": 0,
    "name": "device",
    "execution": "",
    **dataclasses.asdict(Floor(80, 10, 4, 2, 1e3, 1e6)),
}
LOAD = {"load_1m": 0.5, "free_cores": 2.0, "cores": 2}


def step(execution: str, number: int, step_s: float) -> dict[str, Any]:
    return {
        "item": "batch 2, context 8",
        "round": number,
        "name": "octavo" if execution else "vllm",
        "execution": execution,
        **{"batch": 2, "context": 8, "new_tokens": 4},
        **{"step_s": step_s, "prefill_s": 0.5, "device_bytes_peak": 100 + number},
        **{"host_s": 0.1 if execution else None, "wait_s": 0.1 * number if execution else None},
        **LOAD,
    }


def test_rows_are_medians_beside_the_floor() -> None:
    """80 bytes of weights and 2 * 2 * (8 + 2) of K and V at 1000 a second."""
    batch = {"item": "mixed", "name": "octavo", "execution": "graph", "prompt_lengths": [3, 5], "new_lengths": [1, 1]}
    taken = [step("graph", n, s) for n, s in enumerate((0.2, 0.9, 0.24))] + [step("", 0, 0.48)]
    ours, theirs, mixed = rows([FLOOR, *taken, {**batch, "round": 0, "seconds": 4.0, **LOAD}])
    assert (ours["floor_ms"], ours["ms_per_step"], ours["percent_of_floor"]) == pytest.approx((120, 240, 50))
    assert (ours["ms_per_step_min"], ours["ms_per_step_max"], ours["rounds"]) == (200, 900, 3)
    assert (ours["tokens_per_s"], ours["prefill_tokens_per_s"]) == pytest.approx((2 / 0.24, 32))
    assert (ours["host_ms_per_step"], ours["wait_ms_per_step"], ours["device_bytes_peak"]) == (100, 100, 102)
    assert (theirs["name"], theirs["execution"], theirs["percent_of_floor"]) == ("vllm", None, pytest.approx(25))
    assert theirs["host_ms_per_step"] is theirs["wait_ms_per_step"] is None
    ceiling = 2 / (2 * (6 * 8 + 4 * 2) / 1e6)
    assert mixed["ceiling_tokens_per_s"] == pytest.approx(ceiling) and mixed["tokens_per_s"] == 0.5
    assert mixed["percent_of_ceiling"] == pytest.approx(50 / ceiling)
    (axes,) = bars([ours, theirs]).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["floor", "octavo graph", "vllm"]


class TestCommand:
    @pytest.fixture(autouse=True)
    def hasty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Looks at the machine for 10 ms before each sample, and not for half a second."""
        monkeypatch.setattr(decode_step, "watch", lambda: machine_load.watch(0.01))

    ARGUMENTS = ("experiment=decode_step", "model.shape=tiny", "rounds=2", "new_tokens=3", "shapes=[[1,16],[3,24]]")
    ITEMS = ("batch 1, context 16", "batch 3, context 24", "mixed")

    def test_a_run(self, octavo: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        alive: list[Any] = []
        build = decode_octavo.build.engine

        def alone(*arguments: Any) -> Any:
            gc.collect()
            assert not any(engine() for engine in alive), "the last contender is still in memory"
            engine = build(*arguments)
            alive.append(weakref.ref(engine))
            return engine

        monkeypatch.setattr(decode_octavo.build, "engine", alone)
        outcome = octavo(*self.ARGUMENTS, "rivals=[vllm,transformers]")
        assert outcome.code == 0, outcome.err
        found = outcome.metrics["rows"]
        octavos = [("octavo", "eager"), ("octavo", "graph")]
        assert [(r["task"], r["name"], r["execution"]) for r in found] == [
            (item, *who) for item in self.ITEMS[:2] for who in [*octavos, ("transformers", None)]
        ] + [("mixed", *who) for who in octavos]
        assert all(r["rounds"] == 2 for r in found) and len(alive) == 2
        environment = outcome.metrics["environment"]
        assert environment["read_bytes_per_s"] > 0 and environment["product_flop_per_s"] > 0
        steps, batches = (line for line in outcome.out.splitlines() if line.startswith("task "))
        assert steps.index("floor ms") < steps.index("% of floor") < steps.index("ms a step") < steps.index("prefill")
        assert "% of ceiling" in batches and "% of ceiling" not in steps
        assert (
            "vllm did not run: it is for cuda" in outcome.out and "random, which says nothing of quality" in outcome.out
        )
        assert (outcome.folder / "plots/decode_step.png").stat().st_size > 5000
        assert (outcome.folder / "report.html").read_text().count("<table") >= 3

    def test_an_interrupted_run_goes_on(self, octavo: Command) -> None:
        folder = octavo(*self.ARGUMENTS, "executions=[graph]", "rivals=[]").folder
        file = folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:4]))  # the floor, the first shape, and one round of the second
        outcome = octavo(f"resume={folder}")
        assert outcome.code == 0, outcome.err
        assert file.read_text().splitlines(keepends=True)[:4] == lines[:4]
        taken = [(s["item"], s["round"]) for s in samples(folder)[1:]]
        assert taken == [(item, number) for item in self.ITEMS for number in range(2)]

    def test_a_limit_takes_the_first_shapes(self, octavo: Command) -> None:
        outcome = octavo(*self.ARGUMENTS, "limit=1", "executions=[eager]", "rounds=1")
        assert [(r["task"], r.get("requests")) for r in outcome.metrics["rows"]] == [
            (self.ITEMS[0], None),
            ("mixed", 1),
        ]

    def test_a_loaded_model(self, octavo: Command, tiny_model: Path) -> None:
        arguments = (
            "experiment=decode_step",
            f"model.path={tiny_model}",
            "shapes=[[2,16]]",
            "new_tokens=2",
            "rounds=1",
        )
        outcome = octavo(*arguments, "mixed=false", "executions=[graph]")
        assert outcome.code == 0, outcome.err
        assert [r["task"] for r in outcome.metrics["rows"]] == ["batch 2, context 16"] and "as loaded" in outcome.out

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("model.shape=lama-8b", "model.shape=lama-8b: unknown; did you mean 'llama-8b'?"),
            ("model.path=owner/name", "model.path=owner/name and model.shape=tiny both say which model"),
            ("shapes=[[1,2,3]]", "shapes=[1, 2, 3]: give pairs"),
            ("shapes=[[1,16],[1,16]]", "shapes lists '1x16' twice"),
            ("shapes=[[300,16]]", "with engine.max_seqs=256 at most 256 sequences decode in one step"),
            ("engine.step_tokens=3", "with engine.step_tokens=3 at most 2 sequences decode in one step"),
            ("shapes=[[1,2048]]", "has sequences of up to 2058 tokens, and the model at most 2048"),
            ("executions=[fast]", "executions=fast: unknown"),
            ("engine.execution=graph", "takes it from executions, as in executions=[graph]"),
            ("rivals=[vllm,vllm]", "rivals lists 'vllm' twice"),
            ("rounds=0", "rounds=0: must be at least 1"),
            ("vllm_memory_fraction=0", "vllm_memory_fraction=0.0: must be above 0"),
        ],
    )
    def test_refusals(self, override: str, message: str, octavo: Command) -> None:
        outcome = octavo(*self.ARGUMENTS, override)
        assert outcome.code == 1 and message in outcome.err, outcome.err

    def test_random_weights_are_for_this_experiment(self, octavo: Command) -> None:
        outcome = octavo("experiment=generate", "model=random")
        assert outcome.code == 1 and "model" in outcome.err and "Traceback" not in outcome.err


def test_every_execution_takes_part_on_a_gpu() -> None:
    config = DecodeStep("decode_step", rivals=["transformers"])
    for device, expected in (("cuda", ["eager", "graph", "compiled", ""]), ("cpu", ["eager", "graph", ""])):
        entrants, absent = line_up(config, device, Models(config), [], None)
        assert [entrant.execution for entrant in entrants] == expected and not absent


def test_garbage_collections_pass_over_who_is_warm_until_it_is_given_back():
    class Cycle:
        def __init__(self):
            self.itself = self

    warm = weakref.ref(Cycle())
    build.spare_collections()
    gc.collect()
    assert warm() is not None
    free()
    assert warm() is None and gc.get_freeze_count() > 0
    gc.unfreeze()
