"""From a batch that decodes to one replay of the decode program, and from there to tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.execution.choosers import Choosers, composition
from octavo.core.execution.decode_batch import DecodeBatch
from octavo.core.execution.decode_program import MOST_SETS, DecodeProgram, RowSet
from octavo.core.execution.device_tables import DeviceTables
from octavo.core.execution.flight import Flight
from octavo.core.execution.read_accounts import ReadAccounts
from octavo.core.execution.shared_runs import RunFinder, SharedRuns
from octavo.core.execution.verification import Verification
from octavo.core.interfaces import SparseMethod
from octavo.core.memory.digests import DigestStore
from octavo.core.sequence import Sequence
from octavo.core.step_plan import Chunk


@dataclass(frozen=True)
class _Under:
    """The members of a batch that are under one method: their numbers int64 [m] in the batch, and their rows."""

    method: SparseMethod | None
    numbers: NDArray[np.intp]
    sequences: list[Sequence]
    rows: list[int]


@dataclass(frozen=True)
class _Lineup:
    """Which rows a batch has, and who is under which method. It stays as it is while the same sequences decode, each
    under the same method: then a step works out lengths, and nothing else. ``gaps``: but for rows among them that are
    free, or will be, so that a smaller program would do."""

    sequences: list[Sequence]
    choosers: NDArray[np.int64]
    rows: NDArray[np.int64]
    sets: list[_Under]
    gaps: bool


class Replayer:
    """Has batches computed by the decode program, whose news are read a step later."""

    def __init__(
        self,
        program: DecodeProgram,
        tables: DeviceTables,
        choosers: Choosers,
        runs: RunFinder | None,
        digests_of: Callable[[SparseMethod], DigestStore],
        accounts: ReadAccounts,
        page_tokens: int,
    ) -> None:
        self.program = program
        self._tables = tables
        self._choosers = choosers
        self._runs = runs
        self._digests_of = digests_of
        self._accounts = accounts
        self._page_tokens = page_tokens
        self._lineup: _Lineup | None = None
        self._under: dict[Sequence, str] = {}  # who was in the last replayed step, and under which method

    def batch_of(self, chunks: list[Chunk]) -> DecodeBatch | Verification | None:
        """What some planned chunks are together, if it can be replayed."""
        if not all((chunk.count == 1 or chunk.verifies) and chunk.sequence.draws_on_device for chunk in chunks):
            return None
        # Of a chunk of drafts the batch has the last one, as if it were decoded behind the others.
        lasts = [Chunk(c.sequence, c.end - 1, 1, c.draft or c.verifies) for c in chunks]
        batch = DecodeBatch.of(lasts, self._choosers.whole_tokens)
        if any(chunk.verifies for chunk in chunks):
            return Verification.of(batch, chunks)
        return batch if self._replays(batch) else None

    def carries(self, batch: DecodeBatch) -> bool:
        """Whether the device can decode on with a batch before its last tokens are read."""
        return self.program.state.carries(batch) and self._replays(batch)

    def _replays(self, batch: DecodeBatch) -> bool:
        if self._choosers.probe is not None and any(map(self._choosers.probed, batch.sequences, batch.starts.tolist())):
            return False
        return len(batch.methods) <= MOST_SETS or len(np.unique(batch.choosers)) <= MOST_SETS

    def launch(self, batch: DecodeBatch, running: Iterable[Sequence]) -> Flight:
        """Let the device compute a batch, whose tables it has, and come back at once. Tokens that the host does not
        know yet are where the last flight has left them."""
        lineup, choosers = self._lineup, batch.choosers
        self._lineup = None
        try:
            stays = lineup is not None and lineup.sequences is batch.sequences and not lineup.gaps
            if lineup is None or not stays or not (choosers is lineup.choosers or (choosers == lineup.choosers).all()):
                lineup, stays = self._line_up(batch, choosers, running), False
            came_from = self.program.state.bring_in(batch, lineup.rows)
            if not stays:
                before, self._under = self._under, {}
                for under in lineup.sets:
                    name = composition(under.method)
                    came_from[under.numbers] *= [before.get(sequence) == name for sequence in under.sequences]
                    self._under |= dict.fromkeys(under.sequences, name)
            dense = next((under for under in lineup.sets if under.method is None), None)
            shared = None
            if dense is not None and self._runs is not None:
                shared = self._runs.find(dense.sequences, batch.starts[dense.numbers])
            sets = [self._row_set(batch, under, came_from, shared if under is dense else None) for under in lineup.sets]
            flight = Flight(batch, lineup.rows, self.program.launch(sets))
        except BaseException:
            self.forget()
            raise
        self._lineup = lineup
        if shared is not None:
            self._accounts.spared(shared.spared)
        return flight

    def draw(self, lasts: list[Chunk], logits: Tensor, backend: str) -> Flight:
        """Have the tokens behind some last tokens drawn, whose fp32 logits [n, V] another pass has computed, and come
        back at once. They are left where a replayed step leaves its own."""
        self._lineup = None
        try:
            batch = DecodeBatch.of(lasts, self._choosers.whole_tokens)
            rows = self._tables.rows(batch.sequences)
            self.program.state.bring_in(batch, rows)
            with torch.inference_mode():
                tokens = self.program.state.draw(logits, rows, backend)
            return Flight(batch, rows, self.program.download(tokens[None]))
        except BaseException:
            self.forget()
            raise

    def verify(self, verification: Verification) -> Flight:
        """The same of the drafts behind the last flight, the last of which the host does not know yet. Who decodes, and
        under which method, stays as it was for the step behind it."""
        batch = verification.batch
        try:
            rows = self.rows(batch)
            self.program.state.verify(batch, rows)
            news = self.program.verify_step(rows, verification.drafts, verification.asked())
            return Flight(batch, rows, news, verification)
        except BaseException:
            self.forget()
            raise

    def resume(self, flight: Flight, alive: NDArray[np.bool_], batch: DecodeBatch, tokens: NDArray[np.int64]) -> None:
        """Let those of a verified flight that are ``alive`` bool [n] go on as a ``batch``, behind their last
        ``tokens``."""
        rows = flight.rows[alive]
        rounds, draws = flight.batch.rounds[alive], batch.starts + 1 - batch.prompts
        self.program.state.resume(rows, rounds, batch.starts, tokens, draws)

    def rows(self, batch: DecodeBatch) -> NDArray[np.int64]:
        """The rows int64 [n] of the members of a batch, which have some."""
        lineup = self._lineup
        stays = lineup is not None and lineup.sequences is batch.sequences
        return lineup.rows if lineup is not None and stays else self._tables.rows(batch.sequences)

    def forget(self) -> None:
        """A launch has failed: what the device has may be anything."""
        self.program.state.forget()

    def land(self, flight: Flight) -> NDArray[np.int64]:
        """The tokens of a flight, one a member of its batch, once the device has drawn them; of a verification its
        news, a column a member."""
        news: NDArray[np.int64] = flight.news.wait().numpy()
        if flight.verification is not None:
            return news[:, flight.rows]
        self._accounts.flight(flight.decoded(), news[1:])
        tokens: NDArray[np.int64] = news[0, flight.rows]
        return tokens

    def _line_up(self, batch: DecodeBatch, choosers: NDArray[np.int64], running: Iterable[Sequence]) -> _Lineup:
        if self._has_gaps(self._tables.rows(batch.sequences)):
            self._tables.sync(running)  # whoever has ended leaves a row free
            if moves := self._tables.close_gaps():
                self.program.state.move(moves)
        rows = self._tables.rows(batch.sequences)
        sets = []
        for number in np.unique(choosers).tolist():
            members = np.flatnonzero(choosers == number)
            sequences = [batch.sequences[member] for member in members.tolist()]
            sets.append(_Under(batch.methods[number], members, sequences, rows[members].tolist()))
        return _Lineup(batch.sequences, choosers, rows, sets, self._has_gaps(rows))

    def _has_gaps(self, rows: NDArray[np.int64]) -> bool:
        return self.program.bucket(int(rows.max()) + 1) > self.program.bucket(len(rows))

    def _row_set(
        self, batch: DecodeBatch, under: _Under, came_from: NDArray[np.int64], shared: SharedRuns | None
    ) -> RowSet:
        method = under.method
        if method is None:
            return RowSet(under.rows, runs=None if shared is None else shared.groups)
        starts = batch.starts[under.numbers]
        return RowSet(
            rows=under.rows,
            method=method,
            longest=-(-(int(starts.max()) + 1) // self._page_tokens),
            digests=self._digests(method, under, starts, came_from[under.numbers]),
        )

    def _digests(
        self, method: SparseMethod, under: _Under, starts: NDArray[np.int64], came_from: NDArray[np.int64]
    ) -> DigestStore | None:
        """Make the digests that members read in a replayed step and that do not exist yet: of the pages that have been
        filled since, and of all pages where a sequence comes in, or begins to choose."""
        if method.digest is None:
            return None
        store, page = self._digests_of(method), self._page_tokens
        sealed, drafted = [], []
        for member in np.flatnonzero(came_from // page < starts // page).tolist():
            sequence, full = under.sequences[member], int(starts[member]) // page
            first, exact = int(came_from[member]) // page, sequence.computed // page
            sealed.append(sequence.table.pages(first, min(exact, full)))
            drafted.append(sequence.table.pages(max(first, exact), full))
        if sealed:
            store.make(sealed)
            store.make(drafted, drafts=True)
        return store
