"""Copies of pages that plans ask for, carried out before the forward pass that relies on them."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from octavo.core.execution.rotary import Rotary
from octavo.core.memory.page_pool import Units
from octavo.core.uploads import upload
from octavo.kernels import ops


class PageCopies:
    """A queue: the tables say already that its copies are made, so whatever fails, they will be. ``made`` counts those
    on write, ``pending`` are the others to come: pairs of units (source, destination), or with the delta of positions
    by which keys turn on the way."""

    def __init__(self, kv: Tensor, backend: str) -> None:
        self._kv = kv
        self._backend = backend
        self.pending: list[Units] = []
        self.made = 0

    def queue(self, copies: list[Units]) -> None:
        self.pending += copies

    def carry_out(self, rotary: Rotary | None) -> None:
        """Make the copies in order; those that do not depend on one another go in one launch."""
        while self.pending:
            written: set[int] = set()
            read: set[int] = set()
            batch = []
            for pairs in self.pending:
                sources, targets = set(pairs[:, 0].tolist()), set(pairs[:, 1].tolist())
                if sources & written or targets & (written | read):
                    break
                batch.append(pairs)
                read |= sources
                written |= targets
            self._copy(batch, rotary)
            self.made += sum(pairs.shape[1] == 2 for pairs in batch)
            del self.pending[: len(batch)]

    def _copy(self, batch: list[Units], rotary: Rotary | None) -> None:
        pairs = upload(np.concatenate([each[:, :2] for each in batch]), self._kv.device)
        if all(each.shape[1] == 2 for each in batch):
            ops.copy_units(self._kv, pairs, self._backend)
            return
        assert rotary is not None, "images are reused, and nobody asked how keys turn"
        deltas = np.concatenate([each[:, 2] if each.shape[1] == 3 else np.zeros(len(each), np.int32) for each in batch])
        ops.rotate_keys(
            self._kv, pairs, upload(deltas, self._kv.device), rotary.inv_freq, rotary.kinds, 0, self._kv.shape[1],
            rotary.interleaved, self._backend,
        )  # fmt: skip
