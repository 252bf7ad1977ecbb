"""The experiments on quality over long contexts, and calibration, on a tiny model with random weights."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from octavo.scripts.embedded_models import MODELS
from octavo.scripts.experiments.ruler import specs
from octavo.scripts.schema import Calibrate, Ruler
from octavo.sparse import basis_files

from .conftest import Command, samples

NAMES = ("dense", "streaming", "quest")
METHODS = (
    "sparse.methods=[dense,streaming,quest]",
    "sparse.budget_tokens=128",
    "sparse.overrides={streaming: {dense_layers: []}, quest: {dense_layers: []}}",
)


class TestRuler:
    ARGUMENTS = (
        "experiment=ruler", "lengths=[600]", "depths=[0.0,1.0]", "repeats=1", "max_new_tokens=8",
        "tasks=[needle_single,frequent_words]", *METHODS,
    )  # fmt: skip

    def test_a_run(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}")
        assert outcome.code == 0, outcome.err
        rows = outcome.metrics["rows"]
        assert [(row["task"], row["length"], row["method"]) for row in rows] == [
            (task, 600, method) for task in ("needle_single", "frequent_words") for method in NAMES
        ]  # fmt: skip
        for row in rows:
            assert row["items"] == 2 and row["failed"] == 0
            assert row["accuracy_ci"][0] <= row["accuracy"] <= row["accuracy_ci"][1]
            assert row["kv_bytes_per_token"] == row["predicted_kv_bytes_per_token"] > 0
            assert row["digest_bytes_per_token"] == row["predicted_digest_bytes_per_token"]
            assert ("accuracy_vs_dense" in row) == (row["method"] != "dense")
        assert rows[1]["kv_bytes_per_token"] < 0.5 * rows[0]["kv_bytes_per_token"]
        for row in rows:
            if row["method"] != "dense":
                assert 0 <= row["page_recall_percent"] <= 100 and 0 < row["captured_mass_percent"] < 100
                assert row["output_error_percent"] > 0 and row["removal_error_percent"] > 0
                assert row["probed_queries"] > 0 and row["probe_seconds"] > 0 and row["probe_bytes"] > 0
                assert 128 < row["break_even_tokens"] < 600 and row["plus_30_percent_tokens_batch_8"] > 128
            assert row["resident_bytes"] > 580 * 2 * 2 * 2 * 16 * 4  # K and V of two layers
        assert not {"page_recall_percent", "break_even_tokens"} & rows[0].keys()
        taken = samples(outcome.folder)
        assert all(580 <= s["prompt_tokens"] <= 592 and len(s["gold_logprobs"]) > 5 for s in taken)
        assert {s["depth"] for s in taken} == {0.0, 1.0, None}
        assert {file.name for file in (outcome.folder / "plots").iterdir()} == {
            "pareto.png", "depths.png", "choices.png",
        }  # fmt: skip

    def test_nobody_looks_on_where_that_is_not_wanted(self, octavo: Command, tiny_model: Path) -> None:
        arguments = (*self.ARGUMENTS, f"model.path={tiny_model}", "limit=1")
        plain, probed = (octavo(*arguments, f"sparse.probe_every={every}") for every in (0, 2))
        for row, other in zip(plain.metrics["rows"], probed.metrics["rows"], strict=True):
            measured = other.keys() - row.keys()
            assert ("page_recall_percent" in measured) is (row["method"] != "dense")
            assert all(row[key] == other[key] for key in ("accuracy", "perplexity", "kv_bytes_per_token"))
        assert not (plain.folder / "plots" / "choices.png").exists()
        assert all("probe" not in sample for sample in samples(plain.folder))
        refused = octavo(*self.ARGUMENTS, "sparse.probe_every=-1", f"model.path={tiny_model}")
        assert refused.code == 1 and "sparse.probe_every=-1: must be at least 0" in refused.err

    def test_a_sparse_question_is_scored(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "question=sparse", "limit=1")
        assert outcome.code == 0, outcome.err
        dense, streaming, _ = outcome.metrics["rows"]
        assert "accuracy" not in dense and "kv_bytes_per_token" not in dense
        assert dense["perplexity"] > 1 and "gold_log_likelihood_per_token_vs_dense" in streaming
        assert streaming["predicted_kv_bytes_per_token"] < 0.5 * dense["predicted_kv_bytes_per_token"]
        asked = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "limit=1").metrics["rows"][0]
        assert dense["perplexity"] == pytest.approx(asked["perplexity"], rel=1e-3)  # for dense it is one question

    def test_an_interrupted_run_goes_on(self, octavo: Command, tiny_model: Path) -> None:
        first = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "limit=2")
        file = first.folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:4]))
        assert octavo(f"resume={first.folder}").code == 0
        again = file.read_text().splitlines(keepends=True)
        assert again[:4] == lines[:4]
        assert [json.loads(line)["output"] for line in again] == [json.loads(line)["output"] for line in lines]

    def test_budgets_are_told_apart(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "budgets=[128,256]", "limit=1")
        assert [row["method"] for row in outcome.metrics["rows"]] == [
            "dense", "streaming 128", "quest 128", "streaming 256", "quest 256",
        ]  # fmt: skip

    def test_a_length_without_room_costs_its_puzzles(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "lengths=[60,600]")
        assert outcome.code == 0, outcome.err
        errors = [s for s in samples(outcome.folder) if "error" in s]
        assert {s["length"] for s in errors} == {60} and "at most 52 tokens is wanted" in errors[0]["error"]

    def test_the_first_few_are_of_different_tasks(self) -> None:
        made = specs(Ruler(experiment="ruler"))
        assert len({spec.id for spec in made}) == len(made) == 6 * 3 * 5 * 2
        assert len({spec.task for spec in made[:6]}) == 6

    def test_unseen(self, octavo: Command, tiny_model: Path) -> None:
        """What is dropped before the question differs from what is dropped after it; a dense request is the same."""
        found = {}
        dropping = (
            *self.ARGUMENTS[: -len(METHODS)], "tasks=[needle_single]", "page_map=false",
            "sparse.methods=[dense,snapkv]", "sparse.budget_tokens=128",
        )  # fmt: skip
        for question in ("dense", "unseen"):
            outcome = octavo(*dropping, f"model.path={tiny_model}", f"question={question}")
            assert outcome.code == 0, outcome.err
            found[question] = {s["method"]: s["gold_logprobs"] for s in samples(outcome.folder)}
            for sample in samples(outcome.folder):
                assert sample["kv_bytes_read"] == sample["predicted_kv_bytes"]
        assert found["dense"]["dense"] == found["unseen"]["dense"]
        assert found["dense"]["snapkv"] != found["unseen"]["snapkv"]

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("tasks=[needle]", "tasks=needle: unknown; did you mean 'needle_single'?"),
            ("tasks=[]", "tasks is empty"),
            ("lengths=[2000]", "lengths=2000: the engine's sequences have at most 1024 tokens"),
            ("depths=[1.5]", "depths=1.5: must be 0"),
            ("depths=[0.5,0.5]", "depths lists 0.5 twice"),
            ("budgets=[0]", "budgets=0: must be at least 1"),
            ("question=spars", "question=spars: unknown; did you mean 'sparse'?"),
            ("chat=true", "chat=true: this model's tokenizer has no chat template"),
        ],
    )
    def test_refusals(self, override: str, message: str, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", override)
        assert outcome.code == 1 and message in outcome.err


class TestPerplexity:
    ARGUMENTS = ("experiment=perplexity", "documents=1", "context_tokens=300", "scored_tokens=12", *METHODS)

    def test_a_run(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "windows=2")
        assert outcome.code == 0, outcome.err
        rows = outcome.metrics["rows"]
        assert [(row["task"], row["method"]) for row in rows] == [
            (kind, method) for kind in ("code", "text") for method in NAMES
        ]
        assert all(len(s["gold_logprobs"]) == s["new_tokens"] == 24 for s in samples(outcome.folder))
        assert rows[1]["predicted_kv_bytes_per_token"] < 0.6 * rows[0]["predicted_kv_bytes_per_token"]
        assert rows[0]["perplexity_ci"][0] <= rows[0]["perplexity"] <= rows[0]["perplexity_ci"][1]

    def test_windows_are_next_to_each_other(self, octavo: Command, tiny_model: Path) -> None:
        arguments = (*self.ARGUMENTS[:4], f"model.path={tiny_model}", "sparse.methods=[dense]")
        one, two = (samples(octavo(*arguments, f"windows={windows}").folder) for windows in (1, 2))
        assert [sample["item"] for sample in one] == [sample["item"] for sample in two]
        for short, long in zip(one, two, strict=True):
            assert short["gold_logprobs"] == pytest.approx(long["gold_logprobs"][12:], abs=1e-4)

    def test_too_long_is_refused(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "context_tokens=1020")
        assert outcome.code == 1 and "context_tokens + scored_tokens=1032: the engine's sequences have" in outcome.err
        windows = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "windows=1000000")
        assert windows.code == 1 and "no document of the kind 'code' has" in windows.err


class TestMultiTurn:
    ARGUMENTS = ("experiment=multi_turn", "conversations=2", "length=400", "turns=2", "max_new_tokens=6", *METHODS)

    def test_a_run(self, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}")
        assert outcome.code == 0, outcome.err
        rows = outcome.metrics["rows"]
        assert [(row["task"], row["method"]) for row in rows] == [
            (turn, method) for turn in ("turn 1", "turn 2", "dense turn") for method in NAMES
        ]
        assert all(row["items"] == 2 and row["kv_bytes_per_token"] > 0 for row in rows)
        assert [row["same_tokens_percent"] for row in rows if row["task"] == "dense turn"] == [100.0] * 3
        assert rows[1]["kv_bytes_per_token"] < 0.6 * rows[0]["kv_bytes_per_token"]  # a sparse turn reads less
        assert rows[7]["kv_bytes_per_token"] > 0.9 * rows[6]["kv_bytes_per_token"]  # and the dense one does not
        for sample in samples(outcome.folder):
            first, second, _ = sample["turns"]
            assert second["cached_tokens"] >= first["prompt_tokens"]

    def test_the_dense_turn_finds_no_page_of_a_sparse_one(self, octavo: Command, tiny_model: Path) -> None:
        layers = "sparse.overrides.quest.dense_layers=[]"
        arguments = (*self.ARGUMENTS[:5], f"model.path={tiny_model}", "sparse.methods=[quest]", layers)
        for sample in samples(octavo(*arguments, "sparse.budget_tokens=128").folder):
            first, _, last = sample["turns"]
            assert last["cached_tokens"] == first["prompt_tokens"] // 16 * 16

    def test_refusals(self, octavo: Command, tiny_model: Path) -> None:
        assert "turns=10: must be at most 9" in octavo(*self.ARGUMENTS, "turns=10", f"model.path={tiny_model}").err
        outcome = octavo(*self.ARGUMENTS, "length=1025", f"model.path={tiny_model}")
        assert outcome.code == 1 and "length=1025: the engine's sequences have at most 1024" in outcome.err


class TestCalibrate:
    ARGUMENTS = ("experiment=calibrate", "tokens=200", "text_tokens=50", "rank=4")

    @pytest.mark.parametrize("method", ["loki", "double_sparsity"])
    def test_the_file_serves_its_model(self, method: str, octavo: Command, tiny_model: Path, items_file: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"method={method}", f"model.path={tiny_model}")
        assert outcome.code == 0, outcome.err
        file = outcome.folder / f"{method}.npz"
        made = basis_files.read(file.read_bytes(), str(file))
        assert made.basis.shape == (2, 2, 16, 4)
        assert made.provenance["tokens"] == 200 and len(made.provenance["documents"]) == 4
        assert made.provenance["model"]["kv_heads"] == 2 and len(made.provenance["weights_sha256"]) == 64
        (row,) = outcome.metrics["rows"]
        assert 25 < row["kept_percent"] <= 100 and len(samples(outcome.folder)) == 2
        again = octavo(*self.ARGUMENTS, f"method={method}", f"model.path={tiny_model}").folder / f"{method}.npz"
        assert again.read_bytes() == file.read_bytes()
        used = octavo(
            f"model.path={tiny_model}", f"task.path={items_file}", "limit=1", f"sparse.methods=[{method}]",
            "sparse.budget_tokens=128", f"sparse.overrides.{method}.digest.file={file}",
            f"sparse.overrides.{method}.dense_layers=[]",
        )  # fmt: skip
        assert used.code == 0, used.err

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("method=lok", "method=lok: unknown; did you mean 'loki'?"),
            ("rank=17", "loki: rank=17 must be 1 to the head size of 16"),
            ("tokens=100000000", r"documents have text_tokens=50 tokens"),
        ],
    )
    def test_refusals(self, override: str, message: str, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, override, f"model.path={tiny_model}")
        assert outcome.code == 1 and message in outcome.err

    def test_the_shipped_files_were_made_with_the_defaults(self) -> None:
        for method, model in product(("loki", "double_sparsity"), MODELS):
            file = basis_files.SHIPPED / f"{method}-{model}.npz"
            said, config = basis_files.read(file.read_bytes(), str(file)).provenance, Calibrate(experiment="calibrate")
            assert (said["method"], said["rank"], said["tokens"]) == (method, config.rank, config.tokens)
            assert file.stat().st_size < 1e6


class TestProjectLines:
    """The main job on lines that are made when it begins, from a project that stands for those at hand."""

    @pytest.fixture
    def arguments(self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
        from octavo.scripts.tasks import project_lines
        from octavo.scripts.tasks.mining import parse_project
        from octavo.scripts.tasks.sources import Source

        helper = "def ab(s):\n    return s\n\n\ndef twin(s):\n    n = ab(s) + 1\n"
        user = "from .helper import ab\n\n\ndef use(s):\n    n = ab(s) * {}\n    return n\n"
        files = {"toy/helper.py": helper, "toy/filler.py": "Z = 1\n" * 90}
        project = parse_project(files | {f"toy/use_{n}.py": user.format(n) for n in range(3, 7)})
        source = Source("toy", "1.0", "", "", "MIT", "", "", ("toy",))
        monkeypatch.setattr(project_lines, "PROJECTS", (("toy", "toy"),))
        monkeypatch.setattr(project_lines, "_read", lambda name, folder: (source, project))
        task = ("task=project_lines", "task.lengths=[400,500]", "task.classes=[in_project]", "task.items=2")
        return (*task, f"model.path={tiny_model}", "task.max_new_tokens=6", "engine.step_tokens=512")

    def test_a_run(self, arguments: tuple[str, ...], octavo: Command) -> None:
        outcome = octavo(*arguments, *METHODS[:1], METHODS[2], "budget_share=0.35")
        assert outcome.code == 0, outcome.err
        rows = outcome.metrics["rows"]
        assert [(row["task"], row.get("length"), row["method"]) for row in rows] == [
            (task, length, method)
            for task, length in (("project_lines", None), ("in_project", 400), ("in_project", 500))
            for method in NAMES
        ]
        assert [row["items"] for row in rows] == [4] * 3 + [2] * 6
        dense, streaming, quest = rows[:3]
        assert streaming["kv_bytes_per_token"] < 0.5 * dense["kv_bytes_per_token"]
        assert quest["kv_bytes_per_token"] == quest["predicted_kv_bytes_per_token"]
        for sample in samples(outcome.folder):
            assert (sample["class"], sample["source"]) == ("in_project", "toy 1.0") and len(
                sample["prompt_sha256"]
            ) == 64
            assert 0.93 * sample["length"] - 22 <= sample["prompt_tokens"] <= sample["length"]

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("task.lengths=[2000]", "task.lengths=2000: the engine's sequences have at most 1024 tokens"),
            ("task.lengths=[]", "task.lengths=[]: project_lines needs at least one"),
            ("task.classes=[in_files]", "task.classes=in_files: unknown; did you mean 'in_file'?"),
            ("budget_share=1.5", "budget_share=1.5: must be above 0 and at most 1"),
            ("task=code_lines", "those of task=project_lines alone"),
        ],
    )
    def test_refusals(self, override: str, message: str, arguments: tuple[str, ...], octavo: Command) -> None:
        outcome = octavo(*arguments, *METHODS, override)
        assert outcome.code == 1 and message in outcome.err


class TestStructure:
    ARGUMENTS = ("experiment=structure", "task.max_new_tokens=6", "sparse.methods=[streaming,quest]", METHODS[2])

    def test_a_run(self, octavo: Command, tiny_model: Path, items_file: Path) -> None:
        arguments = (*self.ARGUMENTS, f"model.path={tiny_model}", f"task.path={items_file}", "limit=3")
        outcome = octavo(*arguments, "sparse.budget_tokens=128")
        assert outcome.code == 0, outcome.err
        rows = outcome.metrics["rows"]
        names = ["dense", "streaming", "streaming + structure", "quest", "quest + structure"]
        assert [row["method"] for row in rows] == [*names, *(f"{n}: with against without" for n in NAMES[1:])]
        for row, plain in ((rows[2], rows[1]), (rows[4], rows[3])):
            assert row["kv_bytes_per_token"] == plain["kv_bytes_per_token"] < rows[0]["kv_bytes_per_token"]
        for row, number in ((rows[5], 1), (rows[6], 3)):
            low, high = row["edit_similarity_gain_ci"]
            assert low <= row["edit_similarity_gain"] <= high and row["items"] == 3
            gain = rows[number + 1]["gold_log_likelihood_per_token"] - rows[number]["gold_log_likelihood_per_token"]
            assert row["gold_log_likelihood_per_token_gain"] == pytest.approx(gain)
        assert rows[2]["gold_log_likelihood_per_token"] != rows[1]["gold_log_likelihood_per_token"]
        assert {file.name for file in (outcome.folder / "plots").iterdir()} == {
            "pareto.png", "gain.png", "by_length.png", "choices.png",
        }  # fmt: skip
        shared = octavo(*arguments, "budget_share=0.5")
        assert shared.code == 0 and shared.metrics["rows"][2]["items"] == 3

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("sparse.methods=[dense,streaming,quest]", "sparse.methods lists dense, which chooses nothing"),
            ("weight=0", "weight=0.0: must be above 0"),
            ("share=2", "share=2.0: must be above 0 and at most 1"),
        ],
    )
    def test_refusals(self, override: str, message: str, octavo: Command, tiny_model: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_model}", "sparse.overrides={}", override)
        assert outcome.code == 1 and message in outcome.err


def test_perplexity_says_what_a_prefill_pattern_captures(octavo: Command, tiny_model: Path) -> None:
    sizes = "block_tokens: 32, stride: 8, mass: 0.5, dense_layers: []"
    outcome = octavo(
        "experiment=perplexity", "documents=1", "kinds=[code]", "context_tokens=300", "scored_tokens=6",
        "sparse.methods=[dense,xattention]", f"sparse.overrides={{xattention: {{prefill: {{{sizes}}}}}}}",
        f"model.path={tiny_model}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    dense, pattern = outcome.metrics["rows"]
    assert (
        "prefill_captured_mass" not in dense
        and 0.2 < pattern["prefill_captured_mass"] < 1
        and pattern["prefill_output_error"] > 0
    )
    assert 0 < pattern["predicted_prefill_share"] <= 1 and pattern["perplexity"] != dense["perplexity"]
    assert pattern["predicted_kv_bytes_per_token"] == dense["predicted_kv_bytes_per_token"]
