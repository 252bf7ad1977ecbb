"""The page-ratio experiment: pages and waste to the slot, the same answers, policies, rows, resumption, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core import Engine, EngineConfig, SamplingParams
from octavo.core.memory.page_layout import Segment
from octavo.core.policies import FixedPages
from octavo.multimodal.demo_model import load_demo
from octavo.scripts.experiments.page_ratio import Bench, findings, image_page, rows
from octavo.scripts.image_traffic import (
    EncodedOnce,
    PagesSeen,
    difference,
    images_of,
    predicted_empty,
    questions,
    serve,
)
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema import EngineSettings, PageRatio
from octavo.scripts.schema_multimodal import VisionModelSettings

from .conftest import Command, samples


def settings(folder: Any = None, **more: Any) -> PageRatio:
    model = VisionModelSettings(None if folder is None else str(folder), device="cpu")
    return PageRatio("page_ratio", model=model, **more)


def test_the_prompts_of_a_pair_are_alike_up_to_their_questions() -> None:
    made = questions(0, 5, 3)
    for first, second in made:
        assert [part is twin for part, twin in zip(first, second, strict=True)] == [True] * (len(first) - 1) + [False]
        assert len(images_of([first])) == 3
        assert "what is there ?" in first[-1] and "how many objects ?" in second[-1]
    again = questions(0, 5, 3)
    assert [p for p in made[0].first if isinstance(p, str)] == [p for p in again[0].first if isinstance(p, str)]
    assert not np.array_equal(images_of([made[0].first])[0], images_of([made[1].first])[0])


@pytest.mark.parametrize(
    ("policy", "tokens", "page"),
    [("0.5", 144, 8), ("0.75", 144, 12), ("1", 576, 16), ("1.5", 576, 24), ("4", 144, 64), ("rows", 576, 24),
     ("rows", 144, 12), ("rows", 16, 4)],
)  # fmt: skip
def test_policies(policy: str, tokens: int, page: int) -> None:
    assert image_page(policy, 16, tokens).page_tokens(tokens) == page


def test_rows_need_a_grid() -> None:
    with pytest.raises(ConfigError, match="policies=rows: images of 150 tokens are no square grid"):
        image_page("rows", 16, 150)


def test_the_closed_form() -> None:
    """20 tokens of text on pages of 16 leave 12, 25 of an image on 24 leave 23, 8 + 3 of text leave 5."""
    policies = {"text": FixedPages(16), "image": FixedPages(24)}
    assert predicted_empty([Segment("text", 20), Segment("image", 25), Segment("text", 8)], 56, policies) == 12 + 23 + 5


@pytest.fixture(scope="module")
def demo(tiny_demo: Path) -> Any:
    return load_demo(tiny_demo, device="cpu")


class TestServing:
    def engine(self, demo: Any, image: int, **more: Any) -> Engine:
        config = EngineConfig(pool_tokens=4096, page_tokens=8, page_policies={"image": image}, **more)
        return Engine(demo.model, demo.tokenizer, config, encoders={"image": demo.encoder})

    @pytest.mark.parametrize("image", [4, 12, 16, 24])
    def test_what_is_counted(self, image: int, demo: Any) -> None:
        """Every text and every image has pages of its own, so they can be counted by hand."""
        pairs = questions(1, 3, 2)
        engine, seen = self.engine(demo, image), PagesSeen()
        new = 4
        served = serve(engine, [p.first for p in pairs], SamplingParams(max_tokens=new, ignore_eos=True), "x", seen)
        assert len(served) == len(seen.pages) == 3
        assert set(seen.image_pages.values()) == {2 * -(-16 // image)}
        for pair, (request, pages) in zip(pairs, seen.pages.items(), strict=True):
            runs = _text_runs(pair.first, demo.tokenizer)
            # The last token that is drawn is never stored, and nobody looks after the step that ends a request.
            text_pages = sum(-(-run // 8) for run in [*runs[:-1], runs[-1] + new - 2])
            assert pages == text_pages + seen.image_pages[request]
        assert seen.empty == seen.predicted > 0

    def test_a_second_question_hits_all_but_its_own_words(self, demo: Any) -> None:
        [pair] = questions(2, 1, 2)
        engine, params = self.engine(demo, 24), SamplingParams(max_tokens=2, ignore_eos=True)
        serve(engine, [pair.first], params, "x")
        [second] = serve(engine, [pair.second], params, "x")
        runs = _text_runs(pair.second, demo.tokenizer)
        assert second.cached_tokens >= sum(runs[:-1]) + 2 * 16
        [other] = serve(engine, [pair.second], params, "another")
        assert other.cached_tokens == 0

    def test_pages_change_no_answer_and_images_do(self, demo: Any) -> None:
        pairs = questions(3, 2, 2)
        params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=200)
        small, large = (serve(self.engine(demo, page), [p.first for p in pairs], params, "x") for page in (4, 24))
        for one, other in zip(small, large, strict=True):
            same, most = difference(one, other)
            assert same == 6 and most < 1e-5
        blank = [[part if isinstance(part, str) else np.zeros_like(part) for part in p.first] for p in pairs]
        unlike = serve(self.engine(demo, 4), blank, params, "x")
        assert all(difference(one, other).most > 1e-4 for one, other in zip(small, unlike, strict=True))

    def test_images_are_encoded_once(self, demo: Any) -> None:
        [pair] = questions(4, 1, 2)
        items = images_of([pair.first])
        known = EncodedOnce(demo.encoder, items)
        read = [known.read(item) for item in items]
        assert [known.identity(item) for item in read] == [demo.encoder.identity(item) for item in items]
        assert known.encode(read[::-1]).equal(demo.encoder.encode(items[::-1]))
        assert known.n_tokens(read[0]) == 16 and known.witness(read[0]) == demo.encoder.witness(items[0])


def _text_runs(prompt: list[Any], tokenizer: Any) -> list[int]:
    """Tokens of every text between images, the first with the token that begins a text."""
    runs, text = [], ""
    for part in [*prompt, None]:
        if isinstance(part, str):
            text += part
        else:
            runs.append(len(tokenizer(text, add_special_tokens=not runs)["input_ids"]))
            text = ""
    return runs


def sample(policy: str, pages: int, empty: int, number: int = -1, **more: Any) -> dict[str, Any]:
    counted = {"page_tokens": 16, "requests": 2, "pages": pages, "image_pages": 4, "slots": 1000, "empty": empty,
               "predicted_empty": empty, "hit_percent": 90.0, "new_tokens": 8, "same_tokens": 8,
               "logprob_difference_max": 0.0}  # fmt: skip
    timed = {"tokens": 100, "seconds": 2.0, "free_cores": 2.0}
    own = counted if number < 0 else timed
    return {"item": "images of 576", "image": 576, "policy": policy, "round": number, **own, **more}


def test_rows_and_what_is_said_of_them() -> None:
    taken = [sample("1", 200, 50), sample("1.5", 140, 50), sample("2", 100, 90), sample("1.5", 0, 0, 0),
             sample("1.5", 0, 0, 1, seconds=1.0)]  # fmt: skip
    one, claimed, larger = rows(taken)
    assert (one["policy"], one["pages_per_sequence"], one["pages_change_percent"]) == ("ratio 1", 100, 0)
    assert claimed["pages_change_percent"] == pytest.approx(-30) and claimed["waste_percent"] == 5
    assert (claimed["tokens_per_s"], claimed["rounds"]) == (75, 2) and "tokens_per_s" not in larger
    said = findings([one, claimed, larger])
    assert said[0] == "waste is as predicted in 3 of 3 rows"
    assert said[1].startswith("images of 576, ratio 1.5 against 1: -30.0 % pages, waste 5.00 % against 5.00 %")
    assert "fewest pages without more waste than ratio 1: ratio 1.5" in said[2]
    assert findings([{**one, "waste_percent": 6.0}])[0] == "waste is as predicted in 0 of 1 rows"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"policies": ["1.5"]}, r"policies=\['1.5'\]: others are compared with ratio 1; add 1"),
        ({"policies": ["1", "row"]}, "policies=row: neither a ratio"),
        ({"policies": ["1", "1.3"]}, "1.3 times a text page of engine.page_tokens=16 is 20.8 tokens"),
        ({"policies": ["1", "0"]}, "policies=0"),
        ({"policies": ["1", "1"]}, "policies lists '1' twice"),
        ({"images": []}, "images is empty"),
        ({"images": [0]}, "images=0: must be at least 1"),
        ({"images_a_prompt": 9}, "images_a_prompt=9: must be 2 to 8"),
        ({"engine": EngineSettings(pool_tokens=64)}, "engine.pool_tokens=64: this experiment sets it itself"),
        ({"engine": EngineSettings(page_policies={"image": 8})}, "engine.page_policies"),
    ],
)
def test_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**more)


def test_images_of_llavas_size_take_three_tenths_fewer_pages_at_equal_waste() -> None:
    """Claim H3: 576 tokens, ratio 1.5 against 1."""
    bench = Bench(settings(requests=1, images_a_prompt=2, new_tokens=3), 576)
    reference, seen, _ = bench.answers("1")
    one, claimed = bench.count("1", reference), bench.count("1.5", reference)
    assert claimed["pages"] <= 0.75 * one["pages"] and claimed["image_pages"] == 2 * 24 == one["image_pages"] - 24
    assert claimed["empty"] == one["empty"] == claimed["predicted_empty"] == seen.empty
    assert claimed["same_tokens"] == claimed["new_tokens"] == 6 and claimed["logprob_difference_max"] < 1e-4
    assert claimed["hit_percent"] == one["hit_percent"] > 90


class TestCommand:
    ARGUMENTS = ("experiment=page_ratio", "images=[16]", "policies=[0.5,1,1.5,rows]", "limit=2", "images_a_prompt=2")

    def test_a_run(self, octavo: Command, tiny_demo: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_demo}")
        assert outcome.code == 0, outcome.err
        found = outcome.metrics["rows"]
        assert [row["policy"] for row in found] == ["ratio 0.5", "ratio 1", "ratio 1.5", "rows"]
        assert [row["page_tokens"] for row in found] == [8, 16, 24, 4]
        for row in found:
            assert row["waste_percent"] == row["predicted_waste_percent"] > 0
            assert row["same_tokens"] == row["new_tokens"] == 2 * 2 * 8 and row["tokens_per_s"] > 0
        assert [row["image_pages_per_sequence"] for row in found] == [4, 2, 2, 8]
        assert "images of 16, ratio 1.5 against 1:" in outcome.out
        report = (outcome.folder / "report.html").read_text()
        assert "Page map: images of 16 tokens, ratio 1.5" in report
        assert [file.name for file in (outcome.folder / "plots").iterdir()] == ["page_ratio.png"]

    def test_an_interrupted_run_goes_on(self, octavo: Command, tiny_demo: Path) -> None:
        folder = octavo(*self.ARGUMENTS, f"model.path={tiny_demo}", "page_map=false").folder
        file = folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:3]))
        outcome = octavo(f"resume={folder}")
        assert outcome.code == 0, outcome.err
        assert file.read_text().startswith("".join(lines[:3]))
        taken = [(s["item"], s["policy"], s["round"]) for s in samples(folder)]
        assert len(set(taken)) == len(taken) == len(lines) == 8

    def test_another_size_than_the_models(self, octavo: Command, tiny_demo: Path) -> None:
        outcome = octavo("experiment=page_ratio", "images=[144]", f"model.path={tiny_demo}")
        assert outcome.code == 1 and "images=144: the model has 16 tokens an image; give images=[16]" in outcome.err

    def test_no_model(self, octavo: Command, tmp_path: Path) -> None:
        outcome = octavo("experiment=page_ratio", "images=[144]", f"model.path={tmp_path}")
        assert outcome.code == 1 and "holds no demo model, it has no config.json" in outcome.err
        assert "Traceback" not in outcome.err


def test_the_yaml_says_what_the_types_say() -> None:
    from hydra import compose, initialize_config_module

    from octavo.scripts import main
    from octavo.scripts import settings as loading

    assert main.schema.EXPERIMENTS["page_ratio"] is PageRatio
    with initialize_config_module("octavo.configs", version_base="1.3"):
        config = loading.typed(compose("config", overrides=["experiment=page_ratio", "model.device=cpu"]))
    assert config == settings()
