"""What one step computes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.core.execution.decode_batch import DecodeBatch
from octavo.core.execution.verification import Verification
from octavo.core.memory.block_table import BlockTable
from octavo.core.memory.page_layout import PageLayout
from octavo.core.memory.page_pool import Pages, Units
from octavo.core.sequence import Sequence


@dataclass
class Chunk:
    """Tokens ``start`` to ``start + count`` of a sequence, to be computed in one step. ``draft``: the token that this
    yields is a draft, and the KV counts for nothing."""

    sequence: Sequence
    start: int
    count: int
    draft: bool = False

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids(self.start, self.end)

    @property
    def verifies(self) -> bool:
        """Whether its last tokens are drafts, to be verified."""
        return not self.draft and self.end > self.sequence.length

    def settle(self) -> None:
        """It is computed: its KV stands as far as its tokens are known."""
        if self.draft:
            return
        counts, drafts = self.sequence.drafts.counts, max(0, self.end - self.sequence.length)
        counts.verifications += drafts > 0
        counts.drafted += drafts
        self.sequence.computed = self.end - drafts

    @property
    def in_blocks(self) -> bool:
        """Whether a prefill pattern chooses what it reads, a block of queries at a time."""
        span = self.sequence.sparse_span(self.start)
        return span is not None and span.block > 1


@dataclass(frozen=True)
class Growth:
    """One more page of text, in a ``layout`` of which all pages are alike, for some ``members`` int64 [m] of a batch,
    which have one table each: ``pages`` int32 [m] by their first units, as number ``numbers`` int64 [m] of their
    tables."""

    layout: PageLayout
    members: NDArray[np.int64]
    tables: list[BlockTable]
    numbers: NDArray[np.int64]
    pages: Pages


@dataclass
class StepPlan:
    """What one step computes. ``copies`` are (source, destination) units int32 [k, 2] of a page each, to be copied in
    order before the pass, or (source, destination, delta) int32 [k, 3], whose keys move by delta positions;
    ``stranded`` sequences are alone and still do not fit; of those ``compared`` the step finds out which tokens of
    their images are to be computed.

    ``batch`` says the same as ``chunks``, which may be missing then, where every one is a token that the device decodes
    by replay; or where it is the last of some that are verified. ``ahead``: it was planned without looking around, so
    that only the tables of the ``changed`` sequences have changed since the last step, and those that ``growth`` tells
    of. Where it is ``sparing``, nobody gives pages up for it; it is ``short`` where somebody would have to. Plans are
    made one after another, and have a ``number``."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[Units] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    stranded: list[Sequence] = field(default_factory=list)
    compared: list[Sequence] = field(default_factory=list)
    batch: DecodeBatch | None = None
    verification: Verification | None = None
    ahead: bool = False
    sparing: bool = False
    short: bool = False
    number: int = 0
    changed: list[Sequence] = field(default_factory=list)
    growth: Growth | None = None
    tokens: int = 0

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.tokens += chunk.count

    def settle(self) -> None:
        """The step is under way: its KV stands for all who come after it in the device's order. Only now has anybody
        been served, since a plan that comes to nothing must not cost them their turn."""
        for chunk in self.chunks:
            chunk.sequence.served_at = self.number
        if self.batch is not None:
            (self.verification or self.batch).settle()
            return
        for chunk in self.chunks:
            chunk.settle()

    def leave_out(self, sequence: Sequence) -> None:
        """Compute nothing of a sequence."""
        self.tokens -= sum(chunk.count for chunk in self.chunks if chunk.sequence is sequence)
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
