"""The experiment on what tokens of images are worth, on a demo model with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.scripts.experiments.visual_importance import AGAIN, FIRST, OTHER, rows
from octavo.scripts.schema_visual_importance import QUESTIONS, VISUAL_METHODS
from octavo.scripts.tasks.two_questions import two_questions

from .conftest import Command, samples

ARGUMENTS = (
    "experiment=visual_importance", "items=2", "images=2", "max_new_tokens=4", "shares=[0.25,1]", "page_map=false",
    "engine.page_policies.image=8",
)  # fmt: skip
METHODS = "sparse.methods=[cls_attention,pyramid_drop]"


IMAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 4
"""Tokens, layers, K and V, heads, their size, fp32."""


def test_a_run(octavo: Command, tiny_demo: Path) -> None:
    outcome = octavo(*ARGUMENTS, METHODS, f"model.path={tiny_demo}")
    assert outcome.code == 0, outcome.err
    found = {(r["task"], r["method"], r.get("share_percent"), r.get("placement")): r for r in outcome.metrics["rows"]}
    variants = [(name, share, placement) for name in ("cls_attention", "pyramid_drop") for share in (25.0, 100.0)
                for placement in ("drop", "host", "recall")]  # fmt: skip
    dropping = [variant for variant in variants if variant[2] != "host"]
    assert [*found] == [
        *((way, *variant) for way in (FIRST,) for variant in [("dense", None, None), *variants]),
        *((AGAIN, *variant) for variant in [("dense", None, None), *dropping]),
        *((OTHER, *variant) for variant in [("dense", None, None), *variants]),
    ]
    for (way, _, share, placement), row in found.items():
        assert row["items"] == 2
        if share is None:
            assert (row["kv_kept_percent"], row["units_freed"]) == (100, 0)
        elif share == 100.0:  # nothing is dropped
            assert (row["same_answer_percent"], row["kv_kept_percent"], row["units_freed"]) == (100, 100, 0)
            assert row["kl_first_nats_max"] < 1e-5
        else:
            assert row["kv_kept_percent"] < 100 and row["units_freed"] > 0
            if way == FIRST or (way == OTHER and placement != "drop"):  # the first token has seen everything
                assert row["kl_first_nats_max"] < 1e-4
        between = way == OTHER and placement in ("host", "recall") and share == 25.0
        if placement != "recall" or between:
            assert (row["host_bytes_recalled"] > 2 * IMAGE_BYTES) == between  # else a page of text at most
        else:
            assert (row["host_bytes_recalled"] > 0) == (share == 25.0)
    for name in ("cls_attention", "pyramid_drop"):
        drop, host = (found[FIRST, name, 25.0, placement] for placement in ("drop", "host"))
        for key in ("accuracy", "kv_bytes_per_token", "kv_bytes_held", "units_freed"):
            assert drop[key] == host[key]
    assert rows(samples(outcome.folder), 0) == outcome.metrics["rows"]
    assert {file.name for file in (outcome.folder / "plots").iterdir()} == {"importance.png"}


def test_an_interrupted_run_goes_on(octavo: Command, tiny_demo: Path) -> None:
    first = octavo(*ARGUMENTS, "sparse.methods=[fastv]", "placements=[drop]", f"model.path={tiny_demo}")
    file = first.folder / "samples.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:4]))
    assert octavo(f"resume={first.folder}").code == 0
    again = samples(first.folder)
    assert len(again) == len(lines) and file.read_text().startswith("".join(lines[:4]))


@pytest.mark.parametrize("images", [2, 4, 8])
def test_the_two_questions_are_about_different_images(images: int) -> None:
    items = two_questions(3, QUESTIONS, images, 21)
    assert items[:7] == two_questions(3, QUESTIONS, images, 7) and len({item.item_id for item in items}) == 21
    for item in items:
        first, other = (question.split()[2] for question, _ in (item.first, item.other))
        assert first != other and {int(first), int(other)} <= {*range(1, images + 1)}
        assert len(item.scenes) == images and item.first.answer and item.other.answer


def test_the_default_line_up_is_all_there_is(tiny_demo: Path) -> None:
    configs = Path(__file__).parents[2] / "configs" / "sparse"
    assert {*VISUAL_METHODS} == {file.stem for file in configs.glob("*.yaml") if "visual_eviction" in file.read_text()}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("shares=[0]", "shares=[0.0]: 0.0 must be above 0 and at most 1"),
        ("shares=[1.5]", "1.5 must be above 0 and at most 1"),
        ("recall_share=0", "recall_share=0.0: must be above 0 and at most 1"),
        ("images=1", "images=1: must be 2 to 8"),
        ("placements=[visible]", "placements=visible: unknown; one of: drop, host, recall"),
        ("sparse.methods=[dense]", "dense runs in any case"),
        ("sparse.methods=[snapkv]", "snapkv does not rate the tokens of images; those that do: cls_attention"),
        ("sparse.overrides.fastv={placement: drop}", "placement, recall and budget.share are set by this experiment"),
        ("sparse.overrides.fastv.budget=0.5", "placement, recall and budget.share are set by this experiment"),
        ("sparse.overrides.fastv.budget=null", "placement, recall and budget.share are set by this experiment"),
        ("sparse.overrides.fastv.nested=maybe", "nested must be true or false, got 'maybe'"),
        ("engine.pool_tokens=16", "raise pool_tokens to at least"),
        ("engine.host_tokens=0", "need a host tier; set it"),
        ("engine.prefix_cache=false", "found by their keys"),
        ("max_new_tokens=900", "take up to 1898 tokens, more than the 1024"),
    ],
)
def test_refusals(override: str, message: str, octavo: Command, tiny_demo: Path) -> None:
    outcome = octavo(*ARGUMENTS, f"model.path={tiny_demo}", override)
    assert outcome.code == 1 and message in outcome.err
