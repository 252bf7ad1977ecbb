"""What comes out of a step: rows of logits, or tokens that nobody has read yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from octavo.core.execution.decode_batch import DecodeBatch
from octavo.core.execution.verification import Verification
from octavo.core.step_plan import Chunk
from octavo.core.uploads import Download


@dataclass(frozen=True)
class Row:
    """One row of logits: of which chunk, and at which position of its sequence."""

    chunk: Chunk
    position: int


@dataclass(frozen=True)
class Flight:
    """A step that the device has been given and whose tokens nobody has read: the news of member i of the batch (as
    ``DecodeProgram`` gives them) are in column ``rows[i]``. In a ``verification`` a member has a token a place."""

    batch: DecodeBatch
    rows: NDArray[np.int64]
    news: Download
    verification: Verification | None = None

    def alive(self) -> Flight:
        """Without those that have ended since; who reads a verification leaves them out itself."""
        reasons = [sequence.finish_reason for sequence in self.batch.sequences]
        if self.verification is not None or not any(reasons):
            return self
        standing = np.array([reason is None for reason in reasons])
        return replace(self, batch=self.batch.only(standing), rows=self.rows[standing])
