"""Pages of the device into which a sequence's steps recall pages of images."""

from __future__ import annotations

import numpy as np

from octavo.core.compression.recallable import Recallable
from octavo.core.execution.captured_calls import CapturedCalls
from octavo.core.hosting.copies_ahead import CopiesAhead
from octavo.core.memory.block_table import BlockTable
from octavo.core.memory.page_pool import PagePool
from octavo.core.uploads import upload


class Frames:
    """F frames of as many units as the largest page has. Run (layer, KV head) of a frame holds that run of any page,
    another one for another head. A sequence's own, also where forks share what can be recalled: what is in them depends
    on what its steps asked for.

    Attributes:
        table: holds them.
        units: int32 [1, F, slices, U], where they are.
        sets, rows: which page is in which frame.
        calls: replays what a step asks of the maps.
        ahead: copies beside the model's work, of which there are none.
    """

    def __init__(self, recallable: Recallable, pool: PagePool, slices: int) -> None:
        """Precondition: ``recallable.frame_units(slices)`` are available."""
        count, device = recallable.frames, recallable.valid.device
        layers, heads, pages = recallable.is_kept.shape
        self.table = BlockTable(pool, slices)
        self.sets = recallable.recall.sets(count, layers, heads, device)
        row = self.sets.open()
        self.sets.widen(pages)
        self.rows = upload(np.array([row], np.int64), device)
        self.calls = CapturedCalls(device)
        self.ahead = CopiesAhead(device)
        self._pages = pages
        self.table.append(pool.allocate(count, recallable.units * slices))
        units = pool.units_of(self.table.pages(), recallable.units * slices)
        try:
            self.units = upload(np.ascontiguousarray(units.reshape(1, count, slices, recallable.units)), device)
        except BaseException:  # nobody holds them yet
            self.table.release()
            raise

    def forget(self) -> None:
        """What was about to come has not, perhaps."""
        self.sets.forget(int(self.rows))

    def check(self) -> None:
        """Raises AssertionError where the maps disagree."""
        self.sets.check(int(self.rows), self._pages)
