"""What comes out of a step: rows of logits, or tokens that nobody has read yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from octavo.core.execution.decode_batch import DecodeBatch
from octavo.core.execution.downloads import Download
from octavo.core.execution.verification import Verification
from octavo.core.step_plan import Chunk


@dataclass(frozen=True)
class Row:
    """One row of logits: of which chunk, and at which position of its sequence."""

    chunk: Chunk
    position: int


@dataclass(frozen=True)
class Flight:
    """A step that the device has been given and whose tokens nobody has read: the news of member i of the batch (as
    ``DecodeProgram`` gives them) are in column ``rows[i]``. In a ``verification`` a member has a token a place.

    Of a step with prompts in it the members are those that draw, at their last tokens: each computes ``counts`` int64
    [n] tokens, elsewhere one. If the device had nothing else to do, it has ``begun`` with the ``chunks`` (tokens,
    position) at that time, in seconds. Its tokens may be ``counted`` as its members' already (``Sequence.unread``)."""

    batch: DecodeBatch
    rows: NDArray[np.int64]
    news: Download
    verification: Verification | None = None
    counts: NDArray[np.int64] | None = None
    chunks: tuple[tuple[int, int], ...] = ()
    begun: float = 0.0
    counted: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether all that follows of its members is known but for the tokens: nobody drafts, or is under a method."""
        batch = self.batch
        return self.verification is None and not batch.drafts and not batch.most.any() and len(batch.methods) == 1

    def alive(self) -> Flight:
        """Without those that have ended since; who reads a verification leaves them out itself."""
        reasons = [sequence.finish_reason for sequence in self.batch.sequences]
        if self.verification is not None or not any(reasons):
            return self
        return self._only(np.array([reason is None for reason in reasons]))

    def take(self, tokens: NDArray[np.int64]) -> None:
        """Let the members have the tokens int64 [n] that this step has drawn."""
        self.batch.take(tokens)
        if self.counted:
            for sequence in self.batch.sequences:
                sequence.unread = 0

    def decoded(self) -> Flight:
        """Without those that have computed more than one token."""
        return self if self.counts is None else self._only(self.counts == 1)

    def _only(self, which: NDArray[np.bool_]) -> Flight:
        counts = None if self.counts is None else self.counts[which]
        return replace(self, batch=self.batch.only(which), rows=self.rows[which], counts=counts)
