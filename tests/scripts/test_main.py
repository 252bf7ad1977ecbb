"""The command as a whole, on a tiny model: files, interruptions, resumption, sweeps, paths."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerFast

from octavo.scripts import benchmarks
from octavo.scripts.experiments import code_completion
from octavo.scripts.schema import EXPERIMENTS

from .conftest import Command, Outcome, samples, strict

TIMES = ("seconds", "tokens_per_s", "probe_seconds", "device_bytes_peak", "units_held_peak")


def same(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Equal but for times; log-likelihoods to fp32, since what is cached decides the shapes that are multiplied."""
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for key in row.keys() - set(TIMES):
            assert row[key] == (
                other[key] if isinstance(row[key], str) else pytest.approx(other[key], rel=1e-4, abs=1e-6)
            ), key


def failing_at(count: int, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the main job run ``count`` items, then do ``action`` in the next one."""
    complete, done = code_completion.complete, 0

    def counted(*arguments: Any) -> Any:
        nonlocal done
        done += 1
        if done == count + 1:
            action()
        return complete(*arguments)

    monkeypatch.setattr(code_completion, "complete", counted)


def stop() -> None:
    raise RuntimeError("boom")


SEEING = ("image_benchmarks", "interleaved", "page_ratio", "sessions", "visual_importance")
"""Experiments that take a model that sees."""

TESTED_BY_THEMSELVES = (
    *("allocators", "break_even", "calibrate", "compare", "concurrency", "decode_step", "elastic", "eviction"),
    *("fragmentation", "heads", "host_tier", "image_benchmarks", "image_sharing", "interleaved", "kept_tokens"),
    *("knobs", "latency", "layer_groups", "lossless", "multi_turn", "page_ratio", "page_size", "pareto"),
    *("perplexity", "placements", "protocols", "ruler", "sessions", "sharing", "structure", "throughput"),
    "visual_importance",
)
"""Experiments whose own tests run the command to its end; one that has none yet runs here by default."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in TESTED_BY_THEMSELVES else ()) for name in EXPERIMENTS],
)
def test_limit_makes_any_experiment_a_smoke_test(
    name: str,
    octavo: Command,
    tiny: list[str],
    tiny_model: Path,
    windowed_model: Path,
    request: pytest.FixtureRequest,
) -> None:
    if name == "kernels":
        pytest.skip("Triton's interpreter needs a process of its own: test_kernels_experiment.py")
    model = f"model.path={tiny_model}"
    runs = [str(octavo(*tiny, "limit=2").folder) for _ in range(2)] if name == "compare" else []
    demo = f"model.path={request.getfixturevalue('tiny_demo')}" if name in SEEING else ""
    dense_in_none = "sparse.overrides.quest.dense_layers=[]"
    arguments = {
        "break_even": [model, "contexts=[200,300]", "new_tokens=2", "rounds=1", "sparse.budget_tokens=128"],
        "compare": [f"runs=[{','.join(runs)}]"],
        "heads": [
            model,
            "prompt_tokens=128",
            "new_tokens=12",
            "sparse.methods=[dense,duo_attention]",
            "sparse.budget_tokens=96",
        ],
        "host_tier": [
            model,
            "page_sizes=[16]",
            "replacements=[lru]",
            "context_tokens=500",
            "slack_tokens=32",
            "new_tokens=4",
            "kinds=[text]",
            "sparse.budget_tokens=160",
            dense_in_none,
        ],
        "image_benchmarks": [demo, "max_new_tokens=4", "benchmarks=[captions]"],
        "interleaved": [demo, "exams=[colour]"],
        "kept_tokens": [
            model,
            f"kvpress_python={request.getfixturevalue('kvpress_python')}",
            "contexts=[200]",
            "budget_tokens=64",
            "only=[streaming,snapkv]",
        ],
        "lossless": [
            model,
            "contexts=[300]",
            "documents=2",
            "drafts=[2]",
            "new_tokens=8",
            "sparse.methods=[quest]",
            "sparse.budget_tokens=128",
            dense_in_none,
        ],
        "page_ratio": [demo, "images=[16]", "policies=[1,1.5]", "images_a_prompt=2"],
        "placements": [
            model,
            "context_tokens=500",
            "slack_tokens=32",
            "new_tokens=4",
            "kinds=[text]",
            "pool_requests=1",
            "sparse.budget_tokens=160",
            dense_in_none,
        ],
        "sessions": [demo, "turns=2", "forks=1", "new_tokens=4"],
        "visual_importance": [demo, "images=2", "max_new_tokens=3", "shares=[0.5]", "sparse.methods=[fastv]"],
        "structure": [*tiny[:3], "sparse.methods=[quest]", "sparse.budget_tokens=128", dense_in_none],
        "code_completion": tiny,
        "image_sharing": [
            "model.shape=tiny",
            "images=2",
            "image_tokens=48",
            "new_tokens=2",
            "modes=[zero_copy,repair]",
        ],
        "layer_groups": [f"model.path={windowed_model}", "contexts=[80,100,120]"],
        "multi_turn": [model, "length=500"],
        "pareto": [*tiny, "sparse.budget_tokens=1024", "levels=[0.7]"],
        "protocols": [model, "length=600", "sparse.budget_tokens=128", "dense_layers=[[]]"],
        "perplexity": [model, "context_tokens=300", "scored_tokens=8"],
        "ruler": [model, "lengths=[800]", "max_new_tokens=8"],
    }
    outcome = octavo(f"experiment={name}", "limit=2", *arguments.get(name, [model]))
    assert outcome.code == 0, outcome.err
    assert outcome.metrics["complete"] is True and outcome.metrics["rows"]
    assert outcome.folder.parent == Path.cwd() / "runs" / name
    if name in ("code_completion", "devices", "generate"):  # elsewhere a limit shortens what each item takes
        assert len({sample["item"] for sample in samples(outcome.folder)}) == 2


