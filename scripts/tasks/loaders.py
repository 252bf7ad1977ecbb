"""Published code-completion benchmarks, read from files on disk in the schema they are published in.

| name             | published as                                | prompt and truncation after                  |
|------------------|---------------------------------------------|----------------------------------------------|
| `repobench-v1.1` | `tianyang/repobench_{python,java}_v1.1`     | Leolty/repobench `construct_prompt`          |
| `lcc`            | LongBench `lcc.jsonl`, `lcc_e.jsonl`        | THUDM/LongBench `dataset2prompt`, `pred.py`  |
| `repobench-p`    | LongBench `repobench-p.jsonl`, `..._e`      | the same                                     |
| `crosscodeeval`  | `line_completion_*.jsonl`                   | amazon-science/cceval `vllm_inference.py`    |

Files are `.jsonl`, `.json` (a list), either of them with `.gz`, or `.parquet` where pyarrow is installed.
"""

import gzip
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from octavo.scripts.tasks.items import Tokenizer
from octavo.scripts.tasks.metrics import score_line, score_similarity, score_statement

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
    for number, (where, raw) in enumerate(islice(_records(path), limit)):
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
    repository, file = _text(raw, "repo_name"), _text(raw, "file_path")
    language = "java" if file.endswith(".java") else "python"
    mark = "//" if language == "java" else "#"
    snippets = "".join(
        f"{mark} Path: {_text(s, 'path')}\n{_text(s, 'snippet')}\n\n" for s in _list(raw, "context", dict, "objects")
    )
    setting = next((s for s in ("cross_file_first", "cross_file_random", "in_file") if s in path.name), None)
    return CompletionItem(
        item_id=f"{setting or path.stem}:{number}",  # the records have no identity of their own
        head=f"{mark} Repo Name: {repository}\n{snippets}",
        tail=f"{mark} Path: {file}\n{_text(raw, 'import_statement')}\n{_text(raw, 'cropped_code')}\n",
        golds=(_text(raw, "next_line"),),
        language=language,
        family="repobench",
        metadata={
            "level": _text(raw, "level"),
            "setting": setting,
            "repository": repository,
            "file": file,
            "created_at": str(raw["created_at"]),
        },
    )


def _longbench(raw: Mapping[str, Any], path: Path, number: int) -> CompletionItem:
    # `input` is empty in lcc and the in-file code in repobench-p: one template serves both.
    item_id, words = _text(raw, "_id"), _typed(raw, "length", int, "a whole number")
    golds = _list(raw, "answers", str, "texts")
    if not golds:
        raise ValueError("answers must not be empty")
    return CompletionItem(
        item_id=item_id,
        head=f"Please complete the code given below. \n{_text(raw, 'context')}",
        tail=f"{_text(raw, 'input')}Next line of code:\n",
        golds=tuple(golds),
        language=_text(raw, "language"),
        family="longbench",
        metadata={"level": _longbench_level(words), "words": words},
    )


def _longbench_level(words: int) -> str:
    return "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"


def _crosscodeeval(raw: Mapping[str, Any], path: Path, number: int) -> CompletionItem:
    metadata = _typed(raw, "metadata", dict, "an object")
    file = _text(metadata, "file")
    suffix = Path(file).suffix
    if suffix not in _LANGUAGES:
        raise ValueError(f"file {file!r} is in none of {', '.join(_LANGUAGES)}")
    # The in-file variant of the data set (line_completion.jsonl) has no such field.
    found = "crossfile_context" in raw
    cross = _text(_typed(raw, "crossfile_context", dict, "an object"), "text") if found else ""
    return CompletionItem(
        item_id=_text(metadata, "task_id"),
        head=f"{cross}\n" if cross else "",
        tail=_text(raw, "prompt"),
        golds=(_text(raw, "groundtruth"),),
        language=_LANGUAGES[suffix],
        family="crosscodeeval",
        metadata={"repository": _text(metadata, "repository"), "file": file},
    )


def _text(raw: Mapping[str, Any], key: str) -> str:
    text: str = _typed(raw, key, str, "text")
    return text


def _list(raw: Mapping[str, Any], key: str, kind: type, name: str) -> list[Any]:
    """A list whose entries all have the type ``kind``, in words ``name``. Raises like `_typed`."""
    entries: list[Any] = _typed(raw, key, list, f"a list of {name}")
    strange = [entry for entry in entries if type(entry) is not kind]
    if strange:
        raise ValueError(f"{key} must be a list of {name}, got {_shown(strange[0])} in it")
    return entries


def _typed(raw: Mapping[str, Any], key: str, kind: type, name: str) -> Any:
    """A field of the type ``kind``, in words ``name``; KeyError without it, ValueError if it is of another type."""
    value = raw[key]
    if type(value) is not kind:  # not isinstance, for which true is a whole number
        raise ValueError(f"{key} must be {name}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """A value as JSON, cut short."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


LOADERS: dict[str, Callable[[Mapping[str, Any], Path, int], CompletionItem]] = {
    "repobench-v1.1": _repobench,
    "lcc": _longbench,
    "repobench-p": _longbench,
    "crosscodeeval": _crosscodeeval,
}


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, record) for each record of the file; `where` names file and line for error messages."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind == ".parquet":
        if importlib.util.find_spec("pyarrow") is None:
            raise ValueError(f"{path}: reading parquet needs pyarrow (pip install pyarrow), or convert it to .jsonl")
        import pyarrow.parquet  # heavy and optional

        rows = pyarrow.parquet.read_table(path).to_pylist()
        yield from ((f"{path}: record {number}", row) for number, row in enumerate(rows))
        return
    if kind not in (".json", ".jsonl"):
        raise ValueError(f"{path}: neither .jsonl, .json nor .parquet")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            if kind == ".json":
                records = json.load(file)
                if not isinstance(records, list):
                    raise ValueError(f"{path}: a JSON list was expected, not {type(records).__name__}")
                yield from ((where := f"{path}: record {n}", _is_object(row, where)) for n, row in enumerate(records))
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}: line {number}", _object(line, f"{path}: line {number}")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    return _is_object(value, where)


def _is_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a JSON object was expected, not {type(value).__name__}")
    return value
