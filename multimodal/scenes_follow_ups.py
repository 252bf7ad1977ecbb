"""More questions about scenes that were drawn for another one, so that what is costly, looking, teaches more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random
from typing import NamedTuple

from octavo.multimodal.scenes import COLOURS, DIGITS, SHAPES, Pair, Scene, Thing
from octavo.multimodal.scenes_questions import (
    PRACTICE,
    compare_answer,
    compare_question,
    multihop_answer,
    multihop_question,
    needle_digit_answer,
    needle_question,
)
from octavo.multimodal.scenes_tasks import ABSENT, RELATIONS, SCENE_TASKS, with_article

ATTEMPTS = 4
"""Questions that are tried for each that is wanted: not every one makes sense of every scene."""


class Exchange(NamedTuple):
    question: str
    answer: str


def follow_ups(rng: Random, scenes: Sequence[Scene], pairs: Sequence[Pair], number: int) -> list[Exchange]:
    """Up to ``number`` different questions that have one right answer, about one of the images or several, as often as
    ``PRACTICE`` says. Yes and no are equally likely where the scenes allow both; a thing that is asked about is there,
    but for a share ``ABSENT``."""
    found: dict[str, str] = {}
    for _ in range(ATTEMPTS * number):
        if len(found) == number:
            break
        several = len(scenes) > 1 and rng.random() < 0.5
        exchange = _across(rng, scenes) if several else _within(rng, scenes, pairs)
        if exchange is not None:
            found.setdefault(*exchange)
    return [Exchange(*item) for item in found.items()]


def _within(rng: Random, scenes: Sequence[Scene], pairs: Sequence[Pair]) -> Exchange | None:
    """About one image; None if the question that was drawn makes no sense of it."""
    asked = rng.randrange(len(scenes))
    [name] = rng.choices(_NAMES, cum_weights=_NAME_WEIGHTS)
    subject = _SUBJECTS[name](rng, scenes[asked], pairs)
    if subject is None:
        return None
    task = SCENE_TASKS[name]
    question = task.question(subject)
    return Exchange(
        f"in image {asked + 1} , {question}" if len(scenes) > 1 else question, task.answer(scenes[asked], subject)
    )


def _across(rng: Random, scenes: Sequence[Scene]) -> Exchange | None:
    """About several images."""
    [ask] = rng.choices((_compared, _found, _hopped), cum_weights=_ACROSS_WEIGHTS)
    return ask(rng, scenes)


def _compared(rng: Random, scenes: Sequence[Scene]) -> Exchange | None:
    return Exchange(compare_question(), compare_answer(scenes)) if len(scenes) == 2 else None


def _found(rng: Random, scenes: Sequence[Scene]) -> Exchange | None:
    """Which image has a thing that no other has."""
    asked = rng.randrange(len(scenes))
    if not scenes[asked].things:
        return None
    digits = [thing for thing in scenes[asked].things if thing.kind in DIGITS]
    thing = rng.choice(digits if digits and rng.random() < 0.5 else scenes[asked].things)
    digit = thing.kind in DIGITS
    alike = [scene.of(kind=thing.kind, colour=None if digit else thing.colour) for scene in scenes]
    if sum(map(bool, alike)) > 1:
        return None
    if digit:
        return Exchange(needle_question(f"the digit {thing.kind}"), needle_digit_answer(scenes, thing.kind))
    return Exchange(needle_question(with_article(thing.pair)), str(asked + 1))


def _hopped(rng: Random, scenes: Sequence[Scene]) -> Exchange | None:
    """The shape in one image that has the colour of a shape in another."""
    first, second = rng.sample(range(len(scenes)), 2)
    from_thing = _only(rng, scenes[second])
    if from_thing is None:
        return None
    there = scenes[first].of(colour=from_thing.colour)
    if len(there) != 1 or there[0].kind not in SHAPES:
        return None
    shape = from_thing.kind
    return Exchange(multihop_question(first, shape, second), multihop_answer(scenes, first, shape, second))


def _only(rng: Random, scene: Scene) -> Thing | None:
    """A shape that the scene shows once."""
    alone = [thing for thing in scene.things if thing.kind in SHAPES and len(scene.of(kind=thing.kind)) == 1]
    return rng.choice(alone) if alone else None


def _shape(rng: Random, scene: Scene, pairs: Sequence[Pair]) -> str | None:
    """A shape that the scene shows once, or now and then not at all."""
    if rng.random() < ABSENT:
        missing = [shape for shape in SHAPES if not scene.of(kind=shape)]
        return rng.choice(missing) if missing else None
    thing = _only(rng, scene)
    return None if thing is None else thing.kind


def _colour(rng: Random, scene: Scene, pairs: Sequence[Pair]) -> str | None:
    """A colour of one thing, which is a shape, or now and then of none."""
    wanted = 0 if rng.random() < ABSENT else 1
    found = [
        colour
        for colour in COLOURS
        if len(things := scene.of(colour=colour)) == wanted and all(thing.kind in SHAPES for thing in things)
    ]
    return rng.choice(found) if found else None


def _countable(rng: Random, scene: Scene, pairs: Sequence[Pair]) -> str:
    kinds = ("objects", *(word for thing in scene.things for word in thing.pair if word not in DIGITS))
    return rng.choice(kinds) if rng.random() > ABSENT else rng.choice(rng.choice(pairs))


def _digit(rng: Random, scene: Scene, pairs: Sequence[Pair]) -> str | None:
    digits = [thing.kind for thing in scene.things if thing.kind in DIGITS]
    return digits[0] if len(digits) == 1 else None


def _look(rng: Random, scene: Scene, pairs: Sequence[Pair]) -> Pair | None:
    """What is there, or what has its colour or its shape and is not there."""
    shapes = [thing for thing in scene.things if thing.kind in SHAPES]
    if not shapes:
        return rng.choice(pairs)
    colour, shape = rng.choice(shapes).pair
    if rng.random() < 0.5:
        return colour, shape
    absent = [
        pair
        for pair in pairs
        if (pair[0] == colour) != (pair[1] == shape) and not scene.of(kind=pair[1], colour=pair[0])
    ]
    return rng.choice(absent) if absent else None


def _relation(rng: Random, scene: Scene, pairs: Sequence[Pair]) -> tuple[str, str, str] | None:
    """Two shapes that the scene shows once, and a relation between them that holds in half of the questions."""
    first, second = _only(rng, scene), _only(rng, scene)
    if first is None or second is None or first == second:
        return None
    wanted = rng.random() < 0.5
    name = rng.choice([name for name, relation in RELATIONS.items() if relation.holds(first, second) == wanted])
    return first.kind, name, second.kind


_SUBJECTS: dict[str, Callable[[Random, Scene, Sequence[Pair]], object | None]] = {
    "colour": _shape,
    "shape": _colour,
    "size": _shape,
    "place": _shape,
    "count": _countable,
    "digit": _digit,
    "exists": _look,
    "relation": _relation,
}
"""Task of one scene -> what it may ask of a scene that is there already; None if nothing."""

_NAMES = tuple(_SUBJECTS)
_NAME_WEIGHTS = [*accumulate(PRACTICE[name] for name in _NAMES)]
_ACROSS_WEIGHTS = [*accumulate((PRACTICE["compare"], PRACTICE["needle_digit"], PRACTICE["multihop"]))]
