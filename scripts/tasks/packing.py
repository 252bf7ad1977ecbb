"""From a line to an item: the line's own file and as much of the project around it as a prompt has room for."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from octavo.scripts.tasks.items import CodeItem, leaks, prompt_text, sha256
from octavo.scripts.tasks.metrics import closest, identifiers
from octavo.scripts.tasks.mining import Candidate, Module, import_lines, related_files
from octavo.scripts.tasks.sources import Source


@dataclass(frozen=True)
class BuildSpec:
    """What the items of a list look like; lengths in tokens of the building tokenizer."""

    targets: tuple[int, ...]  # prompt length of each item, in order
    shortfall: float = 0.02  # share of its target that a prompt may fall short of
    max_in_file: float = 0.5  # share of its target that the in-file code may take
    in_file_lines: int = 40  # code kept before the gold line, besides the file's imports
    max_gold_tokens: int = 16
    likeness: tuple[float, float] = (70.0, 95.0)  # bounds of `likeness`, in points


def pack(
    candidate: Candidate,
    project: dict[str, Module],
    source: Source,
    target: int,
    length: Callable[[str], int],
    spec: BuildSpec,
    others: Sequence[str] = (),
) -> CodeItem | None:
    """The candidate with as much cross-file code as `target` allows, or None.

    None if that is too little, if the prompt leaks the gold line, if it lacks one of its identifiers, or if the
    likeness of the gold line to the code it is about is out of bounds: reading, not guessing, is what the task is
    about. `length` counts the tokens of a text. `others` are paths that may fill the prompt when no related file is
    left.

    Files enter whole, the most relevant first and empty ones left out, until one does not fit. Of that one as many
    lines enter as fit: from the definition on if it is the defining file, else from the top. Nothing enters after it.
    """
    item = CodeItem(
        item_id=f"{source.folder}/{candidate.path}:{candidate.line}",
        source=source.name,
        version=source.version,
        licence=source.licence,
        path=candidate.path,
        setting=candidate.setting,
        context=(),
        prefix=_in_file_code(project[candidate.path], candidate.line, spec.in_file_lines),
        gold=candidate.gold,
        uses=candidate.name,
        defined_in=candidate.defined_in,
        tokens=0,
        prompt_sha256="",
    )

    def tokens_of(trial: CodeItem) -> int:
        return length(prompt_text(trial))

    if tokens_of(item) > spec.max_in_file * target:
        return None
    related = related_files(candidate.path, candidate.defined_in, project)
    for path in (p for p in dict.fromkeys([*related, *others]) if p != candidate.path and project[p].text.strip()):
        lines = project[path].text.rstrip().split("\n")
        start = candidate.definition_line - 1 if path == candidate.defined_in else 0
        extended = partial(_with_lines, item, path, lines, start)
        fitting = _largest(len(lines), lambda count, extended=extended: tokens_of(extended(count)) <= target)
        if fitting:
            item = extended(fitting)
        if fitting < len(lines):
            break

    prompt = prompt_text(item)
    tokens = length(prompt)
    if tokens < (1 - spec.shortfall) * target or not _lines_about(item) or leaks(item.gold, prompt):
        return None
    if not set(identifiers(item.gold, "python")) <= set(re.findall(r"\w+", prompt)):
        return None
    low, high = spec.likeness
    if not low <= likeness(item) <= high:
        return None
    return replace(item, tokens=tokens, prompt_sha256=sha256(prompt))


def likeness(item: CodeItem) -> float:
    """Edit similarity, in points, of the gold line to the line that is most like it, both without indentation, of
    cross-file code; or of the file itself where the name that the line uses is defined there."""
    return closest(_lines_about(item), item.gold.strip())


def _lines_about(item: CodeItem) -> list[str]:
    texts = [item.prefix] if item.defined_in == item.path else [text for _, text in item.context]
    return [line.strip() for text in texts for line in text.split("\n")]


def _with_lines(item: CodeItem, path: str, lines: list[str], start: int, count: int) -> CodeItem:
    """`item` with `count` more lines of context, from `start` on; near the end of its file the window moves up."""
    first = min(start, len(lines) - count)
    return replace(item, context=((path, "\n".join(lines[first : first + count])), *item.context))


def _in_file_code(module: Module, line: int, keep: int) -> str:
    """Code before 1-based `line`: all of it, or the file's imports and the last `keep` lines."""
    before = module.text.split("\n")[: line - 1]
    if len(before) > keep:
        crop = len(before) - keep
        before = [*import_lines(module, before=crop + 1), "", *before[crop:]]
    return "\n".join(before)


def _largest(high: int, fits: Callable[[int], bool]) -> int:
    """The largest count in [0, high] that fits, 0 being taken to fit; asks about `high` first."""
    if fits(high):
        return high
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
