"""How a completion is scored: the published rules of three benchmarks, in points from 0 to 100.

| metric family   | what is cut from the output        | scores                                                  |
|-----------------|------------------------------------|---------------------------------------------------------|
| `repobench`     | first line that is no comment      | exact match, edit similarity                            |
| `longbench`     | first line without `` ` ``, #, //  | edit similarity (`code_sim`), best over the answers     |
| `crosscodeeval` | first statement, comments removed  | exact match, edit similarity, identifier match and F1   |

Edit similarity is the normalised indel similarity 2 LCS / (len a + len b). fuzzywuzzy, which all three used, rounds it
to an integer and, without python-Levenshtein, computes difflib's different ratio instead. rapidfuzz does neither, so
`metric_versions()` belongs in every record of results.
"""

import io
import re
import tokenize
from collections.abc import Sequence
from importlib.metadata import version
from itertools import accumulate

from rapidfuzz import fuzz, process

from octavo.scripts.tasks.keywords import KEYWORDS

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"' + r"|'(?:[^'\\]|\\.)*'", re.DOTALL)
_BLOCK_COMMENT = {"python": (('"""', "'''"), ('"""', "'''"), "#"), "java": (("/*",), ("*/",), "//")}


def metric_versions() -> dict[str, str]:
    """What computes the scores, for the record of a run."""
    return {"edit_similarity": f"rapidfuzz {version('rapidfuzz')} fuzz.ratio, not rounded"}


def exact_match(prediction: str, gold: str) -> float:
    """100 if both hold the same words between white space, else 0 (RepoBench v1.1)."""
    return 100.0 * (prediction.split() == gold.split())


def edit_similarity(prediction: str, gold: str) -> float:
    """Normalised indel similarity in [0, 100]; white space counts."""
    return fuzz.ratio(prediction, gold)


def closest(lines: Sequence[str], line: str) -> float:
    """The largest ``edit_similarity`` of any of ``lines``; 0 if there is none."""
    found = process.extractOne(line, lines, scorer=fuzz.ratio, processor=None)
    return float(found[1]) if found else 0.0


def first_code_line(output: str, language: str = "python") -> str:
    """First line that is neither blank nor in a comment, as RepoBench v1.1 reads it; else the first line.

    A line that opens a block comment or docstring is skipped even if the same line closes it, and the block lasts
    until a later line *ends* in the closing mark: that is what the published figures rest on.
    """
    if language not in _BLOCK_COMMENT:
        raise ValueError(f"no comment rule for {language!r}; known: {sorted(_BLOCK_COMMENT)}")
    opening, closing, line_comment = _BLOCK_COMMENT[language]
    lines = output.lstrip("\n").split("\n")
    inside = False
    for line in lines:
        bare = line.strip()
        if inside:
            inside = not bare.endswith(closing)
        elif bare.startswith(opening):
            inside = True
        elif bare and not bare.startswith(line_comment):
            return line
    return lines[0]


def first_plain_line(output: str) -> str:
    """First line that holds no backtick, `#` or `//`, as LongBench's `code_sim` reads it; else empty.

    Leading line breaks are dropped, a later blank line counts as a line.
    """
    lines = output.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")


def first_statement(prompt: str, output: str, language: str) -> str:
    """The output up to the end of the statement that it continues, or starts.

    Python: up to the first line break outside brackets and strings, the prompt's open ones included. CrossCodeEval
    asks tree-sitter for that point; Python's own tokenizer needs no grammar package. Where it gives up, on malformed
    code or because the statement never ends, the first line is taken. Other languages: up to the first `;`, `{` or
    `}`, or all of it (the published rule).
    """
    if language != "python":
        closing = re.search(r"[;{}]", output)
        return output[: closing.end()] if closing else output
    text = prompt + output
    line_starts = [0, *accumulate(len(line) for line in io.StringIO(text))]
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            end = line_starts[token.start[0] - 1] + token.start[1] - len(prompt)
            if token.type == tokenize.NEWLINE and output[: max(end, 0)].strip():
                return output[:end]
    except (tokenize.TokenError, SyntaxError):
        pass
    return output.lstrip("\n").split("\n")[0]


def remove_comments(code: str) -> str:
    """Drops all from `#` or `//` to the end of the line, strings or not (CrossCodeEval's rule)."""
    return re.sub(r"(?:#|//).*", "", code)


def identifiers(code: str, language: str) -> list[str]:
    """Words of `code` that can be identifiers, in order: string literals and keywords are dropped (CrossCodeEval)."""
    words = re.findall(r"\w+", _STRING.sub("", code))
    return [w for w in words if re.match(r"[_a-zA-Z]", w) and w not in KEYWORDS[language]]


def score_line(output: str, gold: str, language: str = "python") -> dict[str, float]:
    """RepoBench v1.1: `exact_match` and `edit_similarity` of the first code line, indentation included."""
    line = first_code_line(output, language)
    return {"exact_match": exact_match(line, gold), "edit_similarity": edit_similarity(line, gold)}


def score_similarity(output: str, answers: Sequence[str]) -> dict[str, float]:
    """LongBench `code_sim`: `edit_similarity` of the first plain line, best over the answers."""
    line = first_plain_line(output)
    return {"edit_similarity": max(edit_similarity(line, answer) for answer in answers)}


def score_statement(prompt: str, output: str, gold: str, language: str) -> dict[str, float]:
    """CrossCodeEval: `exact_match`, `edit_similarity`, `identifier_exact_match` and `identifier_f1`.

    Lines are compared without indentation and blank lines, identifier lists in order, F1 on sets of identifiers.
    """
    if language not in KEYWORDS:
        raise ValueError(f"no keyword list for {language!r}; known: {sorted(KEYWORDS)}")
    prediction = remove_comments(first_statement(prompt, output, language))
    target = remove_comments(gold)
    predicted, wanted = identifiers(prediction, language), identifiers(target, language)
    shared, either = len({*predicted} & {*wanted}), len({*predicted}) + len({*wanted})
    return {
        "exact_match": 100.0 * (_bare_lines(prediction) == _bare_lines(target)),
        "edit_similarity": edit_similarity(prediction.strip(), target.strip()),
        "identifier_exact_match": 100.0 * (predicted == wanted),
        "identifier_f1": 100.0 * 2 * shared / either if either else 0.0,
    }


def _bare_lines(code: str) -> list[str]:
    return [line.strip() for line in code.split("\n") if line.strip()]
