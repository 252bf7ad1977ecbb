"""One shape for the items of every code-completion benchmark, octavo's own and the published ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.scripts.progress import counting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema import TaskSettings
from octavo.scripts.schema_groups import PROJECT_LINES

if TYPE_CHECKING:
    from octavo.scripts.tasks.items import CodeItem


@dataclass(frozen=True)
class Item:
    """What a benchmark asks.

    Attributes:
        gold: what follows the prompt in the file, as far as it is compared.
        prompt_ids: token ids of the prompt, given a tokenizer and the most tokens it may have; raises ValueError if
            the benchmark's rule cannot shorten it that far.
        score: qualities, in points, of what was written after the prompt.
        decided: whether more text would change no score.
        facts: what every sample of the item says besides.
    """

    id: str
    gold: str
    prompt_ids: Callable[[Any, int], list[int]]
    score: Callable[[str], dict[str, float]]
    decided: Callable[[str], bool]
    facts: dict[str, Any] = field(default_factory=dict)


def load(task: TaskSettings, limit: int | None, tokenizer: Any = None, seed: int = 0) -> list[Item]:
    """The first ``limit`` items of a task; those of "project_lines" are made for a ``tokenizer``, from a ``seed``.

    Raises:
        ConfigError: a file that is missing, damaged or not of that benchmark; the message names file and line.
    """
    try:
        if task.name == PROJECT_LINES:
            return _project_lines(task, tokenizer, seed)[:limit]
        return _code_lines(task, limit) if task.name == "code_lines" else _published(task, limit)
    except ValueError as error:
        raise ConfigError(f"task {task.name}: {error}") from error


def _code_lines(task: TaskSettings, limit: int | None) -> list[Item]:
    from octavo.scripts.tasks import items

    return [_code_line(item) for item in items.load_items(task.path, limit)]


def _project_lines(task: TaskSettings, tokenizer: Any, seed: int) -> list[Item]:
    from octavo.scripts.tasks import project_lines

    if tokenizer is None:
        raise ValueError("its items are made for a tokenizer, which this experiment does not give; take code_lines")
    room = task.max_new_tokens + project_lines.SPEC.max_gold_tokens
    with counting("reading projects", len(project_lines.PROJECTS), 0) as advance:
        found = project_lines.make(tokenizer, task.lengths, task.classes, task.items or 1, room, seed, advance)
    return [
        dataclasses.replace(
            _code_line(made.item),
            id=f"{made.kind}/{made.length}/{made.item.item_id}",
            facts={
                "class": made.kind,
                "length": made.length,
                "source": f"{made.item.source} {made.item.version}",
                "prompt_sha256": made.item.prompt_sha256,
            },
        )
        for made in found
    ]


def _code_line(source: CodeItem) -> Item:
    from octavo.scripts.tasks import items

    return Item(
        id=source.item_id,
        gold=source.target,
        prompt_ids=lambda tokenizer, most: items.prompt_ids(source, tokenizer, most),
        score=source.score,
        decided=_line_is_decided,
    )


def _published(task: TaskSettings, limit: int | None) -> list[Item]:
    from octavo.scripts.tasks import loaders

    def item(source: loaders.CompletionItem) -> Item:
        return Item(
            id=source.item_id,
            gold=source.golds[0],
            prompt_ids=lambda tokenizer, most: loaders.prompt_ids(source, tokenizer, most),
            score=source.score,
            # Their rules read past the first line in their own ways, so nothing is cut short.
            decided=lambda output: False,
        )

    return [item(source) for source in loaders.load(task.name, task.path or "", limit)]


def _line_is_decided(output: str) -> bool:
    """Whether the first code line of ``output`` is whole: another line after it would not be taken instead."""
    from octavo.scripts.tasks.metrics import first_code_line

    whole = output.rpartition("\n")[0]
    return bool(whole.strip()) and first_code_line(whole) == first_code_line(f"{whole}\nanother = line")
