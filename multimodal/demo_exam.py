"""Examining the demo model through octavo's engine: accuracy by task, two questions about one image, and things on real
photographs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from octavo.core import Engine, SamplingParams
from octavo.multimodal.demo_data import EXAMS, exam_questions
from octavo.multimodal.demo_model import demo_prompt
from octavo.multimodal.fitting import fit
from octavo.multimodal.image_policy import ImagePolicy
from octavo.multimodal.images import load_image
from octavo.multimodal.scenes import BLANK, SIDE, TRAINED, Scene
from octavo.multimodal.scenes_questions import Question
from octavo.multimodal.scenes_render import draw, paint, scene_arrays
from octavo.multimodal.scenes_tasks import SCENE_TASKS

LONGEST_ANSWER = 72
"""Tokens: nine things of five words, eight commas, the end; more is no answer."""

PHOTOGRAPHS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "temple": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "admiral": ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
}
"""Name -> package that ships it, and where."""

PHOTOGRAPH_TASKS = ("colour", "shape", "count", "digit", "exists")

DIMMED = 0.35
"""Photographs are darkened to this, so that nothing in them is as bright as a thing."""


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


def engine_accuracy(engine: Engine, questions: Sequence[Question], shown: str = "right") -> float:
    """Share of ``questions`` that the engine answers in full. ``shown`` as in ``demo_training.SHOWN``."""
    return _accuracy(engine, questions, exam_images(questions, shown))


def engine_exams(engine: Engine, seed: int, size: int, shown: str = "right") -> dict[str, float]:
    """Accuracy by exam; a seed that training has not used for choosing weights is one that it was not given."""
    return {name: engine_accuracy(engine, exam_questions(name, seed, size), shown) for name in EXAMS}


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
    earlier = _accuracy(engine, asked[0], images)
    start = engine.stats()
    later = _accuracy(engine, asked[1], images)
    end = engine.stats()
    return Shared(earlier, later, end.hit_tokens - start.hit_tokens, end.query_tokens - start.query_tokens)


def photographs() -> dict[str, np.ndarray]:
    """Those of ``PHOTOGRAPHS`` whose package is installed: uint8 [SIDE, SIDE, 3], cropped to a square. The packages are
    not imported."""
    found = {}
    for name, (package, file) in PHOTOGRAPHS.items():
        spec = find_spec(package)
        path = None if spec is None or spec.origin is None else Path(spec.origin).parent / file
        if path is not None and path.is_file():
            found[name] = fit(load_image(path), SIDE, ImagePolicy(resize="crop")).pixels
    return found


def photograph_accuracy(
    engine: Engine, seed: int, size: int, tasks: Sequence[str] = PHOTOGRAPH_TASKS
) -> dict[str, float]:
    """Accuracy by task where scenes lie on photographs, of which training has seen none; empty if there is none. What a
    photograph itself shows, the model has no words for."""
    found = {}
    for task in tasks if photographs() else ():
        questions = exam_questions(task, seed, size)
        found[task] = _accuracy(engine, questions, photograph_images(questions))
    return found


def photograph_images(questions: Sequence[Question]) -> list[list[np.ndarray]]:
    """The scene of each question, which has one, on the photographs that there are, in turn. There must be one."""
    backdrops = [*photographs().values()]
    return [
        [on_photograph(question.scenes[0], backdrops[number % len(backdrops)])]
        for number, question in enumerate(questions)
    ]


def on_photograph(scene: Scene, photograph: np.ndarray) -> np.ndarray:
    """The things of a scene on a photograph uint8 [SIDE, SIDE, 3], which is darkened."""
    things, _ = scene_arrays([scene])
    canvas = torch.from_numpy(photograph.astype(np.float32) * DIMMED)
    return paint(torch.from_numpy(things), canvas[None])[0].numpy()


def _shown(questions: Sequence[Question], number: int, shown: str) -> list[np.ndarray]:
    scenes = questions[number].scenes
    if shown == "blank":
        scenes = (BLANK,) * len(scenes)
    elif shown == "wrong":
        scenes = questions[number - 1].scenes
    return draw(scenes)


def _accuracy(engine: Engine, questions: Sequence[Question], images: Sequence[Sequence[Any]]) -> float:
    answers = engine_answers(engine, questions, images)
    return sum(text == question.answer for text, question in zip(answers, questions, strict=True)) / len(questions)
