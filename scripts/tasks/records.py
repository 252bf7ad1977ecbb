"""Records of public data sets, read from local files: where each stands, and what is in it or wrong with it."""

import gzip
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
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


def text(raw: Mapping[str, Any], key: str) -> str:
    text: str = typed(raw, key, str, "text")
    return text


def list_of(raw: Mapping[str, Any], key: str, kind: type, name: str) -> list[Any]:
    """A list whose entries all have the type ``kind``, in words ``name``. Raises like `typed`."""
    entries: list[Any] = typed(raw, key, list, f"a list of {name}")
    strange = [entry for entry in entries if type(entry) is not kind]
    if strange:
        raise ValueError(f"{key} must be a list of {name}, got {shown(strange[0])} in it")
    return entries


def typed(raw: Mapping[str, Any], key: str, kind: type, name: str) -> Any:
    """A field of the type ``kind``, in words ``name``; KeyError without it, ValueError if it is of another type."""
    value = raw[key]
    if type(value) is not kind:  # not isinstance, for which true is a whole number
        raise ValueError(f"{key} must be {name}, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A value as JSON, cut short."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


def json_object(path: Path) -> dict[str, Any]:
    """The one object that a JSON file holds. Raises ValueError like `records`."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    try:
        return _object(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
