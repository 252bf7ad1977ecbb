"""What the device carries from one decode step to the next, so that it never waits for the host's next input."""

from __future__ import annotations

from collections.abc import Sequence as Sequential

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.execution.decode_batch import DecodeBatch
from octavo.core.sequence import Sequence
from octavo.core.uploads import upload
from octavo.kernels import ops

FLOATS = ("temperature", "top_p", "min_p")
INTS = ("tokens", "seeds", "draws", "method_seeds", "lengths", "top_k")
FILTERS = ("temperature", "top_k", "top_p", "min_p", "seeds", "draws")
UNKNOWN = -1


class DecodeState:
    """A row a running sequence, the same as in ``DeviceTables``::

        rows     int32 [R]  the row's own number where a sequence decodes in this step, -1 elsewhere
        lengths  int32 [R]  tokens in the cache
        tokens   int64 [R]  the last token, which is not in the cache yet
        temperature, top_p, min_p fp32, top_k int32, seeds, draws int64 [R]: as ``ops.sample`` takes them
        method_seeds int64 [R]  what a sparse method that draws draws from

    A decode step reads them and moves ``lengths``, ``tokens`` and ``draws`` on; a step with prompts in it has that done
    behind it (``draw``). The host writes a row when its sequence comes in, or has been computed by other means since.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._device = device
        self._vocabulary = vocabulary
        self.rows = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.fields = {name: torch.zeros(rows, dtype=torch.float32, device=device) for name in FLOATS}
        for name in INTS:
            dtype = torch.int32 if name in ("lengths", "top_k") else torch.int64
            self.fields[name] = torch.zeros(rows, dtype=dtype, device=device)
        self._sequences: list[Sequence] = []
        self._decoding: NDArray[np.int64] = np.empty(0, np.int64)
        self._known: dict[Sequence, int] = {}
        self._at = np.zeros(rows, np.int64)
        self._before = np.zeros(rows, np.int64)

    def forget(self) -> None:
        """The rows may hold anything: write them anew before the next step."""
        self._sequences, self._known, self._decoding = [], {}, np.full(1, -1)

    def pass_by(self) -> None:
        """A step is computed by other means. Where who is in it stands does not tell, since drafts may end where they
        have begun; and who is not may have lost its pages and found others."""
        self._sequences, self._known = [], {}

    def carries(self, batch: DecodeBatch) -> bool:
        """Whether the device can go on with the batch behind that of the last step, or with some of it, without a word
        from the host."""
        if batch.sequences is self._sequences:
            return True
        if any(sequence not in self._known for sequence in batch.sequences):
            return False
        rows = np.array([self._known[sequence] for sequence in batch.sequences])
        return np.array_equal(self._at[rows], batch.starts)

    def bring_in(self, batch: DecodeBatch, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Make the state what a step over a batch in ``rows`` int64 [n] needs. Gives int64 [n], for each the position
        from which it has come, in a step or in a round of drafts; 0 for those that it did not know."""
        known = self._at[rows] == batch.starts
        if batch.sequences is not self._sequences or rows is not self._decoding:
            known &= np.array([self._known.get(sequence, -1) for sequence in batch.sequences]) == rows
            self._known = dict(zip(batch.sequences, rows.tolist(), strict=True))
            if not np.array_equal(rows, self._decoding):
                decoding = np.full(len(self.rows), -1, np.int32)
                decoding[rows] = rows
                self.rows.copy_(upload(decoding, self._device))
            self._sequences, self._decoding = batch.sequences, rows
        before = self._before[rows]
        if not known.all():
            self._write(batch, rows, np.flatnonzero(~known))
            before[~known] = 0
        self._before[rows], self._at[rows] = batch.starts, batch.starts + 1
        return before

    def verify(self, batch: DecodeBatch, rows: NDArray[np.int64]) -> None:
        """The same of a step that verifies drafts, which end where the batch stands. Where they go on from is not
        known before ``resume``."""
        self.bring_in(batch, rows)
        self._at[rows] = UNKNOWN

    def resume(
        self,
        rows: NDArray[np.int64],
        rounds: NDArray[np.int64],
        starts: NDArray[np.int64],
        tokens: NDArray[np.int64],
        draws: NDArray[np.int64],
    ) -> None:
        """Rounds of drafts that began at ``rounds`` are verified: their sequences go on at ``starts``, with these last
        tokens and numbers of draws, all int64 [n]."""
        places, *columns = upload(np.stack([rows, starts, tokens, draws]), self._device)
        for name, column in zip(("lengths", "tokens", "draws"), columns, strict=True):
            self.fields[name].index_copy_(0, places, column.to(self.fields[name].dtype))
        self._before[rows], self._at[rows] = rounds, starts

    def move(self, moves: Sequential[tuple[int, int]]) -> None:
        """Rows have been moved: (from, to)."""
        sources, targets = (np.array(side, np.int64) for side in zip(*moves, strict=True))
        source, target = upload(sources, self._device), upload(targets, self._device)
        for field in self.fields.values():
            field[target] = field[source]
        self._at[targets], self._before[targets] = self._at[sources], self._before[sources]
        to = dict(moves)
        self._known = {sequence: to.get(row, row) for sequence, row in self._known.items()}
        self._sequences = []

    def _write(self, batch: DecodeBatch, rows: NDArray[np.int64], new: NDArray[np.intp]) -> None:
        """Write the rows of the members ``new``, whose last tokens the host knows."""
        members = [(batch.sequences[number], int(batch.starts[number])) for number in new.tolist()]
        params = [sequence.request.params for sequence, _ in members]
        floats = upload(
            np.array([[p.temperature, p.top_p, p.min_p] for p in params], np.float32).T.copy(), self._device
        )
        values = [
            (
                sequence.token_ids(start, start + 1)[0],
                signed(sequence.seed),
                start + 1 - len(sequence.request.prompt),
                method_seed(sequence, start),
                start,
                min(p.top_k, self._vocabulary),
            )
            for (sequence, start), p in zip(members, params, strict=True)
        ]
        ints, places = upload(np.array(values, np.int64).T.copy(), self._device), upload(rows[new], self._device)
        for names, columns in ((FLOATS, floats), (INTS, ints)):
            for name, column in zip(names, columns, strict=True):
                self.fields[name].index_copy_(0, places, column.to(self.fields[name].dtype))

    def filters(self, rows: int) -> tuple[Tensor, ...]:
        """Temperature, top-k, top-p, min-p, seeds and draws of the first rows, as ``ops.sample`` takes them."""
        return tuple(self.fields[name][:rows] for name in FILTERS)

    def last_tokens(self, rows: NDArray[np.int64]) -> Tensor:
        """The last tokens int64 [n] of some rows int64 [n], which the host need not know."""
        return self.fields["tokens"][upload(rows, self._device)]

    def draw(self, logits: Tensor, rows: NDArray[np.int64], backend: str) -> Tensor:
        """Draw the next tokens of ``rows`` int64 [n], which have been brought in, from fp32 logits [n, V] that another
        pass has computed, and move these rows on as a decode step does. Gives the last tokens of all rows, int64 [R];
        they are written over by the next step."""
        places = upload(rows, self._device)
        drawn = ops.sample(logits, *(self.fields[name][places] for name in FILTERS), backend)
        ops.scatter_tokens(places.int(), drawn, self.fields["tokens"], self.fields["lengths"], backend)
        self.fields["draws"][places] += 1
        return self.fields["tokens"]


def method_seed(sequence: Sequence, position: int) -> int:
    """What a method that draws draws from for the token at a position, as a non-negative int64."""
    span = sequence.sparse_span(position)
    return span.seed & (2**63 - 1) if span is not None else 0


def signed(seed: int) -> int:
    """The int64 with the low 64 bits of any integer."""
    return (seed + 2**63) % 2**64 - 2**63
