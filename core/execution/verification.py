"""Drafts of sequences that decode together, verified in one replayed step behind the last of them.

::

    position   rounds                       starts
               | t | d | d | d | d |        t is known, the last d is only where the device has drawn it
    places       0   1   2   3   4          each draws the token behind it
               | . | a | a | x |            so the tokens behind t: two drafts that are right, and what is drawn instead
               computed on ^                of the third; or one more than all drafts

Where nobody waits the step is planned and launched before the last draft is read (``looking_ahead.py``), and the next
round begins where its news say, without another look around: what is known of a sequence is in columns
(``DecodeBatch``), and the device keeps its row. Sequences that decode without drafts take part with one place. What one
program cannot do is computed as any chunk is (``octavo.core.execution.drafts`` has the rule, which is the same).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.core.execution.decode_batch import DecodeBatch
from octavo.core.outputs import StepOutput

if TYPE_CHECKING:
    from octavo.core.engine import Engine
    from octavo.core.execution.flight import Flight
    from octavo.core.sequence import Sequence
    from octavo.core.step_plan import Chunk


@dataclass(eq=False)
class Verification:
    """The last token and all ``drafts`` int64 [n] of each sequence of a ``batch`` that stands at the last of them.
    ``places``: tokens of the longest possible chunk."""

    batch: DecodeBatch
    drafts: NDArray[np.int64]
    places: int
    _forced: NDArray[np.int64] | None = None

    @classmethod
    def behind(cls, batch: DecodeBatch, step_tokens: int) -> Verification | None:
        """What comes behind a step of ``batch`` that draws the last draft of somebody's round; None if it draws none,
        or if what comes is not for one program: rounds of several lengths, tokens that the host must draw, other sparse
        methods beside, or more than ``step_tokens`` tokens."""
        if not batch.drafts:
            return None
        ended = batch.at(batch.starts + 1)
        ended = ended.only(ended.starts < ended.stops)
        drafting, halting = ended.drafting, ended.starts >= ended.halts
        due = ended.most[drafting & halting]
        if not len(due) or (halting & ~drafting).any() or (ended.most[drafting] != due[0]).any():
            return None
        if not ended.drawn.all() or ended.choosers[~drafting].any():
            return None
        found = cls._of(ended)
        return found if found.drafts.sum() + len(found.drafts) <= step_tokens else None

    @classmethod
    def of(cls, batch: DecodeBatch, chunks: list[Chunk]) -> Verification | None:
        """What planned ``chunks`` are, of which a ``batch`` has the last tokens, as if all but the dense ones decoded
        drafts; None where one program does not do."""
        most = batch.most[batch.drafting]
        if any(chunk.draft for chunk in chunks) or (most != most[0]).any():
            return None
        dense = ~batch.drafting
        if batch.choosers[dense].any() or (batch.starts < batch.prompts)[dense].any():
            return None
        return cls._of(batch)

    @classmethod
    def _of(cls, batch: DecodeBatch) -> Verification:
        drafts = np.where(batch.drafting, batch.starts - batch.rounds, 0)
        return cls(batch, drafts, int(batch.most.max()) + 1)

    def asked(self) -> NDArray[np.int64]:
        """The tokens at the places, int64 [n, places], as far as the host knows them: all but the last of each row, and
        those behind it, which are no places."""
        asked = np.zeros((len(self.drafts), self.places), np.int64)
        for row, (sequence, drafts) in enumerate(zip(self.batch.sequences, self.drafts.tolist(), strict=True)):
            if drafts:
                asked[row, :drafts] = [sequence.tokens[-1], *sequence.drafts.tokens[: drafts - 1]]
        return asked

    def call(self) -> None:
        """Nobody drafts on before it."""
        for sequence, drafts in zip(self.batch.sequences, self.drafts.tolist(), strict=True):
            sequence.drafts.called |= drafts > 0

    def settle(self) -> None:
        """The step is under way: the KV of all known tokens stands for all who come after it in the device's order."""
        for sequence, drafts in zip(self.batch.sequences, self.drafts.tolist(), strict=True):
            sequence.drafts.counts.verifications += drafts > 0
            sequence.drafts.counts.drafted += drafts
            sequence.computed += 1

    def foresee(self) -> NDArray[np.int64]:
        """How many drafts are right where that is forced, int64 [n]; -1 elsewhere."""
        if self._forced is None:
            known = (self.batch.starts - self.drafts + 1).tolist()
            members = zip(self.batch.sequences, self.drafts.tolist(), known, strict=True)
            self._forced = np.array([s.drafts.foreseen(count, s.seed, known) for s, count, known in members], np.int64)
        return self._forced

    def judge(self, news: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """From the ``news`` of the program int64 [2 * places, n], the tokens drawn at each place above those that stood
        there: the tokens behind each sequence int64 [n, places], and how many of them there are int64 [n]."""
        drawn, stood = news[: self.places].T, news[self.places :].T
        drafts = np.roll(stood, -1, axis=1)  # a place draws what the next one holds, if that is right
        right = (drawn == drafts) & (np.arange(self.places) < self.drafts[:, None])
        accepted = np.logical_and.accumulate(right, axis=1).sum(1)
        accepted = np.where(self.foresee() >= 0, self.foresee(), accepted)
        return np.where(np.arange(self.places) < accepted[:, None], drafts, drawn), accepted + 1


def take_verified(engine: Engine, flight: Flight) -> DecodeBatch | None:
    """Give each sequence of a flight the tokens that stand, up to one that ends it, and let the device go on from
    there. News go to ``_undelivered``. Gives the next step, if it needs no look around: a round of drafts of all that
    drafted.
    """
    verification = flight.verification
    assert verification is not None
    batch = verification.batch
    tokens, counts = verification.judge(engine._runner.land(flight))
    last = tokens[np.arange(len(counts)), counts - 1]
    starts = batch.starts - verification.drafts + counts
    inside = np.arange(verification.places) < counts[:, None]
    ends = ((tokens[:, :, None] == batch.ending[:, None]).any(2) & inside).any(1) | (starts + 1 >= batch.limits)
    looks = (batch.closely | ends).tolist()
    read = engine._runner.accounts.verified(batch.starts + 1, verification.drafts + 1).tolist()
    landed = []
    columns = tokens.tolist(), counts.tolist(), verification.drafts.tolist(), looks, read
    for sequence, own, count, drafts, look, nbytes in zip(batch.sequences, *columns, strict=True):
        if sequence.finish_reason is not None:
            continue
        sequence.kv_bytes_read += nbytes
        sequence.drafts.begin()
        landed.append((_Standing(sequence, own[:count], drafts), look))
    _take_whole(engine, [standing for standing, look in landed if not look])
    for standing in [standing for standing, look in landed if look]:
        _take_singly(engine, standing)
    alive = np.array([sequence.finish_reason is None for sequence in batch.sequences])
    if not alive.any():
        return None
    moved = replace(batch.only(alive), starts=starts[alive])
    engine._runner.resume(flight, alive, moved, last[alive])
    return next_round(moved)


def _take_whole(engine: Engine, landed: list[_Standing]) -> None:
    """Let sequences have all of their tokens, at which nobody looks."""
    for standing in landed:
        standing.take(len(standing.tokens))
    try:
        engine._publisher.publish([s.sequence for s in landed if s.sequence.computed >= s.sequence.full_at])
    finally:  # whoever has its tokens hears of them
        for standing in landed:
            sequence = standing.sequence
            output = StepOutput(sequence.request.request_id, sequence.sample, standing.tokens, "")
            engine._undelivered.append(output)


def _take_singly(engine: Engine, standing: _Standing) -> None:
    """Let a sequence have its tokens up to one that ends it. It has none yet of which publishing might keep the
    news."""
    sequence = standing.sequence
    while sequence.finish_reason is None and standing.taken < len(standing.tokens):
        sequence.computed = len(sequence.tokens)
        if sequence.computed >= sequence.full_at:
            engine._publisher.publish([sequence])
        standing.take(1)
        engine._undelivered.append(engine._take(sequence, standing.tokens[standing.taken - 1]))


def next_round(batch: DecodeBatch) -> DecodeBatch | None:
    """The first step of a round of drafts of all that drafted; None where somebody begins to, or ends."""
    drafting = batch.drafting
    room = np.minimum(batch.most, batch.limits - batch.starts - 2)  # as ``Drafts.room`` has it
    if (drafting & (room < 1)).any() or (~drafting & (batch.starts >= batch.halts)).any():
        return None
    halts = np.where(drafting, batch.starts + room, batch.halts)
    return replace(batch, halts=halts, rounds=np.where(drafting, batch.starts, batch.rounds))


@dataclass
class _Standing:
    """The tokens that stand behind a sequence, and how many of them it has ``taken``."""

    sequence: Sequence
    tokens: list[int]
    drafts: int
    taken: int = 0

    def take(self, count: int) -> None:
        """Give it so many more. The KV of each but the last is exact; that of the last does not exist."""
        sequence, before = self.sequence, self.taken
        self.taken += count
        sequence.tokens.extend(self.tokens[before : self.taken])
        sequence.computed = len(sequence.tokens) - 1
        sequence.decode_steps += count
        sequence.drafts.counts.accepted += min(self.taken, len(self.tokens) - 1) - before
        sequence.drafts.counts.rejected += self.taken == len(self.tokens) <= self.drafts
