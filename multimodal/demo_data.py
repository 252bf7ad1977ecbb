"""What the demo model learns from and is examined on: batches of questions, each drawn from a seed.

Everything is numbers in numpy arrays until it reaches the device, where ``render`` draws: a process that makes batches
needs no torch operations and sends a few hundred kilobytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from octavo.multimodal.demo_tokenizer import BOS, EOS, IGNORED, IMAGE, PAD, VOCABULARY, token_ids
from octavo.multimodal.scenes import HELD_OUT, TRAINED, Pair, Scene
from octavo.multimodal.scenes_follow_ups import Exchange, follow_ups
from octavo.multimodal.scenes_prompts import Parts, prompt_parts, question_part, varied_parts
from octavo.multimodal.scenes_questions import INDEXED_TASKS, PRACTICE, SEARCH_TASKS, Question, ask, images_of
from octavo.multimodal.scenes_render import scene_arrays
from octavo.multimodal.scenes_tasks import SCENE_TASKS

DESCRIPTIONS = ("describe", "indexed_describe")

GROUPS = ((1, 1), (2, 2), (3, 4), (5, 8))
"""Fewest and most images of the questions in one batch. All of a batch have equally many, so little is padding."""

LENGTH_STEP = 32
"""Rows are padded to a multiple of it, so that shapes repeat."""


class Batch(NamedTuple):
    """B questions with L tokens at most, padded at the end.

    Attributes:
        token_ids: int64 [B, L].
        labels: int64 [B, L], the token itself where it belongs to an answer or ends it, else ``IGNORED``.
        things, backgrounds: of all images, as ``scene_arrays``.
        images: of each question.
        alone: every image sees itself only (``DemoModel.forward``).
    """

    token_ids: np.ndarray
    labels: np.ndarray
    things: np.ndarray
    backgrounds: np.ndarray
    images: int
    alone: bool = False


class Exam(NamedTuple):
    """``tasks`` take turns."""

    tasks: tuple[str, ...]
    images: int
    pairs: Sequence[Pair] = TRAINED


INDEXED = 4.0
"""Weight of all tasks about image k of several together, beside those of ``PRACTICE``."""

_INDEXED = tuple(task for task in INDEXED_TASKS if task not in DESCRIPTIONS)

EXAMS: dict[str, Exam] = {
    **{task: Exam((task,), 1) for task in SCENE_TASKS},
    "compare": Exam(("compare",), 2),
    "same": Exam(("same",), 2),
    **{f"in image k of {n}": Exam(_INDEXED, n) for n in (2, 4, 8)},
    **{f"{task} of {n}": Exam((task,), n) for task in SEARCH_TASKS for n in (2, 4, 8)},
    **{f"{task}, new pairs": Exam((task,), 1, HELD_OUT) for task in ("describe", "colour", "shape", "exists")},
}
"""What accuracy is reported on, by name: every task, by number of images, and single images of combinations of colour
and shape that training never draws."""


def collate(
    questions: Sequence[Question],
    parts: Sequence[Parts],
    image_tokens: int,
    later: Sequence[Sequence[Exchange]] | None = None,
) -> Batch:
    """Questions, all with equally many images, as arrays; ``parts`` are their prompts, and ``later`` what is asked
    after each has been answered."""
    later = [[]] * len(questions) if later is None else later
    rows = [_row(*row, image_tokens) for row in zip(questions, parts, later, strict=True)]
    longest = max(len(ids) for ids, _ in rows)
    width = -(-longest // LENGTH_STEP) * LENGTH_STEP
    ids = np.full((len(rows), width), VOCABULARY[PAD], np.int64)
    labels = np.full((len(rows), width), IGNORED, np.int64)
    scenes: list[Scene] = []
    for number, ((row, learnt), question, laid) in enumerate(zip(rows, questions, parts, strict=True)):
        ids[number, : len(row)] = row
        for span in learnt:
            labels[number, span] = row[span]
        scenes += [question.scenes[part] for part in laid if isinstance(part, int)]
    return Batch(ids, labels, *scene_arrays(scenes), len(questions[0].scenes))


def training_step(
    seed: int,
    step: int,
    *,
    descriptions: float,
    groups: int,
    step_images: int,
    follow_up: int,
    image_tokens: int,
    alone: float = 0.0,
) -> list[Batch]:
    """The batches of one step of training, a function of its arguments alone.

    Args:
        descriptions: share of questions that ask for all that there is in an image.
        groups: how many of ``GROUPS`` take part, from the first; each gets one batch, of equally many images.
        step_images: images in all.
        follow_up: most questions that follow an answer, about the same images.
        alone: share of batches whose images see themselves only. What is asked does not depend on it.
    """
    rng, ways = Random(f"train {seed} {step}"), Random(f"ways {seed} {step}")
    batches = []
    for low, high in GROUPS[:groups]:
        images = rng.randint(low, high)
        tasks, weights = _mixture(images)
        described = DESCRIPTIONS[images > 1]
        questions = [
            ask(rng, described if rng.random() < descriptions else rng.choices(tasks, weights)[0], images)
            for _ in range(max(1, step_images // groups // images))
        ]
        parts = [varied_parts(rng, question.question, images) for question in questions]
        later = [follow_ups(rng, question.scenes, TRAINED, rng.randint(0, follow_up)) for question in questions]
        batch = collate(questions, parts, image_tokens, later)
        batches.append(batch._replace(alone=ways.random() < alone))
    return batches


def exam_questions(name: str, seed: int, number: int) -> list[Question]:
    """``number`` questions of an exam. No seed gives what training draws."""
    rng = Random(f"exam {name} {seed}")
    tasks, images, pairs = EXAMS[name]
    return [ask(rng, tasks[turn % len(tasks)], images, pairs) for turn in range(number)]


def exam_batches(questions: Sequence[Question], image_tokens: int, most_images: int = 256) -> Iterator[Batch]:
    """Questions in the plain form, with up to ``most_images`` images a batch."""
    at_once = max(1, most_images // len(questions[0].scenes))
    for start in range(0, len(questions), at_once):
        some = questions[start : start + at_once]
        yield collate(some, [prompt_parts(q.question, len(q.scenes)) for q in some], image_tokens)


def _mixture(images: int) -> tuple[list[str], list[float]]:
    """Tasks with so many images and their weights, of ``PRACTICE``. Tasks of one scene, when they are asked about image
    k of several, count together as much as ``INDEXED``."""
    scale = INDEXED / sum(PRACTICE[task.removeprefix("indexed_")] for task in _INDEXED)
    weight = {**PRACTICE, **{task: scale * PRACTICE[task.removeprefix("indexed_")] for task in _INDEXED}}
    low_high = {task: images_of(task) for task in weight}
    tasks = [task for task, (low, high) in low_high.items() if low <= images <= high]
    return tasks, [weight[task] for task in tasks]


def _row(
    question: Question, parts: Parts, later: Sequence[Exchange], image_tokens: int
) -> tuple[list[int], list[slice]]:
    """Token ids of the prompt, its answer and what follows, and where the answers are."""
    ids = [VOCABULARY[BOS]]
    for part in parts:
        ids += token_ids(part) if isinstance(part, str) else [VOCABULARY[IMAGE]] * image_tokens
    answers = []
    for asked, answer in (("", question.answer), *((question_part(each.question), each.answer) for each in later)):
        ids += token_ids(asked)
        start = len(ids)
        ids += [*token_ids(answer), VOCABULARY[EOS]]
        answers.append(slice(start, len(ids)))
    return ids, answers