def test_a_run_folder_holds_everything(octavo: Command, tiny: list[str]) -> None:
    outcome = octavo(*tiny, "limit=3")
    folder = outcome.folder
    assert folder.is_absolute()
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "config.yaml",
        "methods.json",
        "metrics.json",
        "plots",
        "report.html",
        "samples.jsonl",
    ]
    plots = {"pareto.png", "by_length.png", "per_item.png", "choices.png"}
    assert {file.name for file in (folder / "plots").iterdir()} == plots
    config = OmegaConf.load(folder / "config.yaml")
    assert config.limit == 3 and config.engine.page_tokens == 16 and "${" not in (folder / "config.yaml").read_text()
    report = (folder / "report.html").read_text()
    assert report.count("data:image/png;base64,") == 4 and "http" not in report.replace("http-equiv", "")

    rows = outcome.metrics["rows"]
    assert [row["method"] for row in rows] == ["dense", "streaming", "quest"]
    for row in rows:
        assert row["name"] == "octavo" and row["task"] == "code_lines" and row["items"] == 3 and row["failed"] == 0
        assert row["kv_bytes_per_token"] == row["predicted_kv_bytes_per_token"] > 0
        assert row["exact_match_ci"][0] <= row["exact_match"] <= row["exact_match_ci"][1]
        assert row["perplexity_ci"][0] <= row["perplexity"] <= row["perplexity_ci"][1]
        assert row["units_held_peak"] > 0 and row["device_bytes_peak"] > 0 and row["tokens_per_s"] > 0
    assert rows[1]["kv_bytes_per_token"] < rows[0]["kv_bytes_per_token"]
    assert "edit_similarity_vs_dense" not in rows[0] and "edit_similarity_vs_dense_ci" in rows[1]


