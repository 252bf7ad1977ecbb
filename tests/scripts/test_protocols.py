"""What each switch of a protocol moves, on a tiny model with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.scripts.experiments.protocols import protocol_rows

from .conftest import Command, samples

ARGUMENTS = (
    "experiment=protocols", "tasks=[needle_single]", "length=600", "depths=[0.0,1.0]", "repeats=1", "max_new_tokens=6",
    "conversations=2", "turns=2", "questions=[dense,sparse]", "sparse.methods=[dense,streaming,quest]",
    "sparse.budget_tokens=160",
    "dense_layers=[[],[0]]",
    "sparse.overrides={streaming: {dense_layers: [0]}, quest: {dense_layers: [0]}}",
)  # fmt: skip


def test_every_switch_is_measured_against_the_method_s_base(octavo: Command, tiny_model: Path) -> None:
    outcome = octavo(*ARGUMENTS, f"model.path={tiny_model}")
    assert outcome.code == 0, outcome.err
    rows = {(row["method"], row["switch"], row["setting"]): row for row in outcome.metrics["rows"]}
    turns = [("turn", "1"), ("turn", "2")]
    sparse = [("base", ""), ("dense layers", "none"), ("budget", "pages"), ("budget", "bytes"), ("question", "sparse")]
    assert list(rows) == [
        *(("dense", *key) for key in [sparse[0], sparse[-1], *turns]),
        *((name, *key) for name in ("streaming", "quest") for key in [*sparse, *turns]),
    ]
    for (_, switch, setting), row in rows.items():
        assert row["items"] == 2
        moved = switch != "base" and (switch, setting) != ("turn", "1")
        compared = "accuracy_vs_base" if switch == "turn" else "log_likelihood_vs_base"
        assert (compared in row) is moved and (f"{compared}_ci" in row) is moved
        assert ("accuracy" in row) is (switch != "question")
    for name in ("streaming", "quest"):
        base, bytes_row = rows[name, "base", ""], rows[name, "budget", "bytes"]
        assert rows[name, "budget", "pages"]["log_likelihood_vs_base"] == pytest.approx(0, abs=1e-4)
        assert rows[name, "dense layers", "none"]["read_bytes_per_token"] < base["read_bytes_per_token"]
        assert (bytes_row["budget_tokens"] < base["budget_tokens"]) is (name == "quest")
    # Equal bytes: what quest reads to choose has come out of its budget.
    equal = [rows[name, "budget", "bytes"]["read_bytes_per_token"] for name in ("streaming", "quest")]
    assert equal[1] == pytest.approx(equal[0], rel=0.05)
    dense = rows["dense", "question", "sparse"]  # for dense it is one question
    assert dense["log_likelihood_vs_base"] == pytest.approx(0, abs=1e-3)
    assert {file.name for file in (outcome.folder / "plots").iterdir()} == {"protocols.png"}
    again = octavo(f"resume={outcome.folder}")
    assert again.code == 0 and len(samples(again.folder)) == 2 * (2 + 5 + 5) + 2 * 3


def test_differences_are_paired_by_item() -> None:
    def sample(item: int, switch: str, logprob: float) -> dict[str, object]:
        return {
            "item": item, "composed": "quest", "switch": switch, "setting": switch, "gold_logprobs": [logprob],
            "decode_steps": 2, "predicted_kv_bytes": 8, "predicted_digest_bytes": 2,
        }  # fmt: skip

    taken = [sample(1, "", -1.0), sample(2, "", -5.0), sample(2, "question", -6.0), {"item": 3, "error": "too long"}]
    base, question = protocol_rows(taken, 0, True)
    assert base["items"] == 2 and "log_likelihood_vs_base" not in base and base["read_bytes_per_token"] == 5
    assert question["log_likelihood_vs_base"] == -1.0 and question["log_likelihood_vs_base_ci"] == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("questions=[unsen]", "question=unsen: unknown; did you mean 'unseen'?"),
        ("matches=[bits]", "matches=bits: unknown; did you mean 'bytes'?"),
        ("dense_layers=[[7]]", "dense_layers [7] are not among the 2 layers"),
        ("sparse.match=pages", "sparse.budget_pages has no value"),
        ("length=2000", "length=2000: the engine's sequences have at most 1024 tokens"),
        ("turns=10", "turns=10: must be at most 9"),
    ],
)
def test_refusals(override: str, message: str, octavo: Command, tiny_model: Path) -> None:
    outcome = octavo(*ARGUMENTS, f"model.path={tiny_model}", override)
    assert outcome.code == 1 and message in outcome.err


def test_an_unseen_question_moves_what_drops_tokens(octavo: Command, tiny_model: Path) -> None:
    outcome = octavo(
        *ARGUMENTS[:-4], "sparse.methods=[quest,snapkv]", "turns=1", "questions=[dense,unseen]", "matches=[tokens]",
        "dense_layers=[]", "sparse.budget_tokens=160", "sparse.overrides.quest.dense_layers=[]",
        f"model.path={tiny_model}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    rows = {(row["method"], row["switch"]): row for row in outcome.metrics["rows"]}
    assert rows["quest", "question"]["log_likelihood_vs_base"] == pytest.approx(0, abs=1e-4)
    assert rows["snapkv", "question"]["log_likelihood_vs_base"] != pytest.approx(0, abs=1e-4)
