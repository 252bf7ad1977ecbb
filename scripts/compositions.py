"""What the methods of a run are made of. Its settings name files, which may have changed since."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.scripts.paths import resume_argument
from octavo.scripts.refusal import ConfigError

if TYPE_CHECKING:
    from octavo.core.interfaces import SparseMethod

FILE = "methods.json"


def of(methods: Mapping[str, SparseMethod | None]) -> dict[str, str]:
    """Each method by name: its parts with their parameters, and digests of the code of parts that are none of
    octavo's."""
    return {
        name: "; ".join([method.provenance, *sorted(set(_foreign(method)))])
        for name, method in methods.items()
        if method is not None
    }


def keep(methods: Mapping[str, SparseMethod | None], folder: Path, *, resumed: bool) -> None:
    """Write a new run's methods into its folder; see that those of one that goes on are still the same.

    Raises:
        ConfigError: one is not; the message has both compositions.
    """
    now = of(methods)
    if not resumed:
        (folder / FILE).write_text(json.dumps(now, indent=1) + "\n", "utf-8")
        return
    before = read(folder)
    for name in now if before else ():
        if now[name] != before.get(name):
            raise ConfigError(
                f"method {name} is not what {folder} was begun with: {before.get(name)} there, {now[name]} now; "
                f"begin a new run, or go on with the method as it was: octavo {resume_argument(folder)}"
            )


def read(folder: Path) -> dict[str, str]:
    """The methods of the run in a folder; none for a run of before they were kept."""
    file = folder / FILE
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def _foreign(part: Any) -> Iterator[str]:
    """``module digest`` of each module of whose classes a method, or a part of it, is made, but for octavo's."""
    if not dataclasses.is_dataclass(part):
        return
    module = inspect.getmodule(type(part))
    source = getattr(module, "__file__", None)
    if module is not None and source and not module.__name__.startswith("octavo."):
        yield f"{module.__name__} {hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12]}"
    for field in dataclasses.fields(part):
        yield from _foreign(getattr(part, field.name))
