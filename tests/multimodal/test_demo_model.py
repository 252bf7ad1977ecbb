"""The demo model that comes with octavo: it sees, through the engine, and its card says so of these very weights."""

import re

import pytest

from octavo.core import Engine, EngineConfig
from octavo.multimodal.demo_data import EXAMS, exam_questions
from octavo.multimodal.demo_exam import engine_score, shared_questions
from octavo.multimodal.demo_model import FOLDER, MAX_BYTES, load_demo


@pytest.fixture(scope="module")
def engine():
    try:
        model, tokenizer, encoder = load_demo()
    except ImportError as error:
        pytest.skip(str(error))
    return Engine(model, tokenizer, EngineConfig(pool_tokens=8192), encoders={"image": encoder})


def test_it_is_small_and_its_card_names_every_exam():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= MAX_BYTES
    card = (FOLDER / "README.md").read_text()
    named = re.findall(r"^\| ([^|]+) \| \d \|(?: [\d.]+ \|){4}$", card, re.M)
    assert named == [*EXAMS]


@pytest.mark.parametrize(
    ("exam", "size"),
    [
        *((exam, 8) for exam in ("describe", "relation", "in image k of 2")),
        *(pytest.param(exam, 8, marks=pytest.mark.slow) for exam in ("colour", "place", "same", "needle_object of 4")),
        ("multihop of 4", 4),
    ],
)
def test_it_answers_from_what_it_is_shown(engine, exam, size):
    """Well above what the card says of blank and of wrong images, by any luck of so few questions."""
    questions = exam_questions(exam, 7, size)
    assert engine_score(engine, questions).answers >= 0.75
    assert engine_score(engine, questions, "wrong").answers <= 0.6
    engine.check()


def test_a_second_question_finds_the_image_in_pages(engine):
    found = shared_questions(engine, 8, 6)
    assert (found.first, found.second) == (1, 1)
    assert found.hit_tokens >= 6 * 144
