"""The throughput race on a tiny model: workloads, contenders, rows, resumption, refusals."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from octavo.scripts import generate_batch, linears, machine_load, rivals, vllm_server, workloads
from octavo.scripts.experiments.throughput import rows
from octavo.scripts.machine_load import Load
from octavo.scripts.schema import EngineSettings, ModelSettings, Throughput
from octavo.scripts.workloads import Workload

from .conftest import Command, samples


class Words:
    """A token a byte of the text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())


SMALL = Workload("small", ([1, 2, 3, 4, 5], [6, 7], [8]), (4, 2, 1))


@pytest.fixture(scope="module")
def config() -> Throughput:
    return Throughput("throughput", model=ModelSettings("nowhere"), engine=EngineSettings(prefix_cache=False))


class TestWorkloads:
    def test_lengths(self) -> None:
        uniform, ragged = (workloads.build(name, Words(), seed=0) for name in ("uniform", "ragged"))
        assert [len(p) for p in uniform.prompts] == [256] * 16 and uniform.new_tokens == (64,) * 16
        assert len(ragged.prompts) == 32
        assert all(32 <= len(p) <= 1024 for p in ragged.prompts) and all(16 <= n <= 256 for n in ragged.new_tokens)
        assert len({tuple(p) for p in uniform.prompts}) == 16

    def test_the_seed_decides(self) -> None:
        first, again, other = (workloads.build("ragged", Words(), seed) for seed in (1, 1, 2))
        assert first == again
        assert first.prompts != other.prompts and first.new_tokens != other.new_tokens

    def test_limit_cuts(self) -> None:
        small = workloads.build("uniform", Words(), seed=0, limit=2)
        assert [len(p) for p in small.prompts] == [48, 48] and small.new_tokens == (8, 8)
        whole = workloads.build("uniform", Words(), seed=0)
        assert [p[:48] for p in whole.prompts[:1]] == list(small.prompts[:1])

    def test_one_request_is_warmed_up_alone(self, t_model: Any) -> None:
        warm = workloads.warm_up(workloads.build("uniform", Words(), seed=0), t_model)
        assert list(map(len, warm.prompts)) == [64, 64] and warm.new_tokens == (4, 8)

    def test_as_many_requests_as_asked_for_and_one_of_another_length(self) -> None:
        own = workloads.build("ragged", Words(), seed=0)
        more = workloads.build("ragged", Words(), seed=0, requests=40, last=(2000, 3))
        assert len(more.prompts) == 41 and (len(more.prompts[-1]), more.new_tokens[-1]) == (2000, 3)
        assert more.new_tokens[:32] == own.new_tokens
        few = workloads.build("ragged", Words(), seed=0, limit=2, last=(2000, 30))
        assert [len(p) for p in few.prompts] == [48, 48, 48] and few.new_tokens == (8, 8, 8)
        mixed = workloads.build("mixed", Words(), seed=0)
        assert len(mixed.prompts) == 256 and all(100 <= len(p) <= 1024 for p in mixed.prompts)
        assert all(100 <= new <= 1024 for new in mixed.new_tokens)
        long = workloads.random_ids("long", 50, seed=0)
        assert len(long.prompts) == 32 and all(16_384 <= len(p) <= 32_768 for p in long.prompts)

    def test_sizes(self) -> None:
        assert (SMALL.total_new, SMALL.longest, SMALL.slots(4)) == (7, 9, 12 + 4 + 4)
        assert (SMALL.slots(4, at_once=2), SMALL.slots(4, at_once=9)) == (12 + 4, 12 + 4 + 4)