def test_dense_computes_the_prompt_and_the_others_find_it(octavo: Command, tiny: list[str]) -> None:
    for sample in samples(octavo(*tiny, "limit=1").folder):
        whole_pages = (sample["prompt_tokens"] - 1) // 16 * 16
        assert sample["cached_tokens"] == (0 if sample["method"] == "dense" else whole_pages)


INTERRUPTIONS = {
    "ctrl-c": (lambda: signal.raise_signal(signal.SIGINT), 130),
    "terminated": (lambda: signal.raise_signal(signal.SIGTERM), 143),
    "exception": (stop, 1),
}


def test_an_interrupted_run_is_valid_and_goes_on(
    octavo: Command, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after 2 of 5 items, resumed and interrupted after one more, and again, and finished."""
    arguments, finished = tiny, 0
    for items, (how, (action, code)) in zip((2, 1, 1), INTERRUPTIONS.items(), strict=True):
        with monkeypatch.context() as patch:
            failing_at(items, action, patch)
            outcome = octavo(*arguments)
        finished += items
        assert outcome.code == code, how
        assert outcome.metrics["complete"] is False
        assert [row["items"] for row in outcome.metrics["rows"]] == [finished] * 3
        assert len(samples(outcome.folder)) == 3 * finished
        if how == "exception":
            assert "RuntimeError: boom" in outcome.err and "in stop" in (outcome.folder / "run.log").read_text()
        else:
            assert f"go on with: octavo resume={outcome.folder}" in outcome.err
        arguments = [f"resume={outcome.folder}"]

    with monkeypatch.context() as patch:
        failing_at(1, stop, patch)  # the one that is left, and no more
        last = octavo(*arguments)
    assert last.code == 0, last.err
    assert f"resume={last.folder}" == arguments[0]
    assert last.metrics["complete"] is True
    done = [(sample["item"], sample["method"]) for sample in samples(last.folder)]
    assert len(done) == len(set(done)) == 15
    same(last.metrics["rows"], octavo(*tiny).metrics["rows"])


def test_an_item_that_lacks_one_method_gets_that_one(octavo: Command, tiny: list[str]) -> None:
    first = octavo(*tiny, "limit=2")
    file = first.folder / "samples.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:20])
    second = octavo(f"resume={first.folder}")
    assert second.code == 0, second.err
    assert [s["output"] for s in samples(second.folder)] == [s["output"] for s in map(json.loads, lines)]


def test_a_finished_run_has_nothing_left(octavo: Command, tiny: list[str]) -> None:
    first = octavo(*tiny, "limit=2")
    before = (first.folder / "samples.jsonl").read_bytes()
    assert octavo(f"resume={first.folder}").code == 0
    assert (first.folder / "samples.jsonl").read_bytes() == before


def test_resuming_with_other_settings_is_refused(octavo: Command, tiny: list[str]) -> None:
    first = octavo(*tiny, "limit=2")
    refused = octavo(f"resume={first.folder}", *tiny, "limit=2", "sparse.budget_tokens=64")
    assert refused.code == 1 and "sparse.budget_tokens (128 there, 64 now)" in refused.err
    assert first.metrics["complete"] is True
    assert octavo(f"resume={first.folder}", *tiny, "limit=2").code == 0


def test_a_folder_with_a_run_is_refused(octavo: Command, tiny: list[str]) -> None:
    first = octavo(*tiny, "limit=1", "hydra.run.dir=here")
    assert first.folder == Path.cwd() / "here"
    before = {file: file.read_bytes() for file in first.folder.rglob("*") if file.is_file()}
    second = octavo(*tiny, "limit=1", "hydra.run.dir=here")
    assert second.code == 1 and "already holds a run" in second.err
    assert {file: file.read_bytes() for file in first.folder.rglob("*") if file.is_file()} == before


def test_a_saved_configuration_runs_again_from_anywhere(
    octavo: Command, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = octavo(*tiny, "limit=2")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = octavo("--config-path", str(first.folder), "--config-name", "config", "tracking.mode=off")
    assert again.code == 0, again.err
    assert again.folder != first.folder
    assert again.folder.parent == tmp_path / "elsewhere" / "runs" / "code_completion"
    assert [entry.name for entry in (tmp_path / "elsewhere").iterdir()] == ["runs"]
    same(again.metrics["rows"], first.metrics["rows"])


def jobs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "multirun" / "code_completion").glob("*/*-*"))


def test_the_jobs_of_a_sweep_are_apart(
    octavo: Command, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three jobs whose second raises: the others complete, it says so at once and in its own log, the exit is not 0."""
    complete = code_completion.complete

    def second_raises(item: Any, methods: Any, engine: Any, config: Any, *more: Any) -> Any:
        if config.engine.page_tokens == 32:
            raise RuntimeError("boom")
        return complete(item, methods, engine, config, *more)

    monkeypatch.setattr(code_completion, "complete", second_raises)
    outcome = octavo("-m", *tiny, "limit=1", "engine.page_tokens=16,32,8")
    assert outcome.code == 1
    folders = jobs(tmp_path)
    assert [folder.name.split("-")[0] for folder in folders] == ["0", "1", "2"]
    assert [strict(folder / "metrics.json")["complete"] for folder in folders] == [True, False, True]
    assert [(folder / "run.log").exists() for folder in folders] == [False, True, False]
    log = (folders[1] / "run.log").read_text()
    assert "Traceback" in log and "RuntimeError: boom" in log
    assert [OmegaConf.load(folder / "config.yaml").engine.page_tokens for folder in folders] == [16, 32, 8]
    assert outcome.out.count("run: ") == 3


def test_a_sweep_with_a_misspelt_key_runs_nothing(octavo: Command, tiny: list[str], tmp_path: Path) -> None:
    outcome = octavo("-m", *tiny, "engine.page_tokns=16,32")
    assert outcome.code == 1 and "did you mean 'engine.page_tokens'?" in outcome.err
    assert not jobs(tmp_path)


@pytest.mark.parametrize("chdir", [False, True])
@pytest.mark.parametrize("sweep", [False, True])
def test_paths_are_relative_to_the_launch_directory(
    sweep: bool, chdir: bool, octavo: Command, tiny: list[str], tiny_model: Path, items_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "items.jsonl.gz").symlink_to(items_file)
    (tmp_path / "mine.yaml").write_text("defaults:\n  - /sparse@_global_: streaming\n  - _self_\ndense_layers: []\n")
    outcome = octavo(
        *(["-m"] if sweep else []),
        "model.path=model",
        "task.path=items.jsonl.gz",
        "task.max_new_tokens=4",
        "sparse.methods=[dense,./mine.yaml]",
        "sparse.budget_tokens=128",
        "limit=1",
        f"hydra.job.chdir={chdir}",
    )
    assert outcome.code == 0, outcome.err
    assert outcome.folder.is_relative_to(tmp_path / ("multirun" if sweep else "runs"))
    assert OmegaConf.load(outcome.folder / "config.yaml").model.path == str(tmp_path / "model")
    assert Path.cwd() == tmp_path

    missing = octavo(*tiny, "task.path=nothing.jsonl.gz", f"hydra.job.chdir={chdir}")
    assert missing.code == 1 and f"{tmp_path}/nothing.jsonl.gz" in missing.err


def test_a_corrupt_item_file_is_named(octavo: Command, tiny: list[str], items_file: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(items_file.read_bytes()[:-20])
    outcome = octavo(*tiny, f"task.path={tmp_path}/cut.gz")
    assert outcome.code == 1 and f"{tmp_path}/cut.gz: corrupt or cut short" in outcome.err
    assert "Traceback" not in outcome.err


def test_an_item_that_does_not_fit_is_recorded_and_the_rest_goes_on(octavo: Command, tiny: list[str]) -> None:
    outcome = octavo(*tiny, "task.max_prompt_tokens=110")
    assert outcome.code == 0, outcome.err
    errors = [sample for sample in samples(outcome.folder) if "error" in sample]
    assert [sample["item"] for sample in errors] == ["demo/use.py:4"] * 3
    assert all("above the limit of 110" in sample["error"] for sample in errors)
    assert [(row["items"], row["failed"]) for row in outcome.metrics["rows"]] == [(4, 1)] * 3


def test_a_gold_line_that_cannot_be_encoded_costs_one_item(
    octavo: Command, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = benchmarks.load

    def one_bad(*arguments: Any) -> list[benchmarks.Item]:
        first, *rest = load(*arguments)
        return [Unencodable.of(first), *rest]

    class Unencodable(str):
        @classmethod
        def of(cls, item: benchmarks.Item) -> benchmarks.Item:
            return dataclasses.replace(item, gold=cls(item.gold))

    encode = PreTrainedTokenizerFast.encode

    def refusing(self: Any, text: str, *rest: Any, **more: Any) -> Any:
        if isinstance(text, Unencodable):
            raise ValueError("cannot encode this")
        return encode(self, text, *rest, **more)

    monkeypatch.setattr(benchmarks, "load", one_bad)
    monkeypatch.setattr(PreTrainedTokenizerFast, "encode", refusing)
    outcome = octavo(*tiny, "limit=2")
    assert outcome.code == 0, outcome.err
    assert [s.get("error") for s in samples(outcome.folder)] == ["cannot encode this"] * 3 + [None] * 3


def test_a_run_in_which_nothing_could_be_served_failed(octavo: Command, tiny: list[str]) -> None:
    outcome = octavo(*tiny, "task.max_prompt_tokens=20")
    assert outcome.code == 1 and "none of the 5 items could be served: demo/use.py:0: " in outcome.err
    assert len(samples(outcome.folder)) == 15


def test_a_full_disk_is_one_clear_message(octavo: Command, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(count: int) -> None:
        real, left = os.fsync, count

        def fsync(file: int) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(file)

        patch.setattr(os, "fsync", fsync)

    with monkeypatch.context() as patch:
        full(0)
        nothing = octavo(*tiny, "hydra.run.dir=here")
    assert nothing.code == 1 and nothing.err.startswith("octavo: no space left") and nothing.err.count("\n") == 1
    assert not Path("here").exists()

    with monkeypatch.context() as patch:
        full(
            7
        )  # the settings, the first metrics, an item's three samples, its metrics, and one sample of the second item
        first = octavo(*tiny)
    assert first.code == 1 and "no space left while writing" in first.err and "Traceback" not in first.err
    assert first.metrics["complete"] is False
    assert len(samples(first.folder)) == 4
    assert octavo(f"resume={first.folder}").metrics["complete"] is True


@pytest.mark.parametrize(
    "method, reason",
    [
        ("loki", "digest.file is not set, and this method needs calibration"),
        ("tidal", "dense_layers [2, 13] are not among the 2 layers"),
        ("visual_knorm", "rates the tokens of images, and this engine reads none"),
    ],
)
def test_generate_refuses_a_method_that_cannot_serve_the_model(
    method: str, reason: str, octavo: Command, tiny_model: Path
) -> None:
    outcome = octavo("experiment=generate", f"model.path={tiny_model}", "prompts=[hi]", f"method={method}")
    assert outcome.code == 1 and "Traceback" not in outcome.err
    assert f"method {method}: " in outcome.err and reason in outcome.err


def test_generate_prints_and_refuses_one_bad_prompt(octavo: Command, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("third\n\n" + "x" * 2000 + "\n")
    outcome: Outcome = octavo(
        "experiment=generate", f"model.path={tiny_model}", "prompts=[first,second]", "prompts_file=more.txt"
    )
    assert outcome.code == 1 and "prompt 3:" in outcome.err and "2000" in outcome.err
    assert [sample["prompt"] for sample in samples(outcome.folder)] == ["first", "second", "third"]
    assert outcome.metrics["rows"][0]["prompts"] == 3
