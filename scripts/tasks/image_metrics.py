"""Scores of answers about images, in points (0-100), each after the benchmark that is named.

| function        | benchmark                              | deviation                                          |
|-----------------|----------------------------------------|----------------------------------------------------|
| `open_answer`   | MM-NIAH, which takes VQA's rule        | punctuation is dropped, contractions are not spelt out |
| `soft_accuracy` | MM-NIAH, counting                      | none                                               |
| `chosen_option` | MM-NIAH and MuirBench, multiple choice | what names no option is wrong; MuirBench draws one |
| `true_or_false` | NLVR2                                  | yes and no count as well                           |
| `rouge_l`       | COCO captions                          | words end at everything that is no letter or digit |
| `things_f1`     | SPICE's idea, on scenes                | tuples are read off captions, which have a closed form |

Captions get ROUGE-L because it is a score of one caption: no statistics of a corpus (CIDEr weighs words by the whole
file, so it changes with ``limit``), no parser and no Java (SPICE, METEOR); pairs of runs can then be compared item by
item. On scenes ``things_f1`` stands beside it, since a wrong colour is one word for ROUGE-L and a wrong thing here.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence

ARTICLES = ("a", "an", "the")
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
ROUGE_BETA = 1.2
"""Weight of recall over precision in COCO's ROUGE-L."""


def words(text: str) -> list[str]:
    """Words in lower case, without articles, numbers as digits."""
    found = re.findall(r"\w+", text.lower())
    return [str(NUMBERS.index(word)) if word in NUMBERS else word for word in found if word not in ARTICLES]


def open_answer(output: str, answer: str) -> float:
    """100 if the output holds the answer's words, one after the other."""
    said, wanted = words(output), words(answer)
    starts = range(len(said) - len(wanted) + 1)
    return 100.0 * (bool(wanted) and any(said[at : at + len(wanted)] == wanted for at in starts))


def soft_accuracy(output: str, answer: Sequence[object]) -> float:
    """Share of the list's places at which a JSON list in the output has the same element."""
    bare = output.replace("```", "").replace("json", "").strip()
    try:
        said = json.loads(bare)
    except json.JSONDecodeError:
        return 0.0
    if not isinstance(said, list):
        return 0.0
    right = sum(1 for own, wanted in zip(said, answer, strict=False) if own == wanted)
    return 100.0 * right / len(answer)


def chosen_option(output: str, options: Sequence[str]) -> int | None:
    """Which option an output names: by a letter in brackets, by a letter alone, or in its words, whole or from the
    beginning. The last one that it names; None if it names none."""
    letters = {chr(ord("A") + number): number for number in range(len(options))}
    named = re.findall(r"\(([A-Z])\)", output) or re.findall(r"\b([A-Z])\b(?!')", output.strip())
    known = [letters[letter] for letter in named if letter in letters]
    if known:
        return known[-1]
    bare = output.strip().strip(".,!?:;'\"").lower()
    if len(bare) == 1 and bare.upper() in letters:
        return letters[bare.upper()]
    meant = [number for number, option in enumerate(options) if bare and f"{option.lower()} ".startswith(f"{bare} ")]
    if meant:
        return meant[-1]
    within = {number: bare.rfind(option.lower()) for number, option in enumerate(options) if option.strip()}
    last = max(within, key=lambda number: (within[number], len(options[number])), default=None)
    return None if last is None or within[last] < 0 else last


def true_or_false(output: str) -> bool | None:
    """The first word that says it; None if none does."""
    for word in words(output):
        if word in ("true", "yes", "false", "no"):
            return word in ("true", "yes")
    return None


def rouge_l(output: str, references: Sequence[str]) -> float:
    """F of the longest common subsequence of words, precision and recall each the best over the references."""
    said = re.findall(r"\w+", output.lower())
    given = [re.findall(r"\w+", reference.lower()) for reference in references]
    if not said or not any(given):
        return 0.0
    common = [(_common(said, reference), len(reference)) for reference in given if reference]
    precision = max(length for length, _ in common) / len(said)
    recall = max(length / total for length, total in common)
    if not precision or not recall:
        return 0.0
    squared = ROUGE_BETA**2
    return 100.0 * (1 + squared) * precision * recall / (recall + squared * precision)


def things_f1(output: str, reference: str) -> float:
    """F1 of the things of two descriptions of scenes: a thing is size, colour, kind and place, between commas."""
    said, wanted = (
        Counter(thing.strip() for thing in text.split(",") if thing.strip()) for text in (output, reference)
    )
    right = (said & wanted).total()
    return 100.0 * 2 * right / (said.total() + wanted.total()) if right else 0.0


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for place, other in enumerate(second, start=1):
            above = row[place]
            row[place] = diagonal + 1 if word == other else max(above, row[place - 1])
            diagonal = above
    return row[-1]
