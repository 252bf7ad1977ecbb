"""Items of the code-completion task: their prompts, their leak check and the file that holds them.

The prompt follows RepoBench v1.1 (arXiv 2306.03091): a comment with the repository's name, path and code of each
cross-file snippet, then path and code of the file itself up to the line to complete. Two choices differ: the most
relevant snippet comes last, so that a prompt that is too long loses its least relevant lines, from the front; and the
prompt holds the line's indentation, as in an editor (see `prompt_text`).

The code is public, so a model may have seen it in training: the task compares methods on one model, not models.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

from octavo.scripts.tasks.metrics import score_line
from octavo.scripts.tasks.sources import DATA

SCHEMA = "octavo-code-items/1"


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class CodeItem:
    """One line to complete; `tokens` and `prompt_sha256` are of the whole prompt."""

    item_id: str
    source: str
    version: str
    licence: str
    path: str
    setting: str  # cross_file_first: first use of the name in this file; cross_file_random: a later one
    context: tuple[tuple[str, str], ...]  # (path, text), least relevant first
    prefix: str  # in-file code before the gold line
    gold: str  # the line, with its indentation
    uses: str
    defined_in: str
    tokens: int
    prompt_sha256: str

    @property
    def target(self) -> str:
        """What the model is to write after the prompt: the gold line from the last character of its indentation on."""
        return self.gold[max(0, _indentation(self.gold) - 1) :]

    def score(self, output: str) -> dict[str, float]:
        """RepoBench v1.1's `exact_match` and `edit_similarity` of a model's output, in points (0-100)."""
        return score_line(output, self.target)


def prompt_text(item: CodeItem) -> str:
    """The prompt, in full.

    It ends in the line break and all but one character of the gold line's indentation. Byte-level BPE merges a line
    break with the spaces after it and leaves the last space to the next word; a prompt cut anywhere else would ask
    for tokens that training never shows there.
    """
    snippets = "".join(f"# Path: {path}\n{text}\n\n" for path, text in item.context)
    indentation = item.gold[: max(0, _indentation(item.gold) - 1)]
    return f"# Repo Name: {item.source}\n{snippets}# Path: {item.path}\n{item.prefix}\n{indentation}"


def prompt_ids(item: CodeItem, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    """Token ids of the prompt, at most `max_tokens`: cross-file lines go first, from the front, the file itself never.

    Raises ValueError if the in-file code alone is longer.
    """

    def ids(dropped: int) -> list[int]:
        return tokenizer.encode(prompt_text(replace(item, context=_drop_lines(item.context, dropped))))

    whole = ids(0)
    if len(whole) <= max_tokens:
        return whole
    low, high = 0, sum(len(text.split("\n")) for _, text in item.context)  # `low` lines dropped are too few
    shortest = ids(high)
    if len(shortest) > max_tokens:
        raise ValueError(
            f"{item.item_id}: {len(shortest)} tokens without any cross-file code, above the limit of {max_tokens}; "
            "take a model with a longer window or leave this item out"
        )
    while high - low > 1:
        middle = (low + high) // 2
        if len(fitting := ids(middle)) <= max_tokens:
            high, shortest = middle, fitting
        else:
            low = middle
    return shortest


def leaks(gold: str, prompt: str) -> bool:
    """Whether the gold line can be read off the prompt, in any layout: the metric ignores runs of white space too."""
    return " ".join(gold.split()) in " ".join(prompt.split())


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def dump_items(items: Sequence[CodeItem], **facts: Any) -> str:
    """The item file as text: a header with `facts`, the count and the hash of all that follows, then one item a line.

    Equal items and facts give equal text.
    """
    body = "".join(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items)
    header = {"schema": SCHEMA, **facts, "count": len(items), "items_sha256": sha256(body)}
    return json.dumps(header, ensure_ascii=False) + "\n" + body


def load_items(path: Path | str | None = None, limit: int | None = None) -> list[CodeItem]:
    """The first `limit` items (all by default) of an item file, by default the committed one.

    The whole file is verified whatever the limit. Raises ValueError with file, line and fault: not gzip, cut short,
    no JSON, wrong schema, missing, unknown or ill-typed field, wrong count or hash, a gold line that leaks.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: at least 1 item is needed")
    return read_item_file(path)[1][:limit]


