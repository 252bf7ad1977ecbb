"""Scenes that can be drawn and talked about: things of a kind, a colour and a size on a grid of three by three cells.

Whatever a task asks follows from a ``Scene`` alone; ``scenes_render`` draws it, ``scenes_tasks`` asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 190, 70),
    "blue": (60, 90, 250),
    "yellow": (250, 225, 40),
    "purple": (165, 50, 205),
    "orange": (255, 135, 20),
    "cyan": (40, 215, 225),
    "white": (245, 245, 245),
}
"""Name -> RGB, 0 to 255; all brighter than any background."""

SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring")
DIGITS = tuple("0123456789")
KINDS = SHAPES + DIGITS

SIZES = {"small": 9, "large": 14}
"""Name -> radius in pixels. Digits are always large, since their strokes would blur otherwise."""

ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "centre", "right")
CELL = 32
SIDE = 3 * CELL
"""Pixels of a cell and of an image."""

CELLS = tuple((row, column) for row in range(3) for column in range(3))

Pair = tuple[str, str]
"""A colour and a shape."""

HELD_OUT: tuple[Pair, ...] = (
    ("red", "ring"),
    ("green", "cross"),
    ("blue", "triangle"),
    ("yellow", "diamond"),
    ("purple", "circle"),
    ("orange", "square"),
)
"""Combinations that training never draws, though it draws each colour and each shape."""

TRAINED: tuple[Pair, ...] = tuple((c, s) for c in COLOURS for s in SHAPES if (c, s) not in HELD_OUT)


class Thing(NamedTuple):
    """``dx`` and ``dy`` are pixels from the middle of its cell."""

    kind: str
    colour: str
    size: str
    row: int
    column: int
    dx: int
    dy: int

    @property
    def pair(self) -> Pair:
        return self.colour, self.kind

    @property
    def cell(self) -> tuple[int, int]:
        return self.row, self.column

    @property
    def place(self) -> str:
        return f"{ROWS[self.row]} {COLUMNS[self.column]}"

    @property
    def name(self) -> str:
        return f"{self.size} {self.colour} {self.kind}"


class Background(NamedTuple):
    """A dark colour with a wave in it: RGB 0 to 60, ``swing`` up and down, ``across`` and ``down`` periods an image."""

    red: int
    green: int
    blue: int
    swing: int
    across: int
    down: int


class Scene(NamedTuple):
    """``things`` in reading order, each in a cell of its own, so that none hides another."""

    things: tuple[Thing, ...]
    background: Background

    def of(self, *, kind: str | None = None, colour: str | None = None) -> list[Thing]:
        """The things of a kind, of a colour, or of both."""
        return [thing for thing in self.things if kind in (None, thing.kind) and colour in (None, thing.colour)]

    @property
    def description(self) -> str:
        """All of it in words, ``large red circle top left , small ...``; ``nothing`` if it is empty."""
        return " , ".join(f"{thing.name} {thing.place}" for thing in self.things) or "nothing"


BLANK = Scene((), Background(30, 30, 30, 0, 0, 0))
"""What is shown to see how well a question can be answered blindly."""


def place(rng: Random, looks: Sequence[Pair], cells: Sequence[tuple[int, int]] | None = None) -> Scene:
    """Things of these colours and kinds, at most nine, in random sizes, in ``cells`` or in random ones."""
    cells = rng.sample(CELLS, len(looks)) if cells is None else cells
    things = []
    for (colour, kind), (row, column) in zip(looks, cells, strict=True):
        size = "large" if kind in DIGITS else rng.choice(("small", "large"))
        slack = CELL // 2 - 1 - SIZES[size]
        things.append(Thing(kind, colour, size, row, column, rng.randint(-slack, slack), rng.randint(-slack, slack)))
    return Scene(tuple(sorted(things, key=lambda thing: thing.cell)), _background(rng))


def some(rng: Random, pairs: Sequence[Pair], number: int, digits: float = 0.0) -> list[Pair]:
    """``number`` looks out of ``pairs``; each is a digit instead with probability ``digits``."""
    return [
        (rng.choice(tuple(COLOURS)), rng.choice(DIGITS)) if digits and rng.random() < digits else rng.choice(pairs)
        for _ in range(number)
    ]


def _background(rng: Random) -> Background:
    red, green, blue = (rng.randint(0, 60) for _ in range(3))
    swing = rng.choice((0, 10, 25))
    return Background(red, green, blue, swing, rng.randint(-4, 4), rng.randint(0, 4))
