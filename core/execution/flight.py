"""What comes out of a step: rows of logits, or tokens that nobody has read yet."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.scheduler import Chunk
from octavo.core.uploads import Download


@dataclass(frozen=True)
class Row:
    """One row of logits: of which chunk, and at which position of its sequence."""

    chunk: Chunk
    position: int


@dataclass(frozen=True)
class Flight:
    """A step that the device has been given and whose tokens nobody has read: the news of chunk i (as
    ``DecodeProgram`` gives them) are in column ``rows[i]``."""

    chunks: list[Chunk]
    rows: list[int]
    news: Download
