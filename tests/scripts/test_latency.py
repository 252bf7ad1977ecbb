"""Requests that come at a rate: arrivals, the driver on a clock that the test turns, rows, figures and the command."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from octavo.core.inspection.trace_recorder import TraceRecorder
from octavo.scripts import generate_batch, latency_plots, step_profile, vllm_server
from octavo.scripts.generate_batch import GenerateBatch
from octavo.scripts.latency_rows import passed, rows
from octavo.scripts.octavo_server import AdmissionTimes, OctavoServer, OctavoService
from octavo.scripts.refusal import ConfigError
from octavo.scripts.serving import Clock, Journey, Served, serve
from octavo.scripts.step_profile import device_busy_percent, profile_middle
from octavo.scripts.timed_requests import TimedRequest, timed
from octavo.scripts.workloads import Workload

from .conftest import Command, samples

WORKLOAD = Workload("small", ([1, 2, 3], [4, 5], [6], [7] * 9), (4, 2, 1, 3))


class Watch:
    """A clock that only moves when somebody sleeps or works."""

    def __init__(self) -> None:
        self.time = 100.0
        self.slept: list[float] = []
        self.clock = Clock(lambda: self.time, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


class OneASecond:
    """Serves everybody at once, a token each in a step of a second."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.left: dict[int, int] = {}
        self.admitted: dict[int, float] = {}

    def submit(self, number: int, request: TimedRequest) -> None:
        self.left[number] = request.new_tokens
        self.admitted[number] = self.watch.time

    def step(self) -> Iterable[tuple[int, int]]:
        self.watch.time += 1
        running = [number for number, left in self.left.items() if left]
        for number in running:
            self.left[number] -= 1
        return [(number, 1) for number in running]

    def admitted_at(self, number: int) -> float | None:
        return None if number == 2 else self.admitted[number]


class TestArrivals:
    def test_a_rate_draws_one_pattern_out(self) -> None:
        slow, fast = (timed(WORKLOAD, rate, seed=1) for rate in (2.0, 4.0))
        assert [r.prompt for r in slow] == list(WORKLOAD.prompts) and [r.new_tokens for r in slow] == [4, 2, 1, 3]
        assert 0 < slow[0].arrival_s < slow[1].arrival_s < slow[2].arrival_s
        assert [r.arrival_s for r in fast] == pytest.approx([r.arrival_s / 2 for r in slow])
        assert [r.arrival_s for r in slow] != [r.arrival_s for r in timed(WORKLOAD, 2.0, seed=2)]

    def test_offline_is_all_at_once(self) -> None:
        assert [r.arrival_s for r in timed(WORKLOAD, None, seed=1)] == [0, 0, 0, 0]

    def test_the_long_one_comes_with_the_middle_one(self) -> None:
        found = timed(WORKLOAD, 2.0, seed=1, last_is_long=True)
        assert [r.long for r in found] == [False, True, False, False]
        assert found[1].arrival_s == found[2].arrival_s and found[1].prompt == [7] * 9
        assert [r.arrival_s for r in found if not r.long] == [r.arrival_s for r in timed(WORKLOAD, 2.0, seed=1)[:3]]


