"""Examining the demo model through octavo's engine: accuracy by task, also with real photographs, and two questions
about one image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np

from octavo.core import Engine, SamplingParams
from octavo.multimodal.demo_data import EXAMS, exam_questions
from octavo.multimodal.demo_model import demo_prompt
from octavo.multimodal.demo_photographs import PHOTOGRAPH_EXAMS, photograph_exam
from octavo.multimodal.scenes import BLANK, TRAINED
from octavo.multimodal.scenes_questions import Question
from octavo.multimodal.scenes_render import draw
from octavo.multimodal.scenes_tasks import SCENE_TASKS, verdict

LONGEST_ANSWER = 72
"""Tokens: nine things of five words, eight commas, the end; more is no answer."""


class Score(NamedTuple):
    """Share of the answers that are right as a whole, and of those whose verdict is, whatever they say was seen."""

    answers: float
    verdicts: float


class Shared(NamedTuple):
    """Accuracy of the first and of the second of two questions about each of some images; and of the second ones'
    prompts, the tokens that were found in pages, and all."""

    first: float
    second: float
    hit_tokens: int
    query_tokens: int


def engine_answers(engine: Engine, questions: Sequence[Question], images: Sequence[Sequence[Any]]) -> list[str]:
    """What the engine answers to each question about its ``images``, greedily."""
    prompts = [demo_prompt(shown, q.question) for q, shown in zip(questions, images, strict=True)]
    completions = engine.generate(prompts, SamplingParams(max_tokens=LONGEST_ANSWER))
    return [completion.samples[0].text.strip() for completion in completions]


def exam_images(questions: Sequence[Question], shown: str) -> list[list[np.ndarray]]:
    """The images that each question is asked about, uint8 [SIDE, SIDE, 3]; ``shown`` as in ``demo_training.SHOWN``."""
    return [_shown(questions, number, shown) for number in range(len(questions))]


def engine_score(engine: Engine, questions: Sequence[Question], shown: str = "right") -> Score:
    """Of what the engine answers to ``questions``. ``shown`` as in ``demo_training.SHOWN``."""
    return _score(engine, questions, exam_images(questions, shown))


def engine_exams(engine: Engine, seed: int, size: int, shown: str = "right") -> dict[str, Score]:
    """By exam; a seed that training has not used for choosing weights is one that it was not given."""
    return {name: engine_score(engine, exam_questions(name, seed, size), shown) for name in EXAMS}


def shared_questions(engine: Engine, seed: int, size: int) -> Shared:
    """Ask for the colour of a shape in each image, and, when all of that is answered, where it is. Prompts are alike up
    to the question, so the second ones find the images' pages where the engine shares prefixes."""
    rng = Random(f"shared {seed}")
    first, second = SCENE_TASKS["colour"], SCENE_TASKS["place"]
    asked: tuple[list[Question], list[Question]] = [], []
    for _ in range(size):
        shape = first.subject(rng, TRAINED)
        scene = first.scene(rng, TRAINED, shape)
        for task, questions in zip((first, second), asked, strict=True):
            questions.append(Question(task.name, (scene,), task.question(shape), task.answer(scene, shape)))
    images = [draw(question.scenes) for question in asked[0]]
    earlier = _score(engine, asked[0], images).answers
    start = engine.stats()
    later = _score(engine, asked[1], images).answers
    end = engine.stats()
    return Shared(earlier, later, end.hit_tokens - start.hit_tokens, end.query_tokens - start.query_tokens)


def photograph_scores(
    engine: Engine, seed: int, size: int, names: Iterable[str] = tuple(PHOTOGRAPH_EXAMS)
) -> dict[str, Score]:
    """By exam of ``PHOTOGRAPH_EXAMS``.

    Raises:
        ImportError: there are no photographs.
    """
    return {name: _score(engine, *photograph_exam(name, seed, size)) for name in names}


def _shown(questions: Sequence[Question], number: int, shown: str) -> list[np.ndarray]:
    scenes = questions[number].scenes
    if shown == "blank":
        scenes = (BLANK,) * len(scenes)
    elif shown == "wrong":
        scenes = questions[number - 1].scenes
    return draw(scenes)


def _score(engine: Engine, questions: Sequence[Question], images: Sequence[Sequence[Any]]) -> Score:
    pairs = [*zip(engine_answers(engine, questions, images), (q.answer for q in questions), strict=True)]
    whole = sum(text == answer for text, answer in pairs)
    verdicts = sum(verdict(text) == verdict(answer) for text, answer in pairs)
    return Score(whole / len(pairs), verdicts / len(pairs))
