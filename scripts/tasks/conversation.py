"""A long text and several questions about it, asked one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from octavo.scripts.tasks import filler
from octavo.scripts.tasks.ruler import Haystack


@dataclass(frozen=True)
class Turn:
    """A question, how its answer begins, and what a right answer holds."""

    question: str
    cue: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """``text`` holds the answers of all ``turns``, at depths from 0 to 1 that a seed has drawn."""

    intro: str
    text: Haystack
    turns: tuple[Turn, ...]


def conversation(words: int, turns: int, seed: str) -> Conversation:
    """As many needles as there are turns; each turn asks for another one. Equal arguments, equal conversation."""
    rng = Random(seed)
    names, codes = filler.names(rng, turns), filler.numbers(rng, turns)
    cues = [f"The locker code of the {name} is" for name in names]
    said = [f"{cue} {code}." for cue, code in zip(cues, codes, strict=True)]
    return Conversation(
        intro="Some locker codes are hidden in the text below. Keep them in mind.",
        text=Haystack(filler.sentences(rng, words), sorted((rng.random(), sentence) for sentence in said)),
        turns=tuple(
            Turn(f"What is the locker code of the {name}?", cue, code)
            for name, cue, code in zip(names, cues, codes, strict=True)
        ),
    )
