"""Lines of the Python projects at hand, at any length of prompt: the code-completion task, widened.

The items are made when a run begins, out of packages that octavo's dependencies bring along, and none is copied into
the project; so they differ between versions of these packages. An item names its package and version, and has the hash
of its prompt, so that two runs can tell whether they asked the same.

Classes, after Long Code Arena's project-level completion (arXiv 2406.11612, section 3.2), found by syntax:

    in_project  the line uses a name that another file of the project defines; what precedes it in its own file is
                cropped, so that the definition is far away and between it and the line lies other code
    in_file     the line uses a name that its own file defines at module level, at least 40 lines before it, and none
                of another file

The prompt is filled as that of the item list that comes with octavo (`packing.pack`), and, where no related file is
left, by the other files of the project, so a length is missed by at most 5 %. Likewise a line qualifies only
if the code that it is about holds one that is like it and not the same.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from pathlib import Path

from octavo.scripts.tasks.items import CodeItem, Tokenizer, prompt_text
from octavo.scripts.tasks.metrics import closest
from octavo.scripts.tasks.mining import Candidate, Module, all_candidates, parse_project
from octavo.scripts.tasks.packing import BuildSpec, pack
from octavo.scripts.tasks.sources import Source

CLASSES = ("in_project", "in_file")
PROJECTS = (
    *(("huggingface_hub", "huggingface_hub"), ("networkx", "networkx"), ("fonttools", "fontTools")),
    *(("torch", "torch/fx"), ("torch", "torch/distributed"), ("torch", "torch/_dynamo"), ("torch", "torch/ao")),
    *(("sympy", "sympy/core"), ("sympy", "sympy/physics"), ("sympy", "sympy/polys"), ("sympy", "sympy/stats")),
    *(("transformers", "transformers/generation"), ("transformers", "transformers/utils")),
    *(("matplotlib", "matplotlib"), ("rich", "rich"), ("hydra-core", "hydra"), ("fsspec", "fsspec")),
)
"""(distribution, folder): packages that come with octavo, a folder of the largest each."""
DISTANCE = 40  # lines between a line of class in_file and the definition that it uses
TRIES = 60  # candidates of a project that are packed for one class and length
SPEC = BuildSpec(targets=(), shortfall=0.05)
SPECS = {"in_project": SPEC, "in_file": replace(SPEC, max_in_file=1.0, in_file_lines=1 << 30)}


@dataclass(frozen=True)
class ProjectLine:
    """An item with its class and the length, in tokens, that it was made for."""

    item: CodeItem
    kind: str
    length: int


def make(
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    classes: Sequence[str],
    count: int,
    room: int,
    seed: int,
    advance: Callable[[str], None] = lambda project: None,
) -> list[ProjectLine]:
    """At most ``count`` items of each class and length, fewer where the projects have no more: in turns over classes,
    lengths and projects, so that any first few are of all kinds.

    Args:
        lengths: tokens of the prompt, and ``room`` for what is written after it, together.
        advance: called with the name of each project when its turn is over.

    Raises:
        ValueError: a length has no room for a prompt, or some class and length has no item at all.
    """
    if min(lengths) <= room:
        raise ValueError(f"a length of {min(lengths)} tokens has no room for a prompt besides {room} tokens of answer")
    cells: dict[tuple[int, str], list[CodeItem]] = {cell: [] for cell in product(lengths, classes)}
    length_of = _LineLengths(tokenizer)
    for number, (name, folder) in enumerate(PROJECTS):
        project = _read(name, folder)
        if project is not None:
            miner = _Miner(*project, length_of, seed)
            for (length, kind), found in cells.items():
                wanted = -(-2 * (count - len(found)) // (len(PROJECTS) - number))  # some have fewer than their share
                found += miner.take(kind, length - room, min(wanted, count - len(found)))
        advance(folder)
    empty = [cell for cell, found in cells.items() if not found]
    if empty:
        raise ValueError(
            f"no line of class {empty[0][1]} has a prompt of {empty[0][0]} tokens in the packages at hand; "
            "give smaller lengths"
        )
    turns = {cell: [ProjectLine(item, cell[1], cell[0]) for item in _spread(found)] for cell, found in cells.items()}
    return [own[turn] for turn in range(count) for own in turns.values() if turn < len(own)]


def _spread(items: Sequence[CodeItem]) -> list[CodeItem]:
    """The first items of all projects, then the second ones, and so on."""
    number: dict[str, int] = {}
    turns = []
    for item in items:
        project = item.item_id.partition("/")[0] + item.path.partition("/")[0]
        turns.append(number.setdefault(project, 0))
        number[project] += 1
    return [item for _, item in sorted(zip(turns, items, strict=True), key=lambda pair: pair[0])]


class _LineLengths:
    """Tokens of a text, from those of its lines, of which each is encoded once: packing asks for thousands of texts of
    the same lines. A tokenizer that joins line breaks finds a few tokens less."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return sum(map(self._line, text.split("\n")))

    def exact(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def _line(self, line: str) -> int:
        if line not in self._known:
            self._known[line] = self.exact(f"\n{line}")
        return self._known[line]


class _Miner:
    """One parsed project and the lines that it has left."""

    def __init__(self, source: Source, project: dict[str, Module], length: _LineLengths, seed: int) -> None:
        self._source, self._project, self._length = source, project, length
        self._stripped = {path: [line.strip() for line in m.text.split("\n")] for path, m in project.items()}
        found = [c for module in project.values() for c in all_candidates(module, project)]
        random.Random(f"{seed} {source.folder}").shuffle(found)
        own = [c for c in found if c.setting == "in_file" and c.line - c.definition_line >= DISTANCE]
        self._left = {"in_project": [c for c in found if c.setting != "in_file"], "in_file": own}
        self._judged: dict[Candidate, bool] = {}

    def take(self, kind: str, target: int, count: int) -> Iterator[CodeItem]:
        """At most ``count`` items, each of a file of its own; a line is never taken twice."""
        spec, files, tries = SPECS[kind], set(), 0
        for candidate in list(self._left[kind]):
            if candidate.path in files:
                continue
            if candidate not in self._judged:
                self._judged[candidate] = self._promising(candidate, spec)
            if not self._judged[candidate]:
                continue
            item = pack(candidate, self._project, self._source, target, self._length, spec, self._near(candidate))
            tries += 1
            if item is not None:
                item = replace(item, tokens=self._length.exact(prompt_text(item)))
                self._left[kind].remove(candidate)
                files.add(candidate.path)
                yield item
            if len(files) == count or tries == TRIES:
                break

    def _promising(self, candidate: Candidate, spec: BuildSpec) -> bool:
        """What can be said without packing: the line is short enough, and its defining file holds one like it."""
        if self._length(candidate.gold.strip()) > spec.max_gold_tokens:
            return False
        lines = self._stripped[candidate.defined_in]
        if candidate.defined_in == candidate.path:
            lines = lines[: candidate.line - 1]
        return spec.likeness[0] <= closest(lines, candidate.gold.strip()) <= spec.likeness[1]

    def _near(self, candidate: Candidate) -> list[str]:
        """All files of the project: those of the same folder first, by name."""
        folder = candidate.path.rpartition("/")[0]
        return sorted(self._project, key=lambda path: (path.rpartition("/")[0] != folder, path))


def _read(name: str, folder: str) -> tuple[Source, dict[str, Module]] | None:
    """A project without its tests; None where it is not installed."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    root = Path(str(found.locate_file("")))
    files = {}
    for path in sorted((root / folder).rglob("*.py")):
        place = path.relative_to(root).as_posix()
        if "test" not in place.lower():
            files[place] = path.read_text(encoding="utf-8", errors="replace")
    licence = found.metadata.get("License-Expression") or found.metadata.get("License") or "see the package"
    source = Source(name, found.version, "", "", licence.split("\n")[0], "", "", (folder,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of other people's escape sequences
        return source, parse_project(files)
