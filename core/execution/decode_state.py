"""What the device carries from one decode step to the next, so that it never waits for the host's next input."""

from __future__ import annotations

from collections.abc import Sequence as Sequential

import numpy as np
import torch
from torch import Tensor

from octavo.core.execution.device_tables import DeviceTables
from octavo.core.scheduler import Chunk
from octavo.core.sequence import Sequence
from octavo.core.uploads import upload

FLOATS = ("temperature", "top_p", "min_p")
INTS = ("tokens", "seeds", "draws", "method_seeds", "lengths", "top_k")


class DecodeState:
    """A row a running sequence, the same as in ``DeviceTables``::

        rows     int32 [R]  the row's own number where a sequence decodes in this step, -1 elsewhere
        lengths  int32 [R]  tokens in the cache
        tokens   int64 [R]  the last token, which is not in the cache yet
        temperature, top_p, min_p fp32, top_k int32, seeds, draws int64 [R]: as ``ops.sample`` takes them
        method_seeds int64 [R]  what a sparse method that draws draws from

    A decode step reads them and moves ``lengths``, ``tokens`` and ``draws`` on. The host writes a row when its sequence
    comes in, or has been computed by other means since.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._device = device
        self._vocabulary = vocabulary
        self.rows = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.fields = {name: torch.zeros(rows, dtype=torch.float32, device=device) for name in FLOATS}
        for name in INTS:
            dtype = torch.int32 if name in ("lengths", "top_k") else torch.int64
            self.fields[name] = torch.zeros(rows, dtype=dtype, device=device)
        self._decoding: list[int] = []
        self._known: dict[Sequence, tuple[int, int]] = {}

    def forget(self) -> None:
        """The rows may hold anything: write them anew before the next step."""
        self._known, self._decoding = {}, [-1]

    def leave_out(self, chunks: Sequential[Chunk]) -> None:
        """These are computed by other means. Where they stand does not tell: drafts may end where they have begun."""
        for chunk in chunks:
            self._known.pop(chunk.sequence, None)

    def carries(self, sequences: Sequential[Sequence]) -> bool:
        """Whether the device can go on with these sequences without a word from the host."""
        known = self._known
        return all(sequence in known and known[sequence][1] == sequence.frontier for sequence in sequences)

    def bring_in(self, chunks: Sequential[Chunk], tables: DeviceTables) -> list[int]:
        """Make the state what a step over these chunks of one token needs; gives their rows."""
        rows = [tables.row(chunk.sequence) for chunk in chunks]
        if rows != self._decoding:
            decoding = np.full(len(self.rows), -1, np.int32)
            decoding[rows] = rows
            self.rows.copy_(upload(decoding, self._device))
            self._decoding = rows
        known = self._known
        new = [(row, c) for row, c in zip(rows, chunks, strict=True) if known.get(c.sequence) != (row, c.start)]
        if new:
            self._write(new)
        self._known = {chunk.sequence: (row, chunk.end) for row, chunk in zip(rows, chunks, strict=True)}
        return rows

    def move(self, moves: Sequential[tuple[int, int]]) -> None:
        """Rows have been moved: (from, to)."""
        source, target = (upload(np.array(side, np.int64), self._device) for side in zip(*moves, strict=True))
        for field in self.fields.values():
            field[target] = field[source]
        to = dict(moves)
        self._known = {sequence: (to.get(row, row), at) for sequence, (row, at) in self._known.items()}

    def _write(self, new: Sequential[tuple[int, Chunk]]) -> None:
        rows = upload(np.array([row for row, _ in new], np.int64), self._device)
        params = [chunk.sequence.request.params for _, chunk in new]
        floats = upload(
            np.array([[p.temperature, p.top_p, p.min_p] for p in params], np.float32).T.copy(), self._device
        )
        values = [
            (
                chunk.token_ids[0],
                signed(chunk.sequence.seed),
                chunk.end - len(chunk.sequence.request.prompt),
                method_seed(chunk),
                chunk.start,
                min(p.top_k, self._vocabulary),
            )
            for (_, chunk), p in zip(new, params, strict=True)
        ]
        ints = upload(np.array(values, np.int64).T.copy(), self._device)
        for names, columns in ((FLOATS, floats), (INTS, ints)):
            for name, column in zip(names, columns, strict=True):
                self.fields[name].index_copy_(0, rows, column.to(self.fields[name].dtype))

    def filters(self, rows: int) -> tuple[Tensor, ...]:
        """Temperature, top-k, top-p, min-p, seeds and draws of the first rows, as ``ops.sample`` takes them."""
        names = ("temperature", "top_k", "top_p", "min_p", "seeds", "draws")
        return tuple(self.fields[name][:rows] for name in names)


def method_seed(chunk: Chunk) -> int:
    """What a method that draws draws from for a chunk of one token, as a non-negative int64."""
    span = chunk.sequence.sparse_span(chunk.start)
    return span.seed & (2**63 - 1) if span is not None else 0


def signed(seed: int) -> int:
    """The int64 with the low 64 bits of any integer."""
    return (seed + 2**63) % 2**64 - 2**63