class TestContenders:
    def test_octavo_serves_every_token_and_finds_nothing_again(self, config: Throughput, t_model: Any) -> None:
        config = Throughput("throughput", model=config.model, engine=EngineSettings(page_tokens=4, prefix_cache=True))
        contender = rivals.Octavo(config, t_model, SMALL)
        outings = [contender.run(SMALL) for _ in range(2)]
        assert [o.new_tokens for o in outings] == [7, 7]
        assert contender.engine.stats().hit_tokens == 0
        # The last token's KV is not stored: 8, 3 and 1 slots are 2 + 1 + 1 pages of 4, of 2 * 2 * 2 * 16 fp32 numbers.
        assert outings[1].kv_bytes == 4 * 4 * 2 * 2 * 2 * 16 * 4

    def test_transformers_pads_and_counts_what_was_asked_for(self, t_model: Any) -> None:
        outing = rivals.Transformers(t_model).run(SMALL)
        assert outing.new_tokens == 7
        assert outing.kv_bytes == 3 * (5 + 4 - 1) * 2 * 2 * 2 * 16 * 4

    def test_transformers_is_given_the_same_prompts(self, t_model: Any, engine_for: Any) -> None:
        """Row by row, a padded batch continues as octavo does."""
        from octavo.core import SamplingParams

        written: list[Any] = []
        original = type(t_model).generate

        def spied(self: Any, *arguments: Any, **keywords: Any) -> Any:
            written.append(original(self, *arguments, **keywords))
            return written[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(t_model), "generate", spied)
            rivals.Transformers(t_model).run(SMALL)
        params = [SamplingParams(max_tokens=4, ignore_eos=True)] * 3
        ours = [c.samples[0].token_ids for c in engine_for(t_model).generate(list(SMALL.prompts), params)]
        assert written[0][:, 5:].tolist() == ours

    @pytest.mark.skipif(generate_batch.missing() is not None, reason=str(generate_batch.missing()))
    def test_generate_batch_serves_every_token(self, config: Throughput, t_model: Any) -> None:
        outing = rivals.Batch(config, t_model, SMALL).run(SMALL)
        assert outing.new_tokens == 7 and outing.seconds > 0 and outing.kv_bytes is None

    def test_vllm_runs_if_it_is_there(self, config: Throughput, t_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        stub = ModuleType("vllm")
        made: dict[str, Any] = {}

        class LLM:
            def __init__(self, **keywords: Any) -> None:
                made.update(keywords)

            def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
                assert prompts[0] == {"prompt_token_ids": [1, 2, 3, 4, 5]}
                assert all(p.ignore_eos for p in params)
                return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * p.max_tokens)]) for p in params]

        stub.LLM, stub.SamplingParams = LLM, lambda **keywords: SimpleNamespace(**keywords)  # type: ignore[attr-defined]
        stub.__spec__ = SimpleNamespace(name="vllm")  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, "vllm", stub)
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        config.rivals = ["vllm_cpu"]
        contenders, notes = rivals.line_up(config, t_model, SMALL)
        assert [c.name for c in contenders] == ["octavo", "vllm_cpu", "linears"] and not notes
        assert contenders[1].run(SMALL).new_tokens == 7
        assert made["enable_prefix_caching"] is False and made["max_model_len"] == 9 and made["dtype"] == "float32"

    def test_rivals_that_cannot_run_are_noted(
        self, config: Throughput, t_model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm_server.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(generate_batch, "missing", lambda: "it is too old")
        config.rivals = ["vllm", "vllm_cpu", "generate_batch"]
        contenders, notes = rivals.line_up(config, t_model, SMALL)
        assert [c.name for c in contenders] == ["octavo", "linears"]
        assert notes == [
            "vllm did not run: it is for cuda, and the model is on cpu.",
            "vllm_cpu did not run: it is not installed.",
            "generate_batch did not run: it is too old.",
        ]


def test_the_floor_passes_each_linear_layer_at_the_shapes_of_the_workload(t_model: Any) -> None:
    """8 prompt tokens in steps of 5, the output layer for 3 rows; then batches of 2, 1 and 1, three timed passes a
    size."""
    head = t_model.get_output_embeddings()
    layer = t_model.model.layers[0].mlp.up_proj
    seen: dict[str, list[int]] = {"head": [], "layer": []}
    hooks = [
        module.register_forward_hook(lambda _, inputs, __, name=name: seen[name].append(len(inputs[0])))
        for name, module in (("head", head), ("layer", layer))
    ]
    try:
        assert linears.seconds(t_model, SMALL, step_tokens=5) > 0
    finally:
        for hook in hooks:
            hook.remove()
    assert seen["layer"] == [5, 3, 2, 2, 2, 1, 1, 1]
    assert seen["head"] == [3, 2, 2, 2, 1, 1, 1]


def sample(name: str, number: int, seconds: float, free: float = 2.0) -> dict[str, Any]:
    return {"item": "uniform", "round": number, "name": name, "requests": 2, "prompt_tokens": 10, "new_tokens": 12,
            "seconds": seconds, "kv_bytes": None if name == "linears" else 64, "load_1m": 0.5, "free_cores": free,
            "cores": 2}  # fmt: skip


def test_rows_pair_the_rounds() -> None:
    """Octavo is twice as fast in each round, also in one where the machine is three times slower."""
    both = [sample(*s) for n, t in enumerate((1.0, 3.0, 1.0)) for s in (("octavo", n, t), ("other", n, 2 * t))]
    ours, other, floor = rows([*both, *(sample("linears", n, 0.5) for n in range(3))])
    assert (ours["tokens_per_s"], ours["tokens_per_s_min"], ours["tokens_per_s_max"]) == (12, 4, 12)
    assert (other["octavo_ratio"], other["octavo_ratio_min"], other["octavo_ratio_max"]) == (2, 2, 2)
    assert (ours["percent_of_floor"], other["percent_of_floor"], floor["percent_of_floor"]) == (50, 25, 100)
    assert floor["kv_bytes_peak"] is None and ours["kv_bytes_peak"] == 64


def test_a_load_is_quiet_if_the_cores_are_free() -> None:
    assert Load(9.0, 1.9, 2).quiet and not Load(0.0, 1.7, 2).quiet
    seen = machine_load.watch(0.05)
    assert 0 <= seen.free_cores <= seen.cores and seen.load_1m >= 0


class TestCommand:
    ARGUMENTS = ("experiment=throughput", "limit=2", "repeats=2")

    def test_a_run(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "profile=true", "rivals=[transformers,vllm_cpu]")
        assert outcome.code == 0, outcome.err
        found = outcome.metrics["rows"]
        assert [(r["task"], r["name"]) for r in found] == [
            (task, name) for task in ("uniform", "ragged") for name in ("octavo", "transformers", "linears")
        ]
        assert all(r["rounds"] == 2 and r["tokens_per_s"] > 0 and r["new_tokens"] == 16 for r in found)
        taken = [(s["item"], s["round"], s["name"]) for s in samples(outcome.folder)]
        turns = ("octavo", "transformers", "linears")
        assert taken == [(task, n, name) for task in ("uniform", "ragged") for n in range(2) for name in turns]
        assert outcome.out.index("x as fast as transformers") < outcome.out.index("tokens/s")
        assert "of the linears-only floor" in outcome.out and "vllm_cpu did not run: it is not installed" in outcome.out
        assert (outcome.folder / "plots/throughput.png").stat().st_size > 5000
        trace = json.loads(gzip.decompress((outcome.folder / "trace.json.gz").read_bytes()))
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert {"engine: step", "engine: plan"} <= names and any("octavo" in name for name in names)
        assert "device_busy_percent" not in found[0]

    def test_the_stages_of_texts(self, octavo: Command, tiny_model: Path) -> None:
        arguments = (
            "experiment=throughput",
            "workloads=[uniform]",
            "rivals=[]",
            "repeats=1",
            "page_map=false",
            "limit=20",
        )
        row, floor = octavo(*arguments, f"model.path={tiny_model}").metrics["rows"]
        stages = [row[f"{stage}_percent"] for stage in ("tokenise", "plan", "compute", "wait", "detokenise")]
        assert all(0 <= stage <= 110 for stage in stages) and stages[2] > 0 and stages[3] == 0
        assert (
            row["text_tokens_per_s"] > 0 and row["text_tokens_per_s_one_thread"] > 0 and row["text_threads_ratio"] > 0
        )
        assert not any("text" in key for key in floor)
        without = octavo(*arguments, f"model.path={tiny_model}", "text=false").metrics["rows"]
        assert not any("text" in key or "tokenise" in key for row in without for key in row)

    def test_an_interrupted_run_goes_on(self, octavo: Command, tiny_model: Path) -> None:
        arguments = (*self.ARGUMENTS, f"model.path={tiny_model}", "workloads=[uniform]")
        folder = octavo(*arguments).folder
        file = folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:4]))  # the first round, and one contender of the second
        outcome = octavo(f"resume={folder}")
        assert outcome.code == 0, outcome.err
        assert file.read_text().splitlines(keepends=True)[:4] == lines[:4]
        assert [(s["round"], s["name"]) for s in samples(folder)] == [
            (n, name) for n in range(2) for name in ("octavo", "transformers", "linears")
        ]

    def test_a_request_that_the_model_cannot_hold_is_refused(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo("experiment=throughput", "workloads=[ragged]", f"model.path={tiny_model}")
        assert outcome.code == 1
        assert "workload ragged has a request of" in outcome.err and "the model at most 1024" in outcome.err

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("workloads=[unifrm]", "workloads=unifrm: unknown; did you mean 'uniform'?"),
            ("workloads=[]", "workloads is empty"),
            ("rivals=[vllm,vllm]", "rivals lists 'vllm' twice"),
            ("repeats=0", "repeats=0: must be at least 1"),
        ],
    )
    def test_refusals(self, override: str, message: str, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo("experiment=throughput", f"model.path={tiny_model}", override)
        assert outcome.code == 1 and message in outcome.err