def read_item_file(path: Path | str | None = None) -> tuple[dict[str, Any], list[CodeItem]]:
    """(header, items) of an item file; see `load_items`."""
    path = Path(path) if path is not None else DATA / "items.jsonl.gz"
    try:
        text = gzip.decompress(path.read_bytes()).decode()
    except OSError as error:  # BadGzipFile among them
        raise ValueError(f"{path}: cannot be read: {error}") from error
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: corrupt or cut short: {error}") from error

    first, _, body = text.partition("\n")
    header = _parse(first, f"{path}: line 1")
    if header.get("schema") != SCHEMA:
        raise ValueError(f"{path}: line 1: schema {header.get('schema')!r}, this version reads {SCHEMA!r}")
    lines = body.split("\n")[:-1]  # a complete file ends in a line break
    items = [_item(line, f"{path}: line {number}") for number, line in enumerate(lines, start=2)]
    if header.get("count") != len(items):
        raise ValueError(f"{path}: {len(items)} complete items, the header announces {header.get('count')}")
    if header.get("items_sha256") != sha256(body):
        raise ValueError(f"{path}: items have sha256 {sha256(body)}, the header says {header.get('items_sha256')}")
    return header, items


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _drop_lines(context: tuple[tuple[str, str], ...], count: int) -> tuple[tuple[str, str], ...]:
    """Drops the first `count` lines of code. A snippet cut in part keeps its path, one cut wholly goes with it."""
    for position, (path, text) in enumerate(context):
        lines = text.split("\n")
        if count < len(lines):
            return ((path, "\n".join(lines[count:])), *context[position + 1 :])
        count -= len(lines)
    return ()


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a JSON object was expected, not {type(value).__name__}")
    return value


def _item(line: str, where: str) -> CodeItem:
    raw = _parse(line, where)
    _check_fields(raw, where)
    raw["context"] = tuple((path, text) for path, text in raw["context"])
    item = CodeItem(**raw)
    prompt = prompt_text(item)
    if sha256(prompt) != item.prompt_sha256:
        raise ValueError(f"{where}: the prompt has sha256 {sha256(prompt)}, recorded is {item.prompt_sha256}")
    if leaks(item.gold, prompt):
        raise ValueError(f"{where}: the gold line {item.gold.strip()!r} appears in its own prompt")
    return item


def _check_fields(raw: Mapping[str, Any], where: str) -> None:
    names = [f.name for f in fields(CodeItem)]
    if missing := [n for n in names if n not in raw]:
        raise ValueError(f"{where}: missing field {missing[0]!r}")
    if unknown := sorted(raw.keys() - set(names)):
        raise ValueError(f"{where}: unknown field {unknown[0]!r}")
    for name in names:
        value = raw[name]
        if name == "context":
            good = isinstance(value, list) and all(
                isinstance(s, list) and len(s) == 2 and all(isinstance(part, str) for part in s) for s in value
            )
        else:
            good = isinstance(value, int if name == "tokens" else str)
        if not good:
            raise ValueError(f"{where}: field {name!r} has the wrong type: {type(value).__name__}")


def code_tokens(tokenizer: Any, tokens: int, seed: int) -> list[int]:
    """Tokens of the committed code items, in an order drawn by ``seed``, again and again if they are too few."""
    items = load_items()
    Random(seed).shuffle(items)
    text = "".join(map(prompt_text, items))
    ids: list[int] = tokenizer.encode(text, verbose=False)
    while len(ids) < tokens:
        ids += tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids[:tokens]
