"""Published code-completion benchmarks, read from files on disk in the schema they are published in.

| name             | published as                                | prompt and truncation after                  |
|------------------|---------------------------------------------|----------------------------------------------|
| `repobench-v1.1` | `tianyang/repobench_{python,java}_v1.1`     | Leolty/repobench `construct_prompt`          |
| `lcc`            | LongBench `lcc.jsonl`, `lcc_e.jsonl`        | THUDM/LongBench `dataset2prompt`, `pred.py`  |
| `repobench-p`    | LongBench `repobench-p.jsonl`, `..._e`      | the same                                     |
| `crosscodeeval`  | `line_completion_*.jsonl`                   | amazon-science/cceval `vllm_inference.py`    |

Files are `.jsonl`, `.json` (a list), either of them with `.gz`, or `.parquet` where pyarrow is installed.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from octavo.scripts.tasks.items import Tokenizer
from octavo.scripts.tasks.metrics import score_line, score_similarity, score_statement
from octavo.scripts.tasks.records import list_of, records, text, typed

_LANGUAGES = {".py": "python", ".java": "java", ".cs": "csharp", ".ts": "typescript", ".tsx": "typescript"}
_CROSS_BUDGET = 512  # tokens of cross-file context in CrossCodeEval's published setting


@dataclass(frozen=True)
class CompletionItem:
    """One line or statement to complete, whatever benchmark it comes from.

    The prompt is `head + tail`. When it is too long, `prompt_ids` shortens it as the benchmark does: by whole lines
    from the end of the head, in the middle, or the head to 512 tokens and then the tail from the left.
    """

    item_id: str
    head: str  # cross-file context
    tail: str  # the file to complete
    golds: tuple[str, ...]
    language: str
    family: Literal["repobench", "longbench", "crosscodeeval"]
    metadata: Mapping[str, Any] = field(default_factory=dict)  # "level" among them where the benchmark has levels

    @property
    def prompt(self) -> str:
        prompt = self.head + self.tail
        # RepoBench closes up runs of blank lines, which cropping leaves behind.
        return re.sub(r"\n{4,}", "\n\n", prompt) if self.family == "repobench" else prompt

    def score(self, output: str) -> dict[str, float]:
        """The benchmark's own scores of a model's output, in points (0-100)."""
        if self.family == "repobench":
            return score_line(output, self.golds[0], self.language)
        if self.family == "longbench":
            return score_similarity(output, self.golds)
        return score_statement(self.prompt, output, self.golds[0], self.language)


def load(name: str, path: Path | str, limit: int | None = None) -> list[CompletionItem]:
    """The first `limit` items (all by default) of the benchmark `name` in the file `path`.

    Raises ValueError for an unknown name, an unreadable file, and a record that is no JSON, lacks a field or has one
    of the wrong type; the message names file, line (or record) and field.
    """
    if name not in LOADERS:
        raise ValueError(f"unknown data set {name!r}; known: {', '.join(LOADERS)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: at least 1 item is needed")
    path = Path(path)
    make = LOADERS[name]
    items = []
    for number, (where, raw) in enumerate(islice(records(path), limit)):
        try:
            items.append(make(raw, path, number))
        except KeyError as error:
            raise ValueError(f"{where}: missing field {error.args[0]!r} of {name}") from error
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not items:
        raise ValueError(f"{path}: no records")
    return items


def prompt_ids(item: CompletionItem, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    """Token ids of the prompt, at most `max_tokens`, shortened after the benchmark's own rule.

    Raises ValueError if RepoBench's in-file code, which that rule never cuts, is too long alone.
    """
    if item.family == "crosscodeeval":
        head = tokenizer.encode(item.head)[: min(_CROSS_BUDGET, max_tokens // 2)] if item.head else []
        tail = tokenizer.encode(item.tail)
        room = max_tokens - len(head)
        return head + tail[max(0, len(tail) - room) :]

    ids = tokenizer.encode(item.prompt)
    if len(ids) <= max_tokens:
        return ids
    if item.family == "longbench":
        half = max_tokens // 2
        return ids[: max_tokens - half] + ids[len(ids) - half :]

    lines = item.head.split("\n")
    low, high = 0, len(lines)  # keeping `low` lines is taken to fit, keeping `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(_cut(item, tokenizer, lines[:middle])) <= max_tokens else (low, middle)
    ids = _cut(item, tokenizer, lines[:low])
    if len(ids) > max_tokens:
        raise ValueError(f"{item.item_id}: {len(ids)} tokens of in-file code alone, above the limit of {max_tokens}")
    return ids


def _cut(item: CompletionItem, tokenizer: Tokenizer, lines: list[str]) -> list[int]:
    head = "\n".join(lines) + "\n\n" if lines else ""
    return tokenizer.encode(re.sub(r"\n{4,}", "\n\n", head + item.tail))


def _repobench(raw: Mapping[str, Any], path: Path, number: int) -> CompletionItem:
    repository, file = text(raw, "repo_name"), text(raw, "file_path")
    language = "java" if file.endswith(".java") else "python"
    mark = "//" if language == "java" else "#"
    snippets = "".join(
        f"{mark} Path: {text(s, 'path')}\n{text(s, 'snippet')}\n\n" for s in list_of(raw, "context", dict, "objects")
    )
    setting = next((s for s in ("cross_file_first", "cross_file_random", "in_file") if s in path.name), None)
    return CompletionItem(
        item_id=f"{setting or path.stem}:{number}",  # the records have no identity of their own
        head=f"{mark} Repo Name: {repository}\n{snippets}",
        tail=f"{mark} Path: {file}\n{text(raw, 'import_statement')}\n{text(raw, 'cropped_code')}\n",
        golds=(text(raw, "next_line"),),
        language=language,
        family="repobench",
        metadata={
            "level": text(raw, "level"),
            "setting": setting,
            "repository": repository,
            "file": file,
            "created_at": str(raw["created_at"]),
        },
    )


def _longbench(raw: Mapping[str, Any], path: Path, number: int) -> CompletionItem:
    # `input` is empty in lcc and the in-file code in repobench-p: one template serves both.
    item_id, words = text(raw, "_id"), typed(raw, "length", int, "a whole number")
    golds = list_of(raw, "answers", str, "texts")
    if not golds:
        raise ValueError("answers must not be empty")
    return CompletionItem(
        item_id=item_id,
        head=f"Please complete the code given below. \n{text(raw, 'context')}",
        tail=f"{text(raw, 'input')}Next line of code:\n",
        golds=tuple(golds),
        language=text(raw, "language"),
        family="longbench",
        metadata={"level": _longbench_level(words), "words": words},
    )


def _longbench_level(words: int) -> str:
    return "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"


def _crosscodeeval(raw: Mapping[str, Any], path: Path, number: int) -> CompletionItem:
    metadata = typed(raw, "metadata", dict, "an object")
    file = text(metadata, "file")
    suffix = Path(file).suffix
    if suffix not in _LANGUAGES:
        raise ValueError(f"file {file!r} is in none of {', '.join(_LANGUAGES)}")
    # The in-file variant of the data set (line_completion.jsonl) has no such field.
    found = "crossfile_context" in raw
    cross = text(typed(raw, "crossfile_context", dict, "an object"), "text") if found else ""
    return CompletionItem(
        item_id=text(metadata, "task_id"),
        head=f"{cross}\n" if cross else "",
        tail=text(raw, "prompt"),
        golds=(text(raw, "groundtruth"),),
        language=_LANGUAGES[suffix],
        family="crosscodeeval",
        metadata={"repository": text(metadata, "repository"), "file": file},
    )


LOADERS: dict[str, Callable[[Mapping[str, Any], Path, int], CompletionItem]] = {
    "repobench-v1.1": _repobench,
    "lcc": _longbench,
    "repobench-p": _longbench,
    "crosscodeeval": _crosscodeeval,
}
