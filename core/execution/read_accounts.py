"""What decoding has read: bytes of K and V, and of what is read to choose them, added up by sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Sequential

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.costs import Count, dense_units
from octavo.core.execution.attention import PagedStep
from octavo.core.execution.decode_batch import DecodeBatch
from octavo.core.execution.flight import Flight
from octavo.core.hosting.hosted_pages import HostedPages
from octavo.core.sequence import Sequence
from octavo.core.step_plan import Chunk

MOST_LANDED = 256
"""Replayed steps that are summed up together."""


class ReadAccounts:
    """Adds to ``Sequence.decode_steps``, ``kv_bytes_read`` and ``digest_bytes_read`` for tokens behind the prompt. What
    replayed steps read is added when the next ones are of others, and with ``settle``.

    ``bytes_spared`` are those that decoding has read less, over all layers and KV heads, than the tables that its
    kernels were given list, because a run that several tables share was read once.

    Args:
        kv: the pool ``[units, layers, 2, kv_heads, unit_tokens, head_dim]``.
        windows: of the model's layers (0: none).
    """

    def __init__(self, kv: Tensor, windows: Sequential[int], page_tokens: int) -> None:
        self._kv = kv
        self._windows = Counter(windows)
        self._page_tokens = page_tokens
        self._itemsize = kv.element_size()
        self._unit_tokens = kv.shape[4]
        self._head_bytes = 2 * kv.shape[5] * self._itemsize  # of a token in one layer and KV head
        self._row_bytes = self._head_bytes * kv.shape[3]  # of a token in one layer
        self.bytes_spared = 0
        self._sequences: list[Sequence] = []
        self._landed: list[tuple[DecodeBatch, NDArray[np.int64] | None]] = []

    def flight(self, flight: Flight, read: NDArray[np.int64]) -> None:
        """A replayed step. Under methods ``read`` int64 [2, rows] is what its kernels have counted: table entries, and
        elements read to choose them."""
        batch = flight.batch
        if batch.sequences is not self._sequences or len(self._landed) == MOST_LANDED:
            self.settle()
            self._sequences = batch.sequences
        self._landed.append((batch, read[:, flight.rows] if len(read) else None))

    def settle(self) -> None:
        """Tell the sequences of replayed steps what they have read: whole tables, in closed form, or what was counted.
        Those that have ended were told before they did."""
        landed, self._landed = self._landed, []
        if not landed:
            return
        first, starts = landed[0][0], np.stack([batch.starts for batch, _ in landed])  # [steps, n]
        counts = starts >= first.prompts
        kv, digests = self._whole(starts + 1), np.zeros_like(starts)
        for step, (_, read) in enumerate(landed):
            if read is not None:
                kv[step] = read[0] * self._unit_tokens * self._head_bytes
                digests[step] = read[1] * self._itemsize
        sums = ((column * counts).sum(0).tolist() for column in (~first.drafting, kv, digests))
        for sequence, steps, kv_bytes, digest_bytes in zip(self._sequences, *sums, strict=True):
            if sequence.finish_reason is None:
                sequence.decode_steps += steps
                sequence.kv_bytes_read += kv_bytes
                sequence.digest_bytes_read += digest_bytes

    def step(self, step: PagedStep, chunks: list[Chunk], hosted: Mapping[str, HostedPages]) -> None:
        """An eager step: what each decoded token read, what verified drafts did, and blocks of a prompt's queries."""
        unit_bytes = self._unit_tokens * self._head_bytes
        for group in step.decodes:
            self.bytes_spared += group.units_spared(self._kv) * unit_bytes
            read = group.units_read(self._kv).tolist()
            scoring = [0] * len(read) if group.pages is None else group.pages.elements_read.tolist()
            for chunk, units, elements in zip(chunks[group.start : group.stop], read, scoring, strict=True):
                sequence = chunk.sequence
                if chunk.start < len(sequence.request.prompt):
                    continue
                sequence.decode_steps += not chunk.draft
                sequence.kv_bytes_read += units * unit_bytes
                sequence.digest_bytes_read += elements * self._itemsize
            if group.recall is not None:
                group.recall.account()
            if group.pages is not None and group.pages.away is not None and group.method is not None:
                sequences = [chunk.sequence for chunk in chunks[group.start : group.stop]]
                hosted[group.method.provenance].account(group.pages.away, sequences)
                if group.foresees:
                    for sequence, elements in zip(sequences, group.pages.elements_read_ahead.tolist(), strict=True):
                        sequence.prefetch_scoring_bytes_read += elements * self._itemsize
        for chunk in chunks:
            if chunk.verifies:
                chunk.sequence.kv_bytes_read += self._whole(chunk.end, chunk.count)
        in_blocks = [chunk.sequence for chunk in chunks if chunk.count > 1 and chunk.in_blocks]
        for blocks, sequence in zip(step.blocks, in_blocks, strict=True):
            sequence.prefill_bytes_read += blocks.pages_read * self._page_tokens * self._head_bytes
            sequence.prefill_scoring_bytes_read += blocks.blocks.elements_read * self._itemsize

    def verified(self, ends: NDArray[np.int64], queries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of K and V int64 [n] that replayed chunks of so many queries have read, each up to token ``ends``
        (exclusive)."""
        return self._whole(ends, queries)

    def spared(self, slots: int) -> None:
        """A replayed step has spared so many slots in each layer without a window."""
        self.bytes_spared += self._windows[0] * slots * self._row_bytes

    def _whole(self, ends: Count, queries: Count | int = 1) -> Count:
        """Bytes of the units that so many queries see, the last of which are at ``ends - 1``, in all layers."""
        units = 0 * ends
        for window, layers in self._windows.items():
            units += layers * dense_units(ends, window and window + queries - 1, self._unit_tokens)
        return units * self._unit_tokens * self._row_bytes
