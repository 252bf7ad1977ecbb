"""Where decode steps begin to pay: pretended contexts, rows, beginnings, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core import SamplingParams
from octavo.scripts import pretended
from octavo.scripts.break_even_plots import surfaces
from octavo.scripts.build import method
from octavo.scripts.byte_model import ByteModel
from octavo.scripts.experiments.break_even import starts

from .conftest import Command, samples

ARGUMENTS = (
    "experiment=break_even", "contexts=[160,320]", "batches=[1,3]", "new_tokens=2", "rounds=2",
    "sparse.methods=[streaming,quest]", "sparse.budget_tokens=128",
    "sparse.overrides={streaming: {dense_layers: []}, quest: {dense_layers: []}}",
)  # fmt: skip


def test_a_surface(octavo: Command, tiny_model: Path) -> None:
    outcome = octavo(*ARGUMENTS, f"model.path={tiny_model}")
    assert outcome.code == 0, outcome.err
    rows = outcome.metrics["rows"]
    steps = [row for row in rows if "ms_per_step" in row]
    assert [(row["batch"], row["context"], row["method"]) for row in steps] == [
        (batch, context, name) for batch in (1, 3) for context in (160, 320) for name in ("dense", "streaming", "quest")
    ]
    for row in steps:
        assert row["ms_per_step"] > 0 and row["floor_ms"] > 0
        if row["method"] != "dense":
            assert row["speedup"] == pytest.approx(row["ms_dense"] / row["ms_per_step"])
            assert row["predicted_speedup"] == pytest.approx(row["floor_ms_dense"] / row["floor_ms"])
    by_place = {(row["method"], row["batch"], row["context"]): row for row in steps}
    assert by_place["streaming", 3, 320]["predicted_speedup"] > by_place["streaming", 1, 320]["predicted_speedup"] > 1
    assert by_place["streaming", 3, 320]["predicted_speedup"] > by_place["quest", 3, 320]["predicted_speedup"]
    begins = [row for row in rows if "predicted_from_tokens" in row]
    assert [(row["method"], row["batch"]) for row in begins] == [
        ("streaming", 1), ("quest", 1), ("streaming", 3), ("quest", 3),
    ]  # fmt: skip
    assert {file.name for file in (outcome.folder / "plots").iterdir()} == {"surface.png", "by_context.png"}
    assert len(samples(outcome.folder)) == 1 + 4 * 3 * 2
    again = octavo(f"resume={outcome.folder}")
    assert again.code == 0 and len(samples(again.folder)) == 1 + 4 * 3 * 2


def test_a_pretended_prompt_computes_nothing_and_holds_its_pages(make_llama: Any, engine_for: Any, drain: Any) -> None:
    """The decode steps after it are real: they read what was filled in, as many bytes as any."""
    engine, chosen = (
        engine_for(make_llama()),
        method("quest", budget_tokens=24, dense_layers=[], keep={"recent_tokens": 4}),
    )
    pretended.fill(engine, 3)
    before = engine._runner.kv.clone()
    params, prompt = SamplingParams(max_tokens=6, ignore_eos=True), list(range(3, 63))
    engine.submit(prompt, params, method=chosen, request_id="a")
    with pretended.prefill(engine):
        (first,) = engine.step()
    assert torch.equal(engine._runner.kv, before) and len(first.new_token_ids) == 1
    assert engine.stats().units_held == 15
    pretence = drain(engine).completions["a"].samples[0]
    real = engine_for(make_llama())
    real.submit(prompt, params, method=chosen, request_id="a")
    truth = drain(real).completions["a"].samples[0]
    assert (pretence.kv_bytes_read, pretence.digest_bytes_read) == (truth.kv_bytes_read, truth.digest_bytes_read)
    assert "forward" not in vars(engine._model) and "launches" not in vars(engine._runner)


@pytest.mark.parametrize("context", [33, 32])
def test_a_pretended_prompt_is_never_replayed(context: int, make_llama: Any, engine_for: Any, drain: Any) -> None:
    """Not even the last token of one that comes in chunks of 32."""
    engine = engine_for(make_llama(), execution="graph", step_tokens=32)
    pretended.fill(engine, 0)
    engine.submit(list(range(3, 3 + context)), SamplingParams(max_tokens=3, ignore_eos=True), request_id="a")
    with pretended.prefill(engine):
        found = []
        while not found:
            found = [token for output in engine.step() for token in output.new_token_ids]
    assert found == [0]  # the first of equal logits
    assert engine._flight is None
    assert len(drain(engine).completions["a"].samples[0].token_ids) == 3


def test_where_it_begins_is_where_every_longer_context_gains(make_llama: Any, engine_for: Any) -> None:
    chosen = method("streaming", budget_tokens=24, dense_layers=[], keep={"sink_tokens": 4, "recent_tokens": 4})
    model = ByteModel(engine_for(make_llama()), 0)
    measured = {100: 1.4, 200: 1.1, 400: 1.5, 800: 1.9}
    rows = [
        {"method": "streaming", "batch": 2, "context": context, "speedup": speedup, "predicted_speedup": speedup}
        for context, speedup in measured.items()
    ]
    methods = {"streaming": chosen}
    (row,) = starts(rows, model, methods, 1.3)
    assert (row["measured_from_tokens"], row["predicted_from_tokens"]) == (400, 32)  # 24 tokens read of 31.2 and more
    (never,) = starts(rows, model, methods, 2.0)
    assert never["measured_from_tokens"] is None and never["predicted_from_tokens"] == 52
    assert surfaces([{"method": "dense"}], 1.3) == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("contexts=[0]", "contexts=0: must be at least 1"),
        ("contexts=[1020]", "contexts=1020: with the timed steps"),
        ("gain=1", "gain=1.0: must be above 1"),
        ("batches=[2,2]", "batches lists 2 twice"),
    ],
)
def test_refusals(override: str, message: str, octavo: Command, tiny_model: Path) -> None:
    outcome = octavo(*ARGUMENTS, f"model.path={tiny_model}", override)
    assert outcome.code == 1 and message in outcome.err


@pytest.mark.gpu
def test_a_surface_on_a_gpu(octavo: Command) -> None:
    """Replayed steps on pretended contexts, of a shape that is known."""
    outcome = octavo(
        "experiment=break_even", "model.shape=tiny", "contexts=[512,1024]", "batches=[2]", "new_tokens=8", "rounds=1",
        "sparse.methods=[quest]", "sparse.budget_tokens=256", "sparse.overrides.quest.dense_layers=[]",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert all(row["speedup"] > 0 for row in outcome.metrics["rows"] if row["method"] == "quest" and "speedup" in row)