class TestServing:
    def test_times_run_from_the_arrival(self) -> None:
        """The second request comes in the middle of a step; before the third there is nothing to do."""
        watch = Watch()
        requests = [TimedRequest(0.0, [1], 2), TimedRequest(0.5, [1], 1), TimedRequest(10.0, [1], 1)]
        assert serve(OneASecond(watch), requests, watch.clock) == [
            Journey(0.0, [1.0, 2.0], 0.0),
            Journey(0.5, [2.0], 1.0),
            Journey(10.0, [11.0], None),
        ]
        assert watch.slept == [8.0]

    def test_octavo_tells_admissions_and_preemptions(self, t_model: Any, engine_for: Any) -> None:
        """One at a time, a token a step of a second: the second waits for the four tokens of the first."""
        watch = Watch()
        engine = engine_for(t_model, max_seqs=1, prefix_cache=True)
        ticking(engine, watch)
        service = OctavoService(engine, "dense", None)
        requests = timed(Workload("two", ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]), (4, 2)), None, 0)
        for _ in range(2):
            assert service.serve(requests, watch.clock) == Served(
                [Journey(0.0, [1, 2, 3, 4], 0.0), Journey(0.0, [5, 6], 4.0)], 0
            )
        # The salt is that of a pass: the second prompt finds the page of the first one, and nothing of the first pass.
        assert engine.stats().hit_tokens == 2 * 4

    def test_admissions_are_noted_wherever_an_engine_may_call_its_recorder(self) -> None:
        calls = {name for name in vars(TraceRecorder) if not name.startswith("_")} - {"trace"}
        assert "admitted" in calls and calls <= set(vars(AdmissionTimes))

    def test_preemptions_are_those_of_the_pass(self, t_model: Any, engine_for: Any) -> None:
        engine = engine_for(t_model, pool_tokens=16, max_seqs=2, prefix_cache=False)
        service = OctavoService(engine, "dense", None)
        requests = timed(Workload("two", ([1] * 6, [2] * 6), (8, 8)), None, 0)
        counts = [service.serve(requests, Clock()).preemptions for _ in range(2)]
        assert counts[0] == counts[1] and counts[0]

    def test_a_request_that_outgrows_the_pool_is_refused(self, t_model: Any, engine_for: Any) -> None:
        engine = engine_for(t_model)
        server = OctavoServer(engine, None, Clock(), "salt")
        server.submit(7, TimedRequest(0.0, [1, 2, 3], 4))
        engine.abort("7")
        with pytest.raises(ConfigError, match=r"request 7 ended early \(abort\) with a pool of 400 tokens"):
            server.step()

    def test_vllm_is_stepped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Engine:
            def __init__(self) -> None:
                self.added: dict[str, Any] = {}

            def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
                self.added[request_id] = prompt, params

            def step(self) -> list[Any]:
                metrics = SimpleNamespace(scheduled_ts=103.0)
                outputs = [SimpleNamespace(token_ids=[5, 6])]
                return [SimpleNamespace(request_id=name, metrics=metrics, outputs=outputs) for name in self.added]

        vllm, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")
        vllm.SamplingParams = lambda **keywords: SimpleNamespace(**keywords)  # type: ignore[attr-defined]
        sampling.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
        watch, engine = Watch(), Engine()
        journeys = serve(vllm_server.VLLMServer(engine), [TimedRequest(0.0, [1, 2], 2)], watch.clock)
        assert journeys == [Journey(0.0, [0.0, 0.0], 3.0)]
        prompt, params = engine.added["0"]
        assert prompt == {"prompt_token_ids": [1, 2]}
        assert (params.max_tokens, params.ignore_eos, params.output_kind) == (2, True, "delta")

    @pytest.mark.skipif(generate_batch.missing() is not None, reason=str(generate_batch.missing()))
    def test_generate_batch_stamps_every_token(self, t_model: Any) -> None:
        requests = timed(WORKLOAD, 200.0, seed=0)
        before = t_model.config._attn_implementation
        served = GenerateBatch(t_model, WORKLOAD, step_tokens=64, at_once=8).serve(requests, Clock())
        assert [len(j.token_s) for j in served.journeys] == [4, 2, 1, 3] and served.preemptions is None
        for request, journey in zip(requests, served.journeys, strict=True):
            moments = [request.arrival_s, journey.admitted_s, *journey.token_s]
            assert journey.arrival_s == request.arrival_s and moments == sorted(moments)
        assert t_model.config._attn_implementation == before


def ticking(engine: Any, watch: Watch) -> None:
    """Let each step of an engine take a second."""
    step = engine.step

    def stepped() -> Any:
        news = step()
        watch.time += 1
        return news

    engine.step = stepped


def sample(journeys: Sequence[Journey], requests: Sequence[TimedRequest], **more: Any) -> dict[str, Any]:
    about = {"item": "2/s", "name": "octavo", "method": "dense", "rate_per_s": 2.0, "free_cores": 2.0, "load_1m": 0.1}
    return {**about, **passed(requests, Served(list(journeys), 3)), **more}


