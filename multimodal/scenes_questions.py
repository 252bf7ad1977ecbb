"""Questions about one to eight images: those of ``scenes_tasks`` about one or about image k, and those for which
several images have to be seen together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from octavo.multimodal.scenes import COLOURS, DIGITS, SHAPES, TRAINED, Pair, Scene, place, some
from octavo.multimodal.scenes_tasks import NONE, SCENE_TASKS, reasoned, with_article

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
    """Whether two images show the same things, wherever they are. No look is there twice; where the images differ, one
    thing has another look."""
    looks = rng.sample(pairs, rng.randint(1, 4))
    others = list(looks)
    if rng.random() < 0.5:
        others[rng.randrange(len(looks))] = rng.choice([pair for pair in pairs if pair not in looks])
    scenes = place(rng, looks), place(rng, others)
    return Question("same", scenes, "do the images show the same objects ?", same_answer(scenes))


def same_answer(scenes: Sequence[Scene]) -> str:
    """What is in the first image, where it is, and where in the second, until something is missing there. Both have
    equally many things, and no look twice."""
    seen = []
    for thing in scenes[0].things:
        there = scenes[1].of(kind=thing.kind, colour=thing.colour)
        seen.append(f"{thing.colour} {thing.kind} {thing.place} : {there[0].place if there else NONE}")
        if not there:
            return reasoned(seen, "no")
    return reasoned(seen, "yes")


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
    _, shape = rng.choice(asked)
    question = multihop_question(first, shape, second)
    return Question("multihop", tuple(scenes), question, multihop_answer(scenes, first, shape, second))


def multihop_question(first: int, shape: str, second: int) -> str:
    return f"what shape in image {first + 1} has the colour of the {shape} in image {second + 1} ?"


def multihop_answer(scenes: Sequence[Scene], first: int, shape: str, second: int) -> str:
    """The colour in the one image, and what has it in the other."""
    colour = scenes[second].of(kind=shape)[0].colour
    [found] = scenes[first].of(colour=colour)
    return reasoned([f"image {second + 1} : {shape} {colour}", f"image {first + 1} : {colour}"], found.kind)


def needle_digit(rng: Random, pairs: Sequence[Pair], images: int) -> Question:
    """Which image shows a digit; each shows another one."""
    digits = rng.sample(DIGITS, images)
    scenes = tuple(
        place(rng, [(rng.choice(tuple(COLOURS)), digit), *some(rng, pairs, rng.randint(0, 4))]) for digit in digits
    )
    asked = rng.randrange(images)
    question = needle_question(f"the digit {digits[asked]}")
    return Question("needle_digit", scenes, question, needle_digit_answer(scenes, digits[asked]))


def needle_digit_answer(scenes: Sequence[Scene], digit: str) -> str:
    """The digits of one image after the other, until it is there; one of them has it."""
    seen = []
    for number, scene in enumerate(scenes, 1):
        shown = [thing.kind for thing in scene.things if thing.kind in DIGITS]
        seen.append(f"image {number} : {' '.join(shown) or NONE}")
        if digit in shown:
            break
    return reasoned(seen, str(number))


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

PRACTICE: dict[str, float] = {
    **dict.fromkeys(("colour", "shape", "size", "place", "digit", "compare"), 0.5),
    **dict.fromkeys(("count", "exists", "needle_object"), 2.0),
    **dict.fromkeys(("relation", "same", "multihop", "needle_digit"), 3.0),
}
"""How often training asks, against each other: what one look answers is soon learnt, what takes several is not.
Descriptions have a share of their own."""

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
