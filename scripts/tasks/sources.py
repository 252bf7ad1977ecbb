"""The packages whose code makes the completion items: what they are, where they lie, which files may be quoted."""

import json
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).with_name("data")


@dataclass(frozen=True)
class Source:
    """One wheel, pinned by hash.

    `packages` are the top-level folders whose files may be quoted, less those in `exclude`: files that carry another
    author's licence, and tables of data without code to complete.
    """

    name: str
    version: str
    wheel: str
    sha256: str
    licence: str  # SPDX
    copyright: str
    licence_file: str  # inside the wheel
    packages: tuple[str, ...]
    exclude: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.version}"


def read_sources(path: Path | None = None) -> tuple[Source, ...]:
    """The committed pins, in the order of the file."""
    entries = json.loads((path or DATA / "sources.json").read_text(encoding="utf-8"))
    return tuple(Source(**{key: tuple(v) if isinstance(v, list) else v for key, v in e.items()}) for e in entries)


def python_files(source: Source, sources_dir: Path) -> dict[str, str]:
    """Text of every quotable module of `source`, by POSIX path inside the wheel, sorted.

    Raises ValueError if the source was not unpacked under `sources_dir`.
    """
    root = sources_dir / source.folder
    if not root.is_dir():
        raise ValueError(f"{root} does not exist: run `python -m octavo.scripts.setup_sources` first")
    paths = (p.relative_to(root).as_posix() for package in source.packages for p in (root / package).rglob("*.py"))
    return {path: (root / path).read_text(encoding="utf-8") for path in sorted(set(paths) - set(source.exclude))}