class TestRows:
    REQUESTS = (
        TimedRequest(0.0, [1] * 5, 3),
        TimedRequest(1.0, [1] * 50, 1, long=True),
        TimedRequest(1.0, [1] * 7, 3),
    )
    JOURNEYS = (
        Journey(0.0, [0.5, 0.75, 3.0], 0.25),
        Journey(1.0, [4.0], 2.0),
        Journey(1.0, [1.5, 1.75, 2.0], 1.25),
    )

    def test_every_column(self) -> None:
        (row,) = rows([sample(self.JOURNEYS, self.REQUESTS)], ttft_limit_s=0.5, itl_limit_s=0.25)
        assert (row["name"], row["method"], row["task"], row["preemptions"]) == ("octavo", "dense", "2/s", 3)
        assert (row["requests"], row["prompt_tokens"], row["new_tokens"]) == (3, 62, 7)
        assert (row["offered_per_s"], row["served_per_s"], row["tokens_per_s"]) == (2.0, 3 / 4, 7 / 4)
        assert (row["goodput_per_s"], row["good_percent"]) == (1 / 4, 50)  # the first one's gaps are too wide
        assert (row["ttft_p50_ms"], row["ttft_p99_ms"], row["long_ttft_ms"]) == (500, 500, 3000)
        assert (row["itl_p50_ms"], row["itl_max_ms"]) == (250, 2250)
        assert row["itl_p99_ms"] == pytest.approx(250 + 0.97 * 2000) and row["itl_p95_ms"] == pytest.approx(1950)
        assert (row["e2e_p50_s"], row["e2e_p99_s"]) == (2.0, pytest.approx(2.98))
        assert (row["queue_p50_ms"], row["queue_p95_ms"]) == (250, 250)
        assert row["itl_p99_while_prefill_ms"] == 2250  # of the gaps, only that one touches 2.0 to 4.0

    def test_limits_are_met_where_they_are_reached(self) -> None:
        for limits, good in (((0.5, 1.25), 2), ((0.5, 1.24), 1), ((0.49, 9.0), 0)):
            (row,) = rows([sample(self.JOURNEYS, self.REQUESTS)], *limits)
            assert row["good_percent"] == 100 * good / 2

    def test_an_unknown_admission(self) -> None:
        """The long prompt's time then begins with its arrival, and queueing times are not told."""
        unknown = [Journey(j.arrival_s, j.token_s) for j in self.JOURNEYS]
        (row,) = rows([sample(unknown, self.REQUESTS)], 1.0, 1.0)
        assert row["queue_p50_ms"] is None
        assert row["itl_p99_while_prefill_ms"] == pytest.approx(250 + 0.98 * 2000)

    def test_gaps_before_and_after_the_long_prompt_do_not_count(self) -> None:
        """It is computed from 2.0 to 4.0; the gaps are 1.0 to 1.5, 1.5 to 3.0, 3.0 to 4.5 and 4.5 to 9.0."""
        journeys = [Journey(0.0, [1.0, 1.5, 3.0, 4.5, 9.0]), Journey(1.0, [4.0], 2.0)]
        requests = [TimedRequest(0.0, [1], 5), TimedRequest(1.0, [1] * 50, 1, long=True)]
        (row,) = rows([sample(journeys, requests)], 1.0, 1.0)
        assert row["itl_p99_while_prefill_ms"] == 1500 and row["itl_max_ms"] == 4500

    def test_one_token_at_once(self) -> None:
        (row,) = rows([sample([Journey(0.0, [0.5])], [TimedRequest(0.0, [1], 1)], rate_per_s=None)], 1.0, 1.0)
        assert row["offered_per_s"] is None and row["itl_p50_ms"] is None and row["itl_max_ms"] is None
        assert row["good_percent"] == 100 and "itl_p99_while_prefill_ms" not in row

    def test_figures(self) -> None:
        taken = [
            sample(self.JOURNEYS, self.REQUESTS),
            sample(self.JOURNEYS, self.REQUESTS, method="quest", item="offline", rate_per_s=None),
        ]
        figure = latency_plots.percentiles_over_rate(rows(taken, 1.0, 1.0))
        assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["octavo", "octavo quest"]
        assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()] == ["2/s", "offline"]
        (line,) = latency_plots.gaps_cdf(taken).axes[0].get_lines()
        assert line.get_xdata().tolist() == [250, 250, 250, 2250]
        assert line.get_ydata().tolist() == [1, 0.75, 0.5, 0.25]


class TestProfile:
    def test_the_busy_share_is_the_union_of_kernels_within_the_steps(self) -> None:
        def event(kind: str, begin: float, length: float, name: str = "gemm") -> dict[str, Any]:
            return {"cat": kind, "name": name, "ts": begin, "dur": length}

        steps = [event("user_annotation", begin, 40, step_profile.STEP) for begin in (100, 160)]  # 100 to 200
        kernels = [
            event("kernel", 90, 20),  # 10 of it
            event("kernel", 120, 20),
            event("kernel", 125, 5),  # within the one before, in another stream
            event("kernel", 130, 20),  # 10 more
            event("kernel", 195, 50),  # 5 of it
        ]
        others = [
            event("gpu_user_annotation", 100, 100, step_profile.STEP),
            event("gpu_memcpy", 150, 9),
            event("user_annotation", 0, 900, "engine: plan"),
            {"ph": "M", "name": "process_name"},
        ]
        assert device_busy_percent([*others, *kernels, *steps]) == 45
        assert device_busy_percent([*others, *steps]) is None
        profile = step_profile.Profile(8, 45.0)
        assert profile.columns == {"device_busy_percent": 45.0} and "45.0 % of 8 steps" in profile.notes[0]

    @pytest.mark.parametrize(("new_tokens", "steps"), [(40, 8), (6, 3)], ids=["middle", "end"])
    def test_steps_from_the_middle(self, new_tokens: int, steps: int, tmp_path: Path) -> None:
        file = tmp_path / step_profile.FILE
        profile = profile_middle(OneASecond(Watch()), [TimedRequest(0.0, [1], new_tokens)], file, "cpu")
        assert profile.steps == steps and profile.columns == {} and profile.notes == []
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        assert sum(e.get("name") == step_profile.STEP for e in events) == steps


