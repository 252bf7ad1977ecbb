"""The experiment on benchmarks of images: rows, divergence, made and public records, resumption, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from octavo.scripts.image_rows import ALL, consistent, divergence, rows
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema import ImageBenchmarks
from octavo.scripts.schema_groups import EngineSettings
from octavo.scripts.tasks.image_benchmarks import make, write

from .conftest import Command, samples


def logs(*shares: float) -> dict[int, float]:
    return {token: math.log(share) for token, share in enumerate(shares)}


def test_divergence() -> None:
    one, other = logs(0.5, 0.25, 0.25), logs(0.25, 0.25, 0.5)
    assert divergence(one, one) == 0
    assert divergence(one, other) == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))


def test_tokens_that_are_not_listed_count_as_one() -> None:
    """0.5, 0.5 against 0.25, 0.75, of which only the first is listed by both."""
    assert divergence(logs(0.5), {0: math.log(0.25), 7: math.log(0.7)}) == pytest.approx(
        0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    )
    whole = divergence(logs(0.5, 0.3, 0.2), logs(0.2, 0.3, 0.5))
    assert 0 < divergence({0: math.log(0.5)}, {0: math.log(0.2)}) < whole


def sample(item: str, method: str, accuracy: float, group: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "item": item, "method": method, "task": "t", "group": group, "accuracy": accuracy, "same_tokens": 3,
        "uncached_tokens": 4, "kl_nats": 0.1, "kl_nats_max": 0.3, "hit_tokens": 5, "query_tokens": 10, **more,
    }  # fmt: skip


def test_rows() -> None:
    taken = [
        sample(str(n), method, 100.0 * right, "ab"[n // 2])
        for method, rights in (("uncached", (1, 1, 1, 0)), ("prefix", (1, 0, 0, 0)))
        for n, right in enumerate(rights)
    ]
    base, prefix = rows(taken, seed=0)
    assert (base["accuracy"], base["consistency"], prefix["accuracy"], prefix["consistency"]) == (75, 50, 25, 0)
    assert "kl_nats_max" not in base and "accuracy_vs_uncached" not in base
    assert prefix["accuracy_vs_uncached"] == -50 and prefix["accuracy_vs_uncached_ci"][0] <= -50
    assert prefix["accuracy_p_value"] == 0.5  # two items lost, none gained
    assert (prefix["agreement_percent"], prefix["kl_nats_max"], prefix["hit_percent"]) == (75, 0.3, 50)
    assert prefix["kl_nats_mean"] == pytest.approx(0.1)


def test_a_group_is_right_as_a_whole() -> None:
    own = [sample("1", "m", 100, "a"), sample("2", "m", 0, "a"), sample("3", "m", 100, "b"), sample("4", "m", 100, "b")]
    assert consistent(own) == [0, 100]


class TestCommand:
    ARGUMENTS = ("experiment=image_benchmarks", "max_new_tokens=4", "limit=2")
    FEATURES = "features={prefix: {prefix_cache: true}, small: {page_policies: {image: 4}, step_tokens: 10}}"

    def test_a_run(self, octavo: Command, tiny_demo: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_demo}", self.FEATURES)
        assert outcome.code == 0, outcome.err
        found = outcome.metrics["rows"]
        assert {row["task"] for row in found} == {
            "colour", "shape", "needle_digit of 2", "needle_object of 2", "multihop of 2", "multihop of 4", "pairs",
            "unanswerable colour", "captions", "all",
        }  # fmt: skip
        for row in found:
            assert (row["hit_percent"] > 50) == (row["method"] != "uncached")
            if row["method"] != "uncached":
                assert row["agreement_percent"] == 100 and row["kl_nats_max"] < 1e-5
                assert not any(row[key] for key in row if key.endswith("_vs_uncached"))
        assert {"consistency"} <= next(row for row in found if row["task"] == "pairs").keys()
        taken = samples(outcome.folder)
        assert len(taken) == 3 * (2 + 2 + 2 + 4 + 2 + 2)
        assert "Page map: prefix, all items, one after another" in (outcome.folder / "report.html").read_text()

    def test_ways_of_reuse(self, octavo: Command, tiny_demo: Path) -> None:
        """Images are found behind another text, with the context that is asked for; what is exact stays exact."""
        modes = ("~features.prefix", "modes=[encoder_only,zero_copy,shift]", "contexts=[0,1]", "benchmarks=[captions]")
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_demo}", *modes)
        assert outcome.code == 0, outcome.err
        found = {row["method"]: row for row in outcome.metrics["rows"]}
        made = [f"{mode}, context {tokens}" for mode in ("zero_copy", "shift") for tokens in (0, 1)]
        assert [*found] == ["uncached", "encoder_only", *made]
        assert found["encoder_only"]["kl_nats_max"] < 1e-6 and found["encoder_only"]["hit_percent"] < 10
        for tokens in (0, 1):
            lent, copied = (found[f"{mode}, context {tokens}"] for mode in ("zero_copy", "shift"))
            assert lent["hit_percent"] > 50 and lent["kl_nats_max"] > 1e-6
            assert lent["kl_nats_max"] == pytest.approx(copied["kl_nats_max"], abs=1e-6)
        assert "Page map: encoder_only, all items" in (outcome.folder / "report.html").read_text()

    def test_public_records_from_files(self, octavo: Command, tiny_demo: Path, tmp_path: Path) -> None:
        file = write(make("pairs", 5, 4), tmp_path)
        arguments = ("format=nlvr2", f"path={file}", f"images={tmp_path / 'images'}")
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_demo}", *arguments)
        assert outcome.code == 0, outcome.err
        assert {s["item"] for s in samples(outcome.folder)} == {"octavo-0-0-0", "octavo-0-1-0"}
        lost = octavo(*self.ARGUMENTS, f"model.path={tiny_demo}", *arguments[:2], f"images={tmp_path}")
        assert lost.code == 1 and "line 1: the image 'octavo-0-0-img0.png' is not in" in lost.err

    def test_an_interrupted_run_goes_on(self, octavo: Command, tiny_demo: Path) -> None:
        arguments = (*self.ARGUMENTS, f"model.path={tiny_demo}", "benchmarks=[captions,multihop]", "page_map=false")
        folder = octavo(*arguments).folder
        file = folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:3]))
        outcome = octavo(f"resume={folder}")
        assert outcome.code == 0, outcome.err
        assert file.read_text() == "".join(lines)

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("benchmarks=[pair]", "benchmarks=pair: unknown; did you mean 'pairs'?"),
            ("benchmarks=[]", "benchmarks is empty"),
            ("format=nlvr2", "format is given alone; a benchmark from files needs format, path and images"),
            ("features={uncached: {}}", "none is called uncached"),
            ("+features.x={page_token: 8}", "did you mean 'page_tokens'?"),
            ("features={prefix: 3}", "features.prefix=3: give settings of the engine"),
            ("features={p: {execution: foo}}", "features.p: engine.execution='foo' is unknown"),
            ("items=0", "items=0: must be at least 1"),
            ("~features.prefix", "features=[] modes=[]: give at least one"),
            ("modes=[zero_cpy]", "zero_copy"),
            ("contexts=[-1]", "contexts=-1"),
        ],
    )
    def test_refused(self, override: str, message: str, octavo: Command) -> None:
        outcome = octavo("experiment=image_benchmarks", override)
        assert outcome.code == 1 and message in outcome.err and "Traceback" not in outcome.err, outcome.err


def test_reuse_without_a_prefix_cache() -> None:
    with pytest.raises(ConfigError, match=r"engine\.prefix_cache=false: images are reused"):
        ImageBenchmarks("image_benchmarks", modes=["zero_copy"], engine=EngineSettings(prefix_cache=False))


def test_all_tasks_together() -> None:
    """Only those that have an accuracy; of one task alone there is no such row."""
    taken = [
        {**sample(f"{task}{n}", method, 100.0 * (method == "uncached" or n > 0)), "task": task}
        for task in ("t", "u")
        for method in ("uncached", "prefix")
        for n in range(4)
    ]
    captions = [{**s, "task": "c", "rouge_l": 50.0} for s in taken[:8]]
    for caption in captions:
        del caption["accuracy"]
    found = {(row["task"], row["method"]): row for row in rows([*taken, *captions], seed=0)}
    assert [*found][-2:] == [(ALL, "uncached"), (ALL, "prefix")] and ALL not in {r["task"] for r in rows(taken[:8], 0)}
    both = found[ALL, "prefix"]
    assert (both["items"], both["accuracy"], both["accuracy_vs_uncached"]) == (8, 75, -25)


def test_an_unknown_format() -> None:
    with pytest.raises(ConfigError, match="format=nlvr: unknown; did you mean 'nlvr2'"):
        ImageBenchmarks("image_benchmarks", format="nlvr", path="x", images="y")
