"""Text without content, as long as wanted: sentences and names from small word lists, by a seed. It holds no digit."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

_ADJECTIVES = (
    "amber", "brisk", "copper", "dusty", "eager", "faded", "gentle", "hollow", "ivory", "jolly", "keen", "lonely",
    "mellow", "narrow", "olive", "patient", "quiet", "rusty", "silver", "tidy", "upper", "velvet", "wooden", "young",
)  # fmt: skip
_NOUNS = (
    "anchor", "baker", "castle", "dancer", "engine", "farmer", "garden", "harbour", "island", "jacket", "kettle",
    "lantern", "market", "neighbour", "orchard", "painter", "quarry", "river", "sailor", "teacher", "umbrella",
    "village", "window", "yard",
)  # fmt: skip
_NAMES = (
    ("azure", "bronze", "crimson", "golden", "indigo", "maroon", "purple", "scarlet", "turquoise", "violet"),
    ("badger", "camel", "dolphin", "falcon", "giraffe", "hedgehog", "leopard", "otter", "penguin", "tiger"),
)
_VERBS = ("admires", "borrows", "carries", "describes", "follows", "greets", "mends", "passes", "remembers", "watches")
_ENDS = ("after the rain", "before noon", "in early spring", "on most days", "without a word", "near the old bridge")


def sentences(rng: Random, words: int) -> list[str]:
    """Sentences of at least ``words`` words together, each with a full stop."""
    found: list[str] = []
    count = 0
    while count < words:
        subject, thing = (f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}" for _ in range(2))
        found.append(f"The {subject} {rng.choice(_VERBS)} the {thing} {rng.choice(_ENDS)}.")
        count += len(found[-1].split())
    return found


def first_words(text: Sequence[str], words: int) -> list[str]:
    """The first ``words`` words of some sentences; the last sentence may be cut short, and ends in a full stop too."""
    kept: list[str] = []
    for sentence in text:
        own = sentence.split()
        if len(own) >= words:
            return [*kept, f"{' '.join(own[:words]).rstrip('.')}."] if words else kept
        kept.append(sentence)
        words -= len(own)
    return kept


def names(rng: Random, count: int) -> list[str]:
    """Names of two words, such as "crimson falcon"; no word is in two of them, nor in a sentence."""
    return [f"{colour} {animal}" for colour, animal in zip(*(rng.sample(w, count) for w in _NAMES), strict=True)]


def invented_words(rng: Random, count: int) -> list[str]:
    """Different words of six letters that no language has, none of them inside another."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    picked = rng.sample(range(len(syllables) ** 3), count)
    base = len(syllables)
    return ["".join(syllables[number // base**place % base] for place in range(3)) for number in picked]


def numbers(rng: Random, count: int) -> list[str]:
    """Different numbers of seven digits."""
    return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), count)]
