"""Images and two questions about different ones of them: what is dropped for the first is missed by the second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from octavo.multimodal.scenes import TRAINED, Scene
from octavo.multimodal.scenes_follow_ups import Exchange, follow_ups
from octavo.multimodal.scenes_questions import ask


@dataclass(frozen=True)
class TwoQuestions:
    """``first`` is a question of ``task`` about one of the images, ``other`` one about another of them."""

    item_id: str
    task: str
    scenes: tuple[Scene, ...]
    first: Exchange
    other: Exchange


def two_questions(seed: int, tasks: Sequence[str], images: int, count: int) -> list[TwoQuestions]:
    """``count`` items of ``images`` images each, whose first questions are of ``tasks`` in turn. Item n is the same
    whatever the count."""
    items = []
    for number in range(count):
        task = tasks[number % len(tasks)]
        rng = Random(f"two questions {seed} {images} {task} {number}")
        asked = ask(rng, f"indexed_{task}", images)
        about = asked.question.partition(",")[0]
        others: list[Exchange] = []
        while not others:
            found = follow_ups(rng, asked.scenes, TRAINED, 4)
            others = [each for each in found if each.question.startswith("in image") and about not in each.question]
        first = Exchange(asked.question, asked.answer)
        items.append(TwoQuestions(f"{task}/{number}", task, asked.scenes, first, others[0]))
    return items
