"""Questions about one to eight images: those of ``scenes_tasks`` about one or about image k, and those for which
several images have to be seen together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from octavo.multimodal.scenes import COLOURS, DIGITS, SHAPES, TRAINED, Pair, Scene, place, some
from octavo.multimodal.scenes_tasks import SCENE_TASKS, with_article

MAX_IMAGES = 8


class Question(NamedTuple):
    """Words have a space between any two. Images are called 1, 2, ... in questions and answers."""

    task: str
    scenes: tuple[Scene, ...]
    question: str
    answer: str


def indexed(name: str) -> Callable[[Random, Sequence[Pair], int], Question]:
    """A task of one scene, asked about image k; the others would answer the same question, each in its own way."""

    def ask(rng: Random, pairs: Sequence[Pair], images: int) -> Question:
        task = SCENE_TASKS[name]
        subject = task.subject(rng, pairs)
        scenes = tuple(task.scene(rng, pairs, subject) for _ in range(images))
        asked = rng.randrange(images)
        question = f"in image {asked + 1} , {task.question(subject)}"
        return Question(f"indexed_{name}", scenes, question, task.answer(scenes[asked], subject))

    return ask


def compare(rng: Random, pairs: Sequence[Pair], images: int) -> Question:
    """Which of two images has more things; they have equally many in a third of the questions."""
    wanted = rng.choice(("1", "2", "equal"))
    fewer = rng.randint(0, 8)
    counts = {"1": (rng.randint(fewer + 1, 9), fewer), "2": (fewer, rng.randint(fewer + 1, 9))}
    numbers = counts.get(wanted, (fewer, fewer))
    scenes = tuple(place(rng, some(rng, pairs, number)) for number in numbers)
    return Question("compare", scenes, compare_question(), compare_answer(scenes))


def compare_question() -> str:
    return "which image has more objects ?"


def compare_answer(scenes: Sequence[Scene]) -> str:
    """Of any two scenes."""
    first, second = (len(scene.things) for scene in scenes)
    return "equal" if first == second else "1" if first > second else "2"


def same(rng: Random, pairs: Sequence[Pair], images: int) -> Question:
    """Whether two images show the same things, wherever they are. Where not, one thing has another look."""
    looks = some(rng, pairs, rng.randint(1, 4))
    others = list(looks)
    answer = rng.choice(("yes", "no"))
    if answer == "no":
        changed = rng.randrange(len(looks))
        others[changed] = rng.choice([pair for pair in pairs if pair != looks[changed]])
    return Question("same", (place(rng, looks), place(rng, others)), "do the images show the same objects ?", answer)


def multihop(rng: Random, pairs: Sequence[Pair], images: int) -> Question:
    """The shape in image i that has the colour of a shape in image j. Both have the same colours, so that what they
    have in common tells nothing."""
    first, second = rng.sample(range(images), 2)
    count = rng.randint(2, 4)
    colours = rng.sample(tuple(COLOURS), count)
    kinds = rng.sample(SHAPES, count)

    def pick(colour: str) -> Pair:
        return rng.choice([pair for pair in pairs if pair[0] == colour])

    def in_order() -> list[Pair]:
        """Each colour with a shape of its own; drawn again where a combination may not be drawn."""
        while True:
            rng.shuffle(kinds)
            looks = [*zip(colours, kinds, strict=True)]
            if all(look in pairs for look in looks):
                return looks

    asked = in_order()
    scenes = [place(rng, in_order()) for _ in range(images)]
    scenes[first] = place(rng, [pick(colour) for colour in colours])
    scenes[second] = place(rng, asked)
    colour, shape = rng.choice(asked)
    question = multihop_question(first, shape, second)
    return Question("multihop", tuple(scenes), question, scenes[first].of(colour=colour)[0].kind)


def multihop_question(first: int, shape: str, second: int) -> str:
    return f"what shape in image {first + 1} has the colour of the {shape} in image {second + 1} ?"


def needle_digit(rng: Random, pairs: Sequence[Pair], images: int) -> Question:
    """Which image shows a digit; each shows another one."""
    digits = rng.sample(DIGITS, images)
    scenes = tuple(
        place(rng, [(rng.choice(tuple(COLOURS)), digit), *some(rng, pairs, rng.randint(0, 4))]) for digit in digits
    )
    asked = rng.randrange(images)
    return Question("needle_digit", scenes, needle_question(f"the digit {digits[asked]}"), str(asked + 1))


def needle_question(thing: str) -> str:
    return f"which image has {thing} ?"


def needle_object(rng: Random, pairs: Sequence[Pair], images: int) -> Question:
    """Which image has a thing of a colour and a shape; all have the colour, or the shape, or both in two things."""
    look = rng.choice(pairs)
    near = [pair for pair in pairs if (pair[0] == look[0]) != (pair[1] == look[1])]
    others = [pair for pair in pairs if pair != look]
    asked = rng.randrange(images)
    scenes = tuple(
        place(
            rng,
            [look] * (image == asked) + [rng.choice(near) for _ in range(2)] + some(rng, others, rng.randint(0, 2)),
        )
        for image in range(images)
    )
    return Question("needle_object", scenes, needle_question(with_article(look)), str(asked + 1))


PAIR_TASKS = {"compare": compare, "same": same}
"""Tasks of exactly two images."""

INDEXED_TASKS = {f"indexed_{name}": indexed(name) for name in SCENE_TASKS}
"""Tasks of two to ``MAX_IMAGES`` images, one of which is asked about."""

SEARCH_TASKS = {"multihop": multihop, "needle_digit": needle_digit, "needle_object": needle_object}
"""Tasks of two to ``MAX_IMAGES`` images, several of which have to be looked at."""

TASKS = (*SCENE_TASKS, *PAIR_TASKS, *INDEXED_TASKS, *SEARCH_TASKS)


def ask(rng: Random, task: str, images: int, pairs: Sequence[Pair] = TRAINED) -> Question:
    """A random question.

    Args:
        task: of ``TASKS``.
        images: how many, as the task allows: 1 for those of one scene, 2 for pairs, else 2 to ``MAX_IMAGES``.
        pairs: colours and shapes that may be drawn. Of ``HELD_OUT`` only the tasks of one scene can be made.

    Raises:
        ValueError: no such task, or another number of images than it can have.
    """
    if task not in TASKS:
        raise ValueError(f"there is no task {task!r}; one of: {', '.join(TASKS)}")
    low, high = images_of(task)
    if not low <= images <= high:
        raise ValueError(f"task {task!r} has {low} to {high} images, got {images}")
    if task in SCENE_TASKS:
        kind = SCENE_TASKS[task]
        subject = kind.subject(rng, pairs)
        scene = kind.scene(rng, pairs, subject)
        return Question(task, (scene,), kind.question(subject), kind.answer(scene, subject))
    return {**PAIR_TASKS, **INDEXED_TASKS, **SEARCH_TASKS}[task](rng, pairs, images)


def images_of(task: str) -> tuple[int, int]:
    """The fewest and the most images that a task has."""
    if task in SCENE_TASKS:
        return 1, 1
    return (2, 2) if task in PAIR_TASKS else (2, MAX_IMAGES)
