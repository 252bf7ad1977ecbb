"""The image_sharing experiment: command, rows, units that are held, refusals."""

from __future__ import annotations

import pytest

from octavo.scripts import build
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema_image_sharing import MODES, ImageSharing

from .conftest import Command, samples

TINY = ["experiment=image_sharing", "model.shape=tiny", "images=2", "image_tokens=48", "new_tokens=3", "requests=3"]


def test_a_run(octavo: Command) -> None:
    outcome = octavo(*TINY, "limit=2", "rounds=9", "modes=[zero_copy,shift,repair,encoder_only]")
    assert outcome.code == 0, outcome.err
    rows = {row["method"]: row for row in outcome.metrics["rows"]}
    assert list(rows) == ["prefix", "zero_copy", "shift", "repair", "encoder_only"]
    assert len(samples(outcome.folder)) == 2 * 5
    units = 2 * 48 // 8
    assert [row["image_units_listed"] for row in rows.values()] == [3 * units] * 5
    assert [rows[name]["image_units_held"] for name in rows] == [3 * units, units, *[3 * units] * 3]
    prompt = 1 + 1 + 2 * (24 + 48) + 32
    assert [row["hit_tokens"] for row in rows.values()] == [0, 96, 96, 48, 0]
    assert all(row["hit_tokens"] + row["computed_tokens"] == prompt for row in rows.values())
    exact = [row for row in rows.values() if row["exact"]]
    assert [row["method"] for row in exact] == ["prefix", "encoder_only"]
    assert all(row["kl_nats"] < 1e-6 and row["token_agreement"] == 100 for row in exact)
    assert all(row["kl_nats"] > 1e-6 for row in rows.values() if not row["exact"])
    assert rows["zero_copy"]["kl_nats"] == pytest.approx(rows["shift"]["kl_nats"], rel=1e-2)
    assert (outcome.folder / "plots" / "image_sharing.png").is_file()


def test_an_interrupted_run_goes_on(octavo: Command) -> None:
    first = octavo(*TINY, "rounds=2", "modes=[zero_copy]", "page_map=false")
    lines = (first.folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (first.folder / "samples.jsonl").write_text("".join(lines[:3]))
    again = octavo(f"resume={first.folder}")
    assert again.code == 0, again.err
    found = [(sample["item"], sample["method"]) for sample in samples(again.folder)]
    assert found == [(f"round {number}", name) for number in range(2) for name in ("prefix", "zero_copy")]


@pytest.mark.parametrize("name", MODES)
def test_every_way_of_reuse_is_built(name: str) -> None:
    built = build.reuse(name)
    assert built.name == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["modes=[zero_cpoy]"], "unknown way of reusing images 'zero_cpoy'; did you mean 'zero_copy'?"),
        (["requests=1"], "requests=1"),
        (["image_tokens=1024"], "the longest request has"),
        (["engine.prefix_cache=false"], "engine.prefix_cache=false"),
        (["imges=3"], "images"),
    ],
)
def test_refusals(octavo: Command, arguments: list[str], message: str) -> None:
    outcome = octavo(*TINY, *arguments)
    assert outcome.code != 0 and message in outcome.err


def test_the_exact_mode_comes_first() -> None:
    assert ImageSharing("image_sharing", modes=["zero_copy", "prefix"]).all_modes == ["prefix", "zero_copy"]
    with pytest.raises(ConfigError, match="requests=300"):
        ImageSharing("image_sharing", requests=300)
