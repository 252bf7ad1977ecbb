"""The interleaved experiment: conversations and their pages, exams, the gallery, rows, resumption, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core import Engine, EngineConfig
from octavo.multimodal.demo_data import EXAMS, exam_questions
from octavo.multimodal.demo_exam import exam_images
from octavo.multimodal.demo_model import load_demo
from octavo.multimodal.scenes import SIDE
from octavo.scripts import conversations as talking
from octavo.scripts.conversations import Conversation, Page, Turn, conversations, converse
from octavo.scripts.experiments.interleaved import rows
from octavo.scripts.gallery import conversation_figure, gallery
from octavo.scripts.schema import Interleaved
from octavo.scripts.schema_multimodal import DEMO_EXAMS, VisionModelSettings

from .conftest import Command, samples


@pytest.fixture(scope="module")
def engine(tiny_demo: Path) -> Engine:
    demo = load_demo(tiny_demo, device="cpu")
    config = EngineConfig(pool_tokens=16384, page_tokens=8, page_policies={"image": 12})
    return Engine(demo.model, demo.tokenizer, config, encoders={"image": demo.encoder})


class TestConversations:
    def test_there_is_one_of_every_kind(self) -> None:
        made = conversations(0)
        assert [talk.title for talk in made[:5]] == [
            "one image", "two images", "four images", "eight images", "the question first",
        ]  # fmt: skip
        assert [len(talk.images) for talk in made[:5]] == [1, 2, 4, 8, 3]
        assert made[5].title.startswith("things on photographs (") and len(made[5].images) >= 2
        for talk in made:
            assert all(image.shape == (SIDE, SIDE, 3) and image.dtype == np.uint8 for image in talk.images)
            assert all(turn.question.endswith("?") and turn.gold not in ("", "nothing") for turn in talk.turns)
        assert [t.question for talk in made for t in talk.turns] == [
            t.question for x in conversations(0) for t in x.turns
        ]

    def test_answers_follow_from_the_scenes(self) -> None:
        """Of the questions that are made here, not by a task."""
        for seed in range(20):
            one = conversations(seed)[0]
            described = [thing.split() for thing in one.turns[0].gold.split(" , ")]  # size colour kind row column
            assert one.turns[1].question == "how many objects ?" and one.turns[1].gold.endswith(f" . {len(described)}")
            for turn in one.turns[2:]:
                shape = turn.question.split()[-2]
                assert [colour for _, colour, kind, *_ in described if kind == shape] == [turn.gold]

    def test_no_photographs_no_conversation_about_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(talking, "photographs", dict)
        assert len(conversations(0)) == 5

    def test_later_questions_are_served_on_the_pages_of_the_first(self, engine: Engine) -> None:
        talks = conversations(1)
        converse(engine, talks)
        engine.check()
        assert not engine.has_work() and engine.stats().units_held == 0
        for talk in talks:
            for turn in talk.turns:
                assert sum(page.tokens for page in turn.pages) == turn.prompt_tokens
                images = [page for page in turn.pages if page.kind == "image"]
                assert [page.tokens for page in images] == [12, 4] * len(talk.images)
                found = sum(page.tokens for page in turn.pages if page.found)
                assert found <= turn.cached_tokens
            for turn in talk.turns[1:]:
                assert all(page.found for page in turn.pages if page.kind == "image"), talk.title
                assert turn.cached_tokens >= 16 * len(talk.images)
        assert not any(page.found for page in talks[0].turns[0].pages if page.kind == "image")

    def test_pages_are_shared_while_they_are_in_use(self, engine: Engine) -> None:
        from octavo.core.inspection.page_census import SHARED
        from octavo.core.inspection.page_watch import PageWatch

        watch = engine.watch = PageWatch()
        converse(engine, conversations(2))
        engine.watch = None
        assert watch.moments["units"][:, SHARED].max() > 0

    def test_a_question_may_come_first(self) -> None:
        talk = Conversation("x", ["image 1 :", np.zeros((SIDE, SIDE, 3), np.uint8)], [Turn("why ?", "so")], True)
        assert talk.prompt(talk.turns[0])[0] == "question : why ?" and talk.prompt(talk.turns[0])[-1] == "answer :"


class TestGallery:
    def talk(self, output: str) -> Conversation:
        pages = [Page("text", 4, True), Page("image", 12, False)]
        turn = Turn("what is <here> ?", "a cat", output, 16, 4, pages)
        return Conversation("one & only", ["look :", np.full((SIDE, SIDE, 3), 9, np.uint8)], [turn])

    def test_html(self) -> None:
        page = gallery([self.talk("a dog")])
        assert "one &amp; only" in page and "what is &lt;here&gt; ?" in page and "<here>" not in page
        assert '<b class="bad">a dog</b> (right: a cat)' in page and "4 of 16 tokens found" in page
        assert page.count("data:image/png;base64,") == 1
        assert 'class="text found"' in page and 'class="image"' in page
        assert "page 0: text, 4 tokens, shared" in page and 'page 1: image, 12 tokens"' in page
        assert '<b class="good">a cat</b> <small>' in gallery([self.talk("a cat")])

    def test_the_figure_has_every_image(self) -> None:
        drawn = conversation_figure([self.talk("a dog"), self.talk("a cat")])
        assert sum(bool(axes.images) for axes in drawn.axes) == 2


def test_wrong_images_are_those_of_another_question() -> None:
    questions = exam_questions("colour", 0, 3)
    right, wrong, blank = (exam_images(questions, shown) for shown in ("right", "wrong", "blank"))
    assert all(np.array_equal(w[0], right[number - 1][0]) for number, w in enumerate(wrong))
    assert np.array_equal(blank[0][0], blank[1][0]) and not np.array_equal(blank[0][0], right[0][0])


def test_rows() -> None:
    def sample(number: int, shown: str, points: float) -> dict[str, Any]:
        return {"item": f"colour/{number}", "shown": shown, "exam": "colour", "accuracy": points}

    taken = [sample(0, "right", 100.0), sample(1, "right", 0.0), sample(0, "wrong", 0.0), sample(1, "wrong", 0.0)]
    twice = {"item": "twice", "shown": "right", "exam": "twice", "accuracy": 50, "hit_tokens": 30, "query_tokens": 40}
    colour, asked = rows([*taken, twice], seed=0)
    assert (colour["task"], colour["items"], colour["accuracy"], colour["wrong_accuracy"]) == ("colour", 2, 50, 0)
    assert colour["accuracy_ci"] == [0, 100] and "blank_accuracy" not in colour and "hit_percent" not in colour
    assert asked["hit_percent"] == 75 and "accuracy_ci" not in asked


def test_the_exams_that_are_taken_exist() -> None:
    assert set(DEMO_EXAMS) <= set(EXAMS)


class TestCommand:
    ARGUMENTS = ("experiment=interleaved", "exams=[colour,compare]", "limit=2")

    def test_a_run(self, octavo: Command, tiny_demo: Path) -> None:
        outcome = octavo(*self.ARGUMENTS, f"model.path={tiny_demo}")
        assert outcome.code == 0, outcome.err
        found = {row["task"]: row for row in outcome.metrics["rows"]}
        assert [*found][:3] == ["conversations", "colour", "compare"]
        assert {"colour, on photographs", "multihop of 4, among photographs", "asked twice"} <= found.keys()
        assert found["colour"]["items"] == 2
        assert {"accuracy", "blank_accuracy", "wrong_accuracy", "accuracy_ci"} <= found["compare"].keys()
        assert found["conversations"]["hit_tokens"] > 0 and found["asked twice"]["hit_percent"] >= 0
        report = (outcome.folder / "report.html").read_text()
        assert "<h2>Conversations</h2>" in report and "Page map: the conversations, all at once" in report
        assert {file.name for file in (outcome.folder / "plots").iterdir()} == {"conversations.png", "accuracy.png"}
        assert "eight images: which image has a" in outcome.out and "tokens found" in outcome.out

    @pytest.mark.slow
    def test_an_interrupted_run_goes_on(self, octavo: Command, tiny_demo: Path) -> None:
        small = ("exams=[colour]", "limit=1", "page_map=false")
        folder = octavo(*self.ARGUMENTS, f"model.path={tiny_demo}", *small).folder
        file = folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        kept = next(n for n, line in enumerate(lines) if json.loads(line)["exam"] == "colour") + 1
        file.write_text("".join(lines[:kept]))
        outcome = octavo(f"resume={folder}")
        assert outcome.code == 0, outcome.err
        again = file.read_text().splitlines(keepends=True)
        assert again[:kept] == lines[:kept] and len(again) == len(lines)
        keys = [(s["item"], s["shown"]) for s in samples(folder)]
        assert len(set(keys)) == len(keys)

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("exams=[color]", "exams=color: unknown; did you mean 'colour'?"),
            ("exams=[colour,colour]", "exams lists 'colour' twice"),
            ("questions=0", "questions=0: must be at least 1"),
            ("model.path=nowhere", "holds no demo model"),
        ],
    )
    def test_refused(self, override: str, message: str, octavo: Command) -> None:
        outcome = octavo("experiment=interleaved", override)
        assert outcome.code == 1 and message in outcome.err and "Traceback" not in outcome.err


def test_the_yaml_says_what_the_types_say() -> None:
    from .test_configs import composed

    config = composed("experiment=interleaved")
    assert isinstance(config, Interleaved)
    assert (config.exams, config.questions, config.page_map) == (list(DEMO_EXAMS), Interleaved("x").questions, True)
    assert isinstance(config.model, VisionModelSettings)