class TestCommand:
    ARGUMENTS = ("experiment=latency", "limit=3", "rates=[100,offline]", "sparse.budget_tokens=128", "page_map=false")

    def test_a_run(self, octavo: Command, tiny_model: Path) -> None:
        dense_layers = "sparse.overrides.quest.dense_layers=[]"
        outcome = octavo(
            *self.ARGUMENTS, f"model.path={tiny_model}", "profile=true", "rivals=[vllm_cpu]", "long_prompt_tokens=90",
            dense_layers,
        )  # fmt: skip
        assert outcome.code == 0, outcome.err
        found = outcome.metrics["rows"]
        assert [(r["task"], r["name"], r["method"]) for r in found] == [
            (rate, "octavo", method) for rate in ("100/s", "offline") for method in ("dense", "quest")
        ]
        assert all(r["requests"] == 4 and r["new_tokens"] == 32 and r["preemptions"] == 0 for r in found)
        assert all(r["ttft_p50_ms"] <= r["ttft_p95_ms"] <= r["ttft_p99_ms"] for r in found)
        assert all(0 < r["itl_p50_ms"] <= r["itl_p99_ms"] <= r["itl_max_ms"] for r in found)
        assert all(r["itl_p99_while_prefill_ms"] is None or r["long_ttft_ms"] > 0 for r in found)
        taken = samples(outcome.folder)
        assert [r["arrival_s"] for r in taken[0]["requests"]] == [r["arrival_s"] for r in taken[1]["requests"]]
        assert all(r["admitted_s"] >= r["arrival_s"] for s in taken for r in s["requests"])
        assert "vllm_cpu did not run: it is not installed." in outcome.out and "Goodput: requests" in outcome.out
        assert all((outcome.folder / f"plots/{name}.png").stat().st_size > 5000 for name in ("latency", "gaps"))
        events = json.loads(gzip.decompress((outcome.folder / step_profile.FILE).read_bytes()))["traceEvents"]
        assert {"engine: step", "engine: plan"} <= {event.get("name") for event in events}

    def test_an_interrupted_run_goes_on(self, octavo: Command, tiny_model: Path) -> None:
        folder = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "sparse.methods=[dense,streaming]").folder
        file = folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:3]))
        outcome = octavo(f"resume={folder}")
        assert outcome.code == 0, outcome.err
        assert file.read_text().splitlines(keepends=True)[:3] == lines[:3]
        assert [(s["item"], s["method"]) for s in samples(folder)] == [
            (rate, method) for rate in ("100/s", "offline") for method in ("dense", "streaming")
        ]
        assert "octavo: warming up" not in outcome.out and "octavo streaming: warming up" in outcome.out

    def test_random_weights_are_served_random_tokens(self, octavo: Command) -> None:
        outcome = octavo(
            "experiment=latency", "model=random", "model.shape=tiny", "model.device=cpu", "limit=2", "rates=[offline]",
            "sparse.methods=[dense]", "rivals=[vllm]", "page_map=false",
        )  # fmt: skip
        assert outcome.code == 0, outcome.err
        (sample,) = samples(outcome.folder)
        assert (sample["name"], sample["method"]) == ("octavo", "dense")
        assert "vllm did not run: it is for cuda" in outcome.out

    def test_a_long_prompt_that_the_model_cannot_hold_is_refused(self, octavo: Command, tiny_model: Path) -> None:
        arguments = ("requests=2", "workload=uniform", "long_prompt_tokens=1010", f"model.path={tiny_model}")
        outcome = octavo("experiment=latency", *arguments)
        assert outcome.code == 1
        assert "has a request of 1026 tokens, and the model at most 1024" in outcome.err

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("rates=[]", "rates is empty"),
            ("rates=[0]", "rates=0: must be requests a second, above 0, or offline"),
            ("rates=[ofline]", "rates=ofline: must be"),
            ("rates=[2,2]", "rates lists 2 twice"),
            ("workload=raged", "workload=raged: unknown; did you mean 'ragged'?"),
            ("rivals=[transformers]", "rivals=transformers: unknown"),
            ("requests=0", "requests=0: must be at least 1"),
            ("long_prompt_tokens=0", "long_prompt_tokens=0: must be at least 1"),
            ("ttft_limit_s=0", "ttft_limit_s=0.0: must be above 0"),
            ("vllm_memory_fraction=1.5", "vllm_memory_fraction=1.5: must be above 0 and at most 1"),
        ],
    )
    def test_refusals(self, override: str, message: str, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo("experiment=latency", f"model.path={tiny_model}", override)
        assert outcome.code == 1 and message in outcome.err
