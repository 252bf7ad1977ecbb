"""Questions about one scene. Each is asked about a subject; its answer follows from the scene and the subject alone.

An answer that takes more than one look says what was seen before what follows from it, as in
``circle left , ring right , left . yes``. A small model learns to look for one thing a word, and to compare words; to
compare what it has not said, it does not learn in time. Nor whether what was asked holds of two places, where each of
the three says nothing without the others: how the two lie to each other comes first, then whether that was asked.

``pairs`` are the combinations of colour and shape that may be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from octavo.multimodal.scenes import CELLS, COLOURS, COLUMNS, DIGITS, ROWS, SHAPES, Pair, Scene, Thing, place, some

NONE = "none"
"""The answer to a question about what is not there."""

ABSENT = 0.08
"""Share of the questions about one thing for which it is not there."""

PLURALS = {shape: f"{shape}es" if shape == "cross" else f"{shape}s" for shape in SHAPES}

SAME = "same"
"""How two things lie to each other that are in one row or one column."""

THEREFORE = "."
"""Between what was seen and what follows from it; no other answer holds it."""


class Relation(NamedTuple):
    """Whether one thing comes ``before`` another, or else behind it, by its ``row`` or its ``column``."""

    by: str
    before: bool

    def holds(self, first: Thing, second: Thing) -> bool:
        one, other = getattr(first, self.by), getattr(second, self.by)
        return bool(one < other if self.before else one > other)

    def where(self, thing: Thing) -> str:
        """As much of its place as matters, in words."""
        return ROWS[thing.row] if self.by == "row" else COLUMNS[thing.column]


RELATIONS = {
    "left of": Relation("column", True),
    "right of": Relation("column", False),
    "above": Relation("row", True),
    "below": Relation("row", False),
}


@dataclass(frozen=True)
class SceneTask:
    """A kind of question about one scene.

    Attributes:
        subject: what is asked about, drawn at random.
        scene: a random scene of which the question makes sense.
        question, answer: in the words of the demo model's language, with a space between any two.
    """

    name: str
    subject: Callable[[Random, Sequence[Pair]], Any]
    scene: Callable[[Random, Sequence[Pair], Any], Scene]
    question: Callable[[Any], str]
    answer: Callable[[Scene, Any], str]


def _colour(rng: Random, pairs: Sequence[Pair]) -> str:
    return rng.choice(pairs)[0]


def _shape(rng: Random, pairs: Sequence[Pair]) -> str:
    return rng.choice(pairs)[1]


def _look(rng: Random, pairs: Sequence[Pair]) -> Pair:
    return rng.choice(pairs)


def _nothing(rng: Random, pairs: Sequence[Pair]) -> None:
    return None


def _any_scene(rng: Random, pairs: Sequence[Pair], subject: None) -> Scene:
    return place(rng, some(rng, pairs, rng.randint(1, 6), digits=0.25))


def _one_of_shape(rng: Random, pairs: Sequence[Pair], shape: str) -> Scene:
    """One thing of the shape, or now and then none, among up to five others."""
    return _one_among(rng, [p for p in pairs if p[1] == shape], [p for p in pairs if p[1] != shape])


def _one_of_colour(rng: Random, pairs: Sequence[Pair], colour: str) -> Scene:
    return _one_among(rng, [p for p in pairs if p[0] == colour], [p for p in pairs if p[0] != colour])


def _one_among(rng: Random, asked: Sequence[Pair], others: Sequence[Pair]) -> Scene:
    there = [] if rng.random() < ABSENT else [rng.choice(asked)]
    return place(rng, there + some(rng, others, rng.randint(1, 5)))


def _the(scene: Scene, *, kind: str | None = None, colour: str | None = None) -> Thing | None:
    found = scene.of(kind=kind, colour=colour)
    return found[0] if found else None


def _word(thing: Thing | None, attribute: str) -> str:
    return NONE if thing is None else str(getattr(thing, attribute))


def with_article(look: Pair) -> str:
    """``a red circle``, ``an orange circle``."""
    colour, shape = look
    return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}"


def reasoned(seen: Sequence[str], verdict: str) -> str:
    """An answer of what was seen, one thing after the other, and what follows from it."""
    return f"{' , '.join(seen)} {THEREFORE} {verdict}"


def verdict(answer: str) -> str:
    """What follows from what an answer says was seen; all of an answer that says no such thing."""
    return answer.rpartition(f" {THEREFORE} ")[2]


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


def _countable(rng: Random, pairs: Sequence[Pair]) -> str:
    """``objects``, a colour or a shape."""
    return rng.choice(("objects", _colour(rng, pairs), _shape(rng, pairs)))


def _counted_scene(rng: Random, pairs: Sequence[Pair], subject: str) -> Scene:
    if subject == "objects":
        return place(rng, some(rng, pairs, rng.randint(0, 9)))
    asked = [p for p in pairs if subject in p]
    others = [p for p in pairs if subject not in p]
    number = rng.randint(0, 5)
    return place(rng, some(rng, asked, number) + some(rng, others, rng.randint(0, 9 - number)))


def _count_question(subject: str) -> str:
    return f"how many {subject if subject == 'objects' else PLURALS.get(subject, f'{subject} objects')} ?"


def _count(scene: Scene, subject: str) -> str:
    """Row by row, and their sum."""
    rows = [thing.row for thing in scene.things if subject in ("objects", *thing.pair)]
    return reasoned([f"{name} {rows.count(row)}" for row, name in enumerate(ROWS)], str(len(rows)))


def _digit_scene(rng: Random, pairs: Sequence[Pair], subject: None) -> Scene:
    return place(rng, [(rng.choice(tuple(COLOURS)), rng.choice(DIGITS)), *some(rng, pairs, rng.randint(0, 5))])


def _digit(scene: Scene, subject: None) -> str:
    return next(thing.kind for thing in scene.things if thing.kind in DIGITS)


def _exists_scene(rng: Random, pairs: Sequence[Pair], look: Pair) -> Scene:
    """The look is there half of the time; its colour and its shape are always there, also with others."""
    colour, shape = look
    same_colour = [p for p in pairs if p[0] == colour and p != look]
    same_shape = [p for p in pairs if p[1] == shape and p != look]
    looks = [rng.choice(near) for near in (same_colour, same_shape) if near]
    looks += [look] if rng.random() < 0.5 else []
    return place(rng, looks + some(rng, [p for p in pairs if p != look], rng.randint(0, 3)))


def _exists(scene: Scene, look: Pair) -> str:
    """What has the colour, and where, in reading order, until one has the shape, too."""
    colour, shape = look
    seen = []
    for thing in scene.of(colour=colour):
        seen.append(f"{thing.kind} {thing.place}")
        if thing.kind == shape:
            return reasoned(seen, "yes")
    return reasoned(seen or [NONE], "no")


def _related(rng: Random, pairs: Sequence[Pair]) -> tuple[str, str, str]:
    """Two shapes and a relation."""
    first, second = rng.sample(sorted({shape for _, shape in pairs}), 2)
    return first, rng.choice(tuple(RELATIONS)), second


def _related_scene(rng: Random, pairs: Sequence[Pair], subject: tuple[str, str, str]) -> Scene:
    """One thing of each shape, so placed that yes and no are equally likely, and up to three others."""
    first, relation, second = subject
    looks = [rng.choice([p for p in pairs if p[1] == shape]) for shape in (first, second)]
    looks += some(rng, [p for p in pairs if p[1] not in (first, second)], rng.randint(0, 3))
    wanted = rng.random() < 0.5
    while True:
        scene = place(rng, looks, rng.sample(CELLS, len(looks)))
        if RELATIONS[relation].holds(scene.of(kind=first)[0], scene.of(kind=second)[0]) == wanted:
            return scene


def _relation(scene: Scene, subject: tuple[str, str, str]) -> str:
    """Where both are, as far as it matters; how they lie to each other; and whether that is what was asked."""
    first, second = (scene.of(kind=shape)[0] for shape in (subject[0], subject[2]))
    relation = RELATIONS[subject[1]]
    lie = [
        name.split()[0] for name, other in RELATIONS.items() if other.by == relation.by and other.holds(first, second)
    ]
    seen = [*(f"{thing.kind} {relation.where(thing)}" for thing in (first, second)), *(lie or [SAME])]
    return reasoned(seen, _yes(relation.holds(first, second)))


SCENE_TASKS: dict[str, SceneTask] = {
    task.name: task
    for task in (
        SceneTask("describe", _nothing, _any_scene, lambda s: "what is there ?", lambda scene, s: scene.description),
        SceneTask(
            "colour", _shape, _one_of_shape,
            lambda shape: f"what colour is the {shape} ?",
            lambda scene, shape: _word(_the(scene, kind=shape), "colour"),
        ),
        SceneTask(
            "shape", _colour, _one_of_colour,
            lambda colour: f"what shape is {colour} ?",
            lambda scene, colour: _word(_the(scene, colour=colour), "kind"),
        ),
        SceneTask(
            "size", _shape, _one_of_shape,
            lambda shape: f"what size is the {shape} ?",
            lambda scene, shape: _word(_the(scene, kind=shape), "size"),
        ),
        SceneTask(
            "place", _shape, _one_of_shape,
            lambda shape: f"where is the {shape} ?",
            lambda scene, shape: _word(_the(scene, kind=shape), "place"),
        ),
        SceneTask("count", _countable, _counted_scene, _count_question, _count),
        SceneTask("digit", _nothing, _digit_scene, lambda s: "which digit is there ?", _digit),
        SceneTask(
            "exists", _look, _exists_scene,
            lambda look: f"is there {with_article(look)} ?", _exists,
        ),
        SceneTask(
            "relation", _related, _related_scene,
            lambda s: f"is the {s[0]} {s[1]} the {s[2]} ?", _relation,
        ),
    )
}  # fmt: skip
"""Questions about a single image, by name."""
