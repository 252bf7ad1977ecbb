"""What comes out of a step: rows of logits, or tokens that nobody has read yet."""

from __future__ import annotations

from dataclasses import dataclass

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
