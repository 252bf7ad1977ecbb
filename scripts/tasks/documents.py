"""Long documents that are on any machine with Python: sources of its standard library, its reference
manual, and what packages say of themselves.

They are read where they are installed, and none is copied into the project, so they differ between versions of Python;
``Document.sha256`` says whether two machines read the same.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path
from random import Random
from typing import Any

LEAST_CHARACTERS = 20_000  # of a document; shorter ones would make a list of headings


@dataclass(frozen=True)
class Document:
    """A text with where it comes from; ``source`` names the package and its version."""

    name: str
    source: str
    licence: str
    text: str

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def code() -> list[Document]:
    """The large modules of the standard library, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = ((path.name, path.read_text(encoding="utf-8", errors="replace")) for path in sorted(folder.glob("*.py")))
    return [_of_python(name, text) for name, text in files if len(text) >= LEAST_CHARACTERS]


def chapters() -> list[Document]:
    """The long chapters of Python's reference manual that ``help()`` shows, by name."""
    from pydoc_data.topics import topics

    return [_of_python(name, text) for name, text in sorted(topics.items()) if len(text) >= LEAST_CHARACTERS]


def text() -> list[Document]:
    """Prose: ``chapters``, then the long descriptions of the installed packages, by name."""
    return chapters() + [document for document in _descriptions() if len(document.text) >= LEAST_CHARACTERS]


def of_python(seed: int) -> list[Document]:
    """What every machine with this version of Python has, sources and chapters, in an order drawn from ``seed``."""
    found = code() + chapters()
    Random(seed).shuffle(found)
    return found


def shuffled(kind: str, seed: int) -> list[Document]:
    """All documents of a kind, "code" or "text", in an order drawn from ``seed``."""
    found = {"code": code, "text": text}[kind]()
    Random(seed).shuffle(found)
    return found


def long_enough(kind: str, seed: int, tokenizer: Any, tokens: int, count: int) -> list[tuple[Document, list[int]]]:
    """The first ``count`` of ``shuffled`` that have at least ``tokens`` tokens, with their token ids, without special
    ones; fewer documents, if there are no more.

    Raises:
        ValueError: there is none.
    """
    found: list[tuple[Document, list[int]]] = []
    longest = 0
    for document in shuffled(kind, seed):
        ids = tokenizer.encode(document.text, add_special_tokens=False, verbose=False)
        longest = max(longest, len(ids))
        if len(ids) >= tokens:
            found.append((document, ids))
        if len(found) == count:
            break
    if not found:
        raise ValueError(f"no document of the kind {kind!r} has {tokens} tokens; the longest has {longest}")
    return found


def _of_python(name: str, text: str) -> Document:
    return Document(name, f"Python {platform.python_version()}", "PSF-2.0", text)


def _descriptions() -> Iterator[Document]:
    found = {str(package.metadata["Name"]): package for package in distributions()}
    for name, package in sorted(found.items()):
        about = package.metadata
        licence = about.get("License-Expression") or about.get("License") or "see the package"
        described = about.get_payload()  # type: ignore[attr-defined]
        if isinstance(described, str):
            yield Document(name, f"{name} {package.version}", str(licence).split("\n")[0], described)
