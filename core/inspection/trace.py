"""The page traffic of a run, free of page size, pool and policies, so that it can be replayed under any of them."""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.memory.page_layout import Segment

VERSION = 1

ALL_EXACT = np.iinfo(np.int32).max
"""``exact_tokens`` of a sequence that no method shapes."""


MAX_BYTES = 1 << 30
"""Of a trace that is unpacked: some 200 million tokens."""

_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Event(IntEnum):
    OPEN = 1
    FORK = 2
    GROW = 3
    PARK = 4
    CLOSE = 5
    HIT = 6
    PREEMPT = 7
    EVICT = 8


@dataclass(frozen=True, eq=False)
class Trace:
    """Events in their order, one row each, and the token ids of every sequence once.

    ::

        event    sequence   a                                 b
        OPEN     begins     its namespace                     tokens that a prefix hit may cover, at most
        FORK     begins     the sequence that it comes from   tokens of that one that it shares
        GROW     computes   tokens computed once this step    of them in this step
                            is done, found ones included
        PARK     computes nothing until its next event; its pages may be taken
        CLOSE    ends; nothing more comes of it
        HIT      seen       tokens found                      tokens looked up
        PREEMPT  seen       its pages were taken
        EVICT    seen: -1   pages evicted in this step

    The last three are what the recorded run saw on its own pool: a replay compares itself with them, and does not
    follow them. Within a step all growth comes before what ends or forks, and what a step computed can be found from
    there on.

    Sequences are numbered from 0 in the order in which they begin. A fork stores only the tokens after those that it
    shares::

        token_starts    [ 0       5    7        12 ]   sequence 1 shares 3 tokens of sequence 0 and has 2 of its own
        tokens          [ . . . . . | . . | . . . . . ]
        segment_starts  [ 0       2    2         3 ]   kinds and lengths of what a sequence opens with; none for forks

    Attributes:
        step: int32 [events], never falling; time_s: float32 [events], seconds since the start, never falling.
        event: int8 [events], of ``Event``; sequence, a, b: int32 [events].
        token_starts: int64 [sequences + 1]; tokens: int32.
        segment_starts: int64 [sequences + 1]; segment_kind: int8, an index of ``kinds``; segment_tokens: int32.
        kinds: names of segment kinds, text.
        priority: int32 [sequences], of the request.
        exact_tokens, provenance: int32 [sequences]; the KV of tokens after the first ``exact_tokens`` is shaped by the
            method that ``provenance`` numbers, and only found by requests of the same.

    Raises:
        ValueError: a column of another type or length, or events that contradict one another.
    """

    step: NDArray[np.int32]
    time_s: NDArray[np.float32]
    event: NDArray[np.int8]
    sequence: NDArray[np.int32]
    a: NDArray[np.int32]
    b: NDArray[np.int32]
    token_starts: NDArray[np.int64]
    tokens: NDArray[np.int32]
    segment_starts: NDArray[np.int64]
    segment_kind: NDArray[np.int8]
    segment_tokens: NDArray[np.int32]
    kinds: NDArray[np.str_]
    priority: NDArray[np.int32]
    exact_tokens: NDArray[np.int32]
    provenance: NDArray[np.int32]

    def __post_init__(self) -> None:
        _check_columns(self)
        _check_sequences(self)
        _check_events(self)

    def __len__(self) -> int:
        """Number of events."""
        return len(self.event)

    @property
    def sequences(self) -> int:
        return len(self.priority)

    def begins(self) -> NDArray[np.int64]:
        """The event with which each sequence begins, int64 [sequences]."""
        return np.flatnonzero((self.event == Event.OPEN) | (self.event == Event.FORK))

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence, shared ones included, int64 [sequences]."""
        begins = self.begins()
        return np.diff(self.token_starts) + np.where(self.event[begins] == Event.FORK, self.b[begins], 0)

    def all_tokens(self) -> list[NDArray[np.int32]]:
        """Token ids of every sequence, shared ones included."""
        found: list[NDArray[np.int32]] = []
        for number, begin in enumerate(self.begins().tolist()):
            own = self.tokens[self.token_starts[number] : self.token_starts[number + 1]]
            if self.event[begin] == Event.FORK:
                own = np.concatenate([found[int(self.a[begin])][: int(self.b[begin])], own])
            found.append(own)
        return found

    def segments(self, sequence: int) -> list[Segment]:
        """What a sequence opens with; empty for a fork, which goes on in its parent's layout."""
        rows = slice(int(self.segment_starts[sequence]), int(self.segment_starts[sequence + 1]))
        kinds, tokens = self.segment_kind[rows].tolist(), self.segment_tokens[rows].tolist()
        return [Segment(str(self.kinds[kind]), count) for kind, count in zip(kinds, tokens, strict=True)]

    def total(self, event: Event) -> int:
        """Sum of ``a`` over all events of a kind: the tokens found, the pages evicted."""
        return int(self.a[self.event == event].sum(dtype=np.int64))

    def save(self, path: str | Path) -> None:
        """Write a compressed ``.npz`` of exactly this name."""
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        with Path(path).open("wb") as file:
            np.savez_compressed(file, version=np.int64(VERSION), **columns)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what ``save`` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: the file is no trace, is damaged, or is of a later version; the message names it.
        """
        with Path(path).open("rb") as file:
            try:
                archive = np.load(file, allow_pickle=False)
                if isinstance(archive, np.ndarray):
                    raise ValueError("one array, where an .npz of columns was expected")
                with archive:
                    _check_sizes(archive.zip)
                    return cls(**_columns(archive))
            except Exception as error:  # damaged bytes make zipfile, zlib and numpy raise all sorts of them
                raise ValueError(f"{path} is no trace that can be read: {error}") from error


_DTYPES = {
    "step": np.int32,
    "time_s": np.float32,
    "event": np.int8,
    "sequence": np.int32,
    "a": np.int32,
    "b": np.int32,
    "token_starts": np.int64,
    "tokens": np.int32,
    "segment_starts": np.int64,
    "segment_kind": np.int8,
    "segment_tokens": np.int32,
    "kinds": np.str_,
    "priority": np.int32,
    "exact_tokens": np.int32,
    "provenance": np.int32,
}


def _check_sizes(archive: zipfile.ZipFile) -> None:
    """Refuse, before anything is unpacked, what would take more memory than it is worth."""
    total = sum(member.file_size for member in archive.infolist())
    if total > MAX_BYTES:
        raise ValueError(f"it unpacks to {total} bytes, and a trace has at most {MAX_BYTES}")
    for member in archive.infolist():
        with archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version not in _READ_HEADER:
                raise ValueError(f"{member.filename} is of npy version {version}; known are {[*_READ_HEADER]}")
            shape, _, dtype = _READ_HEADER[version](file)
            claimed, there = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
        if claimed != there and not dtype.hasobject:
            raise ValueError(f"{member.filename} claims {claimed} bytes, shape {list(shape)}, and has {there}")


def _columns(archive: Any) -> dict[str, NDArray[Any]]:
    if "version" not in archive:
        raise ValueError(f"no field 'version'; its fields: {', '.join(archive.files) or 'none'}")
    version = archive["version"]
    if version.shape or version.dtype.kind not in "iu" or version < 1:
        raise ValueError(f"version {version!r}, where a whole number of at least 1 was expected")
    if version > VERSION:
        raise ValueError(f"version {version}, and this octavo reads up to version {VERSION}; use a newer one")
    missing = [name for name in _DTYPES if name not in archive]
    if missing:
        raise ValueError(f"no field {missing[0]!r}; its fields: {', '.join(archive.files)}")
    return {name: archive[name] for name in _DTYPES}


def _check_columns(trace: Trace) -> None:
    for name, wanted in _DTYPES.items():
        column = getattr(trace, name)
        right = column.dtype.kind == "U" if wanted is np.str_ else column.dtype == wanted
        if not right or column.ndim != 1:
            kind = "text" if wanted is np.str_ else np.dtype(wanted).name
            raise ValueError(f"{name} is {column.dtype} {list(column.shape)}, where {kind} [n] was expected")
    for leader, others in (
        ("event", ("step", "time_s", "sequence", "a", "b")),
        ("priority", ("exact_tokens", "provenance")),
        ("segment_tokens", ("segment_kind",)),
    ):
        length = len(getattr(trace, leader))
        for name in others:
            if len(getattr(trace, name)) != length:
                raise ValueError(f"{name} has {len(getattr(trace, name))} entries, and {leader} {length}")
    for name, column in (("token_starts", trace.tokens), ("segment_starts", trace.segment_tokens)):
        starts = getattr(trace, name)
        if len(starts) != trace.sequences + 1:
            raise ValueError(f"{name} has {len(starts)} entries, where {trace.sequences} sequences need one more")
        if starts[0] != 0 or starts[-1] != len(column) or (np.diff(starts) < 0).any():
            raise ValueError(f"{name} must rise from 0 to {len(column)}, got {starts[0]} to {starts[-1]}")


def _check_sequences(trace: Trace) -> None:
    begins = trace.begins()
    if not np.array_equal(trace.sequence[begins], np.arange(trace.sequences)):
        raise ValueError(
            f"{trace.sequences} sequences must begin in the order of their numbers, and {len(begins)} events begin "
            f"one: {trace.sequence[begins][:8].tolist()}"
        )
    if (trace.tokens < 0).any():
        raise ValueError(f"token ids must be at least 0, got {trace.tokens.min()}")
    if (trace.exact_tokens < 0).any():
        raise ValueError(f"exact_tokens must be at least 0, got {trace.exact_tokens.min()}")
    if ((trace.segment_kind < 0) | (trace.segment_kind >= len(trace.kinds))).any():
        raise ValueError(f"segment_kind {trace.segment_kind.max()} is unknown: there are {len(trace.kinds)} kinds")
    if (trace.segment_tokens < 1).any():
        raise ValueError(f"a segment has at least 1 token, got {trace.segment_tokens.min()}")
    opened = np.zeros(trace.sequences, np.int64)
    np.add.at(opened, np.repeat(np.arange(trace.sequences), np.diff(trace.segment_starts)), trace.segment_tokens)
    long = np.flatnonzero(opened > np.diff(trace.token_starts))
    if len(long):
        raise ValueError(f"sequence {long[0]} opens with segments of {opened[long[0]]} tokens, and has fewer")


def _check_events(trace: Trace) -> None:
    known = [int(event) for event in Event]
    strange = np.flatnonzero(~np.isin(trace.event, known))
    if len(strange):
        raise ValueError(f"event {trace.event[strange[0]]} in row {strange[0]} is unknown; known are {known}")
    for name in ("step", "time_s"):
        column = getattr(trace, name)
        if not np.isfinite(column).all() or (np.diff(column) < 0).any():
            raise ValueError(f"{name} must never fall")
    rows = np.flatnonzero(trace.event != Event.EVICT)
    _check_life(trace, rows, trace.sequence[rows])
    forks = np.flatnonzero(trace.event == Event.FORK)
    itself = forks[trace.a[forks] == trace.sequence[forks]]
    if len(itself):
        raise ValueError(f"row {itself[0]} forks sequence {trace.a[itself[0]]} from itself")
    _check_life(trace, forks, trace.a[forks])
    lengths = trace.lengths()
    _check_count(trace, forks, "b", lengths[trace.a[forks]])
    for event, column in ((Event.OPEN, "b"), (Event.GROW, "a")):
        at = np.flatnonzero(trace.event == event)
        _check_count(trace, at, column, lengths[trace.sequence[at]])


def _check_life(trace: Trace, rows: NDArray[np.int64], sequences: NDArray[np.int32]) -> None:
    """Sequences that events refer to have begun by then and have not ended."""
    unknown = np.flatnonzero((sequences < 0) | (sequences >= trace.sequences))
    if len(unknown):
        at = unknown[0]
        raise ValueError(f"row {rows[at]} is about sequence {sequences[at]}, and there are {trace.sequences}")
    begins = trace.begins()
    ends = np.full(trace.sequences, len(trace), np.int64)
    closes = np.flatnonzero(trace.event == Event.CLOSE)
    ends[trace.sequence[closes][::-1]] = closes[::-1]  # the first one counts
    early = np.flatnonzero(begins[sequences] > rows)
    late = np.flatnonzero(ends[sequences] < rows)
    for wrong, state in ((early, "which has not begun"), (late, "which has ended")):
        if len(wrong):
            raise ValueError(f"row {rows[wrong[0]]} is about sequence {sequences[wrong[0]]}, {state}")


def _check_count(trace: Trace, rows: NDArray[np.int64], name: str, most: NDArray[np.int64]) -> None:
    """Counts of tokens are between 0 and what the sequence has."""
    values = getattr(trace, name)[rows]
    wrong = np.flatnonzero((values < 0) | (values > most))
    if len(wrong):
        at = wrong[0]
        event = Event(int(trace.event[rows[at]])).name
        raise ValueError(f"row {rows[at]} ({event}) says {values[at]} tokens, of a sequence that has {most[at]}")
