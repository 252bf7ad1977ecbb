"""Exams of the demo model with real photographs, of which training has seen none: scenes that lie upon one, and scenes
among several images of which some are photographs. What a photograph itself shows, the model has no words for.

The photographs are those that packages ship (``PHOTOGRAPHS``). Nothing is downloaded, and no package is imported.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch

from octavo.multimodal.demo_data import exam_questions
from octavo.multimodal.fitting import fit
from octavo.multimodal.image_policy import ImagePolicy
from octavo.multimodal.images import load_image
from octavo.multimodal.scenes import SIDE, Scene
from octavo.multimodal.scenes_questions import Question
from octavo.multimodal.scenes_render import draw, paint, scene_arrays

PHOTOGRAPHS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "temple": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "admiral": ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
}
"""Name -> package that ships it, and where."""

DIMMED = 0.35
"""Photographs that things lie upon are darkened to this, so that nothing in them is as bright as a thing."""

_UPON = ("colour", "shape", "count", "digit", "exists", "relation")
_AMONG = ("in image k of 2", "in image k of 4", "multihop of 4", "needle_object of 4", "needle_object of 8")

PHOTOGRAPH_EXAMS = {
    **{f"{exam}, on photographs": exam for exam in _UPON},
    **{f"{exam}, among photographs": exam for exam in _AMONG},
}
"""Name -> exam whose questions are asked. On photographs: about things that lie on a darkened one. Among them: half of
the images that have no part in the answer, and at least one, are photographs as they are."""


class Asked(NamedTuple):
    """``images`` of each question, uint8 [SIDE, SIDE, 3]."""

    questions: list[Question]
    images: list[list[np.ndarray]]


def photographs() -> dict[str, np.ndarray]:
    """Those of ``PHOTOGRAPHS`` whose package is installed: uint8 [SIDE, SIDE, 3], cropped to a square."""
    found = {}
    for name, (package, file) in PHOTOGRAPHS.items():
        spec = find_spec(package)
        path = None if spec is None or spec.origin is None else Path(spec.origin).parent / file
        if path is not None and path.is_file():
            found[name] = fit(load_image(path), SIDE, ImagePolicy(resize="crop")).pixels
    return found


def photograph_exam(name: str, seed: int, size: int) -> Asked:
    """``size`` questions of one of ``PHOTOGRAPH_EXAMS``, with the photographs that there are, in turn.

    Raises:
        ImportError: there is none.
    """
    backdrops = [*photographs().values()]
    if not backdrops:
        packages = ", ".join(dict.fromkeys(package for package, _ in PHOTOGRAPHS.values()))
        raise ImportError(f"no photographs: none of {packages} is installed; pip install 'octavo[photographs]'")
    questions = exam_questions(PHOTOGRAPH_EXAMS[name], seed, size)
    if PHOTOGRAPH_EXAMS[name] in _UPON:
        images = [
            [on_photograph(question.scenes[0], backdrops[number % len(backdrops)])]
            for number, question in enumerate(questions)
        ]
        return Asked(questions, images)
    rng = Random(f"among photographs {name} {seed}")
    images = [draw(question.scenes) for question in questions]
    turn = 0
    for question, shown in zip(questions, images, strict=True):
        idle = sorted(set(range(len(shown))) - needed_images(question))
        for place in rng.sample(idle, (len(idle) + 1) // 2):
            shown[place] = backdrops[turn % len(backdrops)]
            turn += 1
    return Asked(questions, images)


def needed_images(question: Question) -> set[int]:
    """Images, from 0, on which the answer depends, beyond what they do not show: those that question and answer name,
    else the one that is the answer."""
    named = re.findall(r"\bimage (\d)", f"{question.question} {question.answer}") or [question.answer]
    return {int(number) - 1 for number in named}


def on_photograph(scene: Scene, photograph: np.ndarray) -> np.ndarray:
    """The things of a scene on a photograph uint8 [SIDE, SIDE, 3], which is darkened."""
    things, _ = scene_arrays([scene])
    canvas = torch.from_numpy(photograph.astype(np.float32) * DIMMED)
    return paint(torch.from_numpy(things), canvas[None])[0].numpy()
