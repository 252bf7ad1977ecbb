"""A suite of synthetic long-context tasks after RULER (arXiv 2404.06654): what is to be found is planted at a place
that is known, in a text of any length.

| task                 | planted                                  | asked                   | RULER, appendix B        |
|----------------------|------------------------------------------|-------------------------|--------------------------|
| `needle_single`      | one code of one name                     | its code                | S-NIAH                   |
| `needle_multi_key`   | the codes of four names                  | the code of one         | MK-NIAH                  |
| `needle_multi_value` | four codes of one name                   | all four                | MV-NIAH                  |
| `needle_multi_query` | the codes of four names                  | all four                | MQ-NIAH                  |
| `variable_tracking`  | a value, and four assignments after it   | the five variables      | VT, one chain, four hops |
| `frequent_words`     | invented words, the k-th as often as     | the three most frequent | FWE, alpha = 2           |
|                      | k ** -2 says                             |                         |                          |

Deviations: the texts, names and wording are octavo's own; the filler is made of varied sentences instead of one that
repeats or of essays; words get exactly their share of places instead of drawing them; variable tracking comes without a
worked example; the paper's common-words and question-answering tasks are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi, sqrt
from random import Random
from typing import Protocol

from octavo.scripts.tasks import filler

PLANTED = 4  # needles beside each other
HOPS = 4
MOST_FREQUENT = 3
_LEAST_WORDS = 34  # from here on the third most frequent word is more frequent than the fourth


class Text(Protocol):
    """A text that grows with ``words`` and always holds what is asked for."""

    least_words: int

    def __call__(self, words: int) -> str: ...


@dataclass(frozen=True)
class Puzzle:
    """A text and a question about it.

    Attributes:
        text: what the question is about; ``text(words)`` is a function of ``words`` alone.
        cue: how the answer begins; the model goes on from there.
        gold: a right answer, as it follows the cue.
        answers: strings that a right answer holds, all of them.
    """

    intro: str
    text: Text
    question: str
    cue: str
    gold: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Haystack:
    """Filler sentences with others between them.

    Attributes:
        needles: (depth, sentence) in order of depth: 0 is before the first filler sentence, 1 after the last.
    """

    sentences: Sequence[str]
    needles: Sequence[tuple[float, str]]
    least_words = 0

    def __call__(self, words: int) -> str:
        hay = filler.first_words(self.sentences, words)
        places = [round(depth * len(hay)) for depth, _ in self.needles]
        for place, (_, needle) in reversed(list(zip(places, self.needles, strict=True))):
            hay.insert(place, needle)
        return " ".join(hay)


@dataclass(frozen=True)
class WordList:
    """``vocabulary`` shuffled, its k-th word with a share of k ** -2 / (pi ** 2 / 6) of all places, rounded down; what
    is left over goes to further words, once each."""

    vocabulary: Sequence[str]
    seed: str
    least_words = _LEAST_WORDS

    def __call__(self, words: int) -> str:
        counts = self.counts(words)
        listed = [
            word for word, count in zip(self.vocabulary[: len(counts)], counts, strict=True) for _ in range(count)
        ]
        Random(self.seed).shuffle(listed)
        return " ".join(listed)

    @staticmethod
    def counts(words: int) -> list[int]:
        """How often each of the first words occurs."""
        share = words * 6 / pi**2
        counts: list[int] = []
        while (count := int(share / (len(counts) + 1) ** 2)) > 0:
            counts.append(count)
        return counts + [1] * (words - sum(counts))


def puzzle(task: str, words: int, depth: float | None, seed: str) -> Puzzle:
    """A puzzle of a task, its text at most ``words`` words long beside what is planted. Equal arguments, equal puzzle.

    Args:
        depth: of the asked needle, 0 (first) to 1 (last); the others lie at random, and so does it for None.
    """
    return TASKS[task](words, depth, seed)


def string_match(output: str, answers: Sequence[str]) -> float:
    """Points: the share of ``answers`` that ``output`` holds, in any letter case (RULER's `string_match_all`)."""
    return 100.0 * sum(answer.lower() in output.lower() for answer in answers) / len(answers)


def _listed(parts: Sequence[str]) -> str:
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last


def _needles(keys: int, values: int, asked: int) -> Callable[[int, float | None, str], Puzzle]:
    """A task with ``values`` codes for each of ``keys`` names, of which the first ``asked`` are asked for."""

    def make(words: int, depth: float | None, seed: str) -> Puzzle:
        rng = Random(seed)
        called, codes = filler.names(rng, keys), filler.numbers(rng, keys * values)
        said = [f"The locker code of the {called[i // values]} is {code}." for i, code in enumerate(codes)]
        depths = [rng.random() for _ in said]
        if depth is not None:
            depths[0] = depth
        hay = Haystack(filler.sentences(rng, words), sorted(zip(depths, said, strict=True)))
        # An answer of several names says each one's sentence again, which a small model can do, too.
        if values > 1:
            cue, gold = f"The {values} locker codes of the {called[0]} are", f" {_listed(codes)}."
        else:
            cue, gold = said[0].removesuffix(f" {codes[0]}."), f" {' '.join([f'{codes[0]}.', *said[1:asked]])}"
        one = asked * values == 1
        return Puzzle(
            intro="Some locker codes are hidden in the text below. Keep them in mind.",
            text=hay,
            question=f"What {'is the locker code' if one else 'are the locker codes'} of "
            f"{_listed([f'the {name}' for name in called[:asked]])}?",
            cue=cue,
            gold=gold,
            answers=tuple(codes[: asked * values]),
        )

    return make


def _variable_tracking(words: int, depth: float | None, seed: str) -> Puzzle:
    """``depth`` is that of the value; the assignments follow it, in order."""
    rng = Random(seed)
    variables = [word.upper() for word in filler.invented_words(rng, HOPS + 1)]
    (value,) = filler.numbers(rng, 1)
    sources = [value, *variables]
    said = [f"VAR {variable} = {'VAR ' * (i > 0)}{sources[i]}." for i, variable in enumerate(variables)]
    first = rng.random() if depth is None else depth
    depths = [first, *sorted(rng.uniform(first, 1) for _ in range(HOPS))]
    return Puzzle(
        intro="Variables are assigned here and there in the text below. Keep track of them.",
        text=Haystack(filler.sentences(rng, words), list(zip(depths, said, strict=True))),
        question=f"Which {HOPS + 1} variables have the value {value}, directly or through another variable?",
        cue=f"The variables that have the value {value} are VAR",
        gold=f" {_listed([variables[0], *(f'VAR {variable}' for variable in variables[1:])])}.",
        answers=tuple(variables),
    )


def _frequent_words(words: int, depth: float | None, seed: str) -> Puzzle:
    """It has no place in the text, so no ``depth``."""
    words = max(words, _LEAST_WORDS)
    # sqrt(6 words) / pi words come more than once, and at most twice as many are left over.
    vocabulary = filler.invented_words(Random(seed), int(3 * sqrt(words)))
    return Puzzle(
        intro="Below is a list of made-up words. Some of them come up again and again.",
        text=WordList(vocabulary, seed),
        question=f"Which {MOST_FREQUENT} words are the most frequent in the list?",
        cue=f"The {MOST_FREQUENT} most frequent words are",
        gold=f" {_listed(vocabulary[:MOST_FREQUENT])}.",
        answers=tuple(vocabulary[:MOST_FREQUENT]),
    )


TASKS: dict[str, Callable[[int, float | None, str], Puzzle]] = {
    "needle_single": _needles(1, 1, 1),
    "needle_multi_key": _needles(PLANTED, 1, 1),
    "needle_multi_value": _needles(1, PLANTED, 1),
    "needle_multi_query": _needles(PLANTED, 1, PLANTED),
    "variable_tracking": _variable_tracking,
    "frequent_words": _frequent_words,
}
"""Task -> its puzzle, of (words, depth, seed)."""

WITHOUT_DEPTH = ("frequent_words",)
"""Tasks whose answer lies everywhere."""
