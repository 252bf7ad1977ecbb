"""What the structure of Python code says of its tokens, before any query asks: a token prior (``Engine.submit``).

Worth most is what the line being written depends on; the rest of the code may be read as queries ask for it. After
CodeComp (arXiv 2604.10235), which protects tokens by a code property graph, and HCP (arXiv 2406.18294), where the
bodies of other files' functions may go and their signatures may not.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_WORD = re.compile(r"[A-Za-z_]\w*")
_HEAD = re.compile(r"(?:async\s+def|def|class)\s+([A-Za-z_]\w*)")
_IMPORT = re.compile(r"(?:import|from)\s+[\w.]+")


@dataclass(frozen=True)
class Worth:
    """What each kind of line is worth, 0 to 1. ``near_lines`` before the cursor say which names the writer has in mind.

    ``named``: heads of functions and classes, and module-level assignments, whose name stands in the near lines;
    ``enclosing``: heads of the function and the class around the cursor; ``imports``; ``heads``: all other heads.
    """

    named: float = 1.0
    enclosing: float = 0.9
    imports: float = 0.5
    heads: float = 0.3
    near_lines: int = 12


class _Mark(NamedTuple):
    """Lines ``first`` to ``last`` (0-based, inclusive) of one kind, at an indentation; ``names``: what they define."""

    kind: str
    first: int
    last: int
    indent: int
    names: tuple[str, ...] = ()


def line_worth(text: str, worth: Worth = Worth()) -> list[float]:
    """What each line of a prompt is worth. The cursor is at the end of ``text``, which may hold several files, may
    begin in the middle of one, and ends in unfinished code.

    1. Cut the text where a line begins without indentation, and read each piece by its syntax tree.
    2. A piece that is no Python, as the last one mostly is, is read by its lines alone.
    3. A head, or an assignment, is named if what it defines stands in the near lines. The enclosing heads are the last
       one of each smaller indentation, seen from the cursor.
    """
    lines = text.split("\n")
    marks = [mark for first, last in _pieces(lines) for mark in _marks(lines, first, last)]
    near = lines[-worth.near_lines :]
    wanted = {word for line in near for word in _WORD.findall(line) if not keyword.iskeyword(word)}
    enclosing = _enclosing(lines, marks)
    found = [0.0] * len(lines)
    for mark in marks:
        if wanted.intersection(mark.names) and mark.first < len(lines) - worth.near_lines:
            value = worth.named
        elif mark in enclosing:
            value = worth.enclosing
        else:
            value = {"import": worth.imports, "head": worth.heads, "assignment": 0.0}[mark.kind]
        for number in range(mark.first, mark.last + 1):
            found[number] = max(found[number], value)
    return found


def token_prior(text: str, offsets: Sequence[tuple[int, int]], worth: Worth = Worth()) -> list[float]:
    """``line_worth`` of each token: of the best line that it has a part of. ``offsets`` are the characters of ``text``,
    (first, past the last), that the tokens stand for."""
    values = line_worth(text, worth)
    line_of = [0]  # the line of each character, and of the end
    for character in text:
        line_of.append(line_of[-1] + (character == "\n"))
    return [max(values[line_of[a] : line_of[max(a, b - 1)] + 1]) for a, b in offsets]


def _pieces(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Stretches of lines, (first, past the last), that each begin at an unindented line which can begin a statement."""
    begins = [
        number
        for number, line in enumerate(lines)
        if line[:1].strip() and not line.startswith((")", "]", "}", "else", "elif", "except", "finally"))
        if not (number and lines[number - 1].startswith("@"))  # a decorator and what it decorates are one piece
    ]
    starts = sorted({0, *begins})
    yield from zip(starts, [*starts[1:], len(lines)], strict=True)


def _marks(lines: Sequence[str], first: int, last: int) -> Iterator[_Mark]:
    try:
        tree = ast.parse("\n".join(lines[first:last]))
    except (SyntaxError, ValueError):
        yield from _marks_of_lines(lines, first, last)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            end = max(node.lineno, node.body[0].lineno - 1)  # the head, and a comment before the body
            yield _Mark("head", first + node.lineno - 1, first + end - 1, node.col_offset, (node.name,))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            end = node.end_lineno or node.lineno
            yield _Mark("import", first + node.lineno - 1, first + end - 1, node.col_offset)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = tuple(target.id for target in targets if isinstance(target, ast.Name))
            yield _Mark("assignment", first + node.lineno - 1, first + (node.end_lineno or node.lineno) - 1, 0, names)


def _marks_of_lines(lines: Sequence[str], first: int, last: int) -> Iterator[_Mark]:
    """Heads end at the first line that ends in a colon, at most eight lines on."""
    for number in range(first, last):
        bare = lines[number].lstrip()
        indent = len(lines[number]) - len(bare)
        if head := _HEAD.match(bare):
            ends = (at for at in range(number, min(number + 8, last)) if lines[at].rstrip().endswith(":"))
            yield _Mark("head", number, next(ends, number), indent, (head[1],))
        elif _IMPORT.match(bare):
            yield _Mark("import", number, number, indent)


def _enclosing(lines: Sequence[str], marks: Sequence[_Mark]) -> set[_Mark]:
    """Heads around the cursor: going up, the first head of less indentation than all below it."""
    heads = {mark.first: mark for mark in marks if mark.kind == "head"}
    found, indent = set(), None
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number]
        own = len(line) - len(line.lstrip())
        if indent is None:
            # A prompt ends in the indentation of the line to come, or at most one sign short of it.
            indent = own + (not line.strip())
            continue
        if not line.strip() or own >= indent:
            continue
        indent = own
        if number in heads:
            found.add(heads[number])
        if not indent:
            break
    return found
