"""What one live sequence has in the host tier, and on the device in its place."""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.memory.block_table import BlockTable
from octavo.core.memory.host_tier import HostTier
from octavo.core.memory.page_pool import PagePool


class Shelf:
    """The first pages of a sequence are *away*: in the host tier, and nowhere else that lasts.

    ::

        logical page   0   1   2   3   4   5   6
        block table    .   .   .   .   .  [5] [6]    holes, as behind a window; the tail stays
        pages          a   b   c   d   e             pages of the host tier, pinned while the sequence lives
        frames        [F] [F] [F]                    device pages: run (layer, KV head) of a frame holds that run of any
                                                     page that is away, another one for another head
        whole         [W]                            device pages: the runs of layers that read every page, packed

    Attributes:
        row: of the maps that say what the frames hold (``octavo.core.hosting.hosted_pages``).
        pages: host page of each logical page that is away, in order.
    """

    def __init__(
        self, host: HostTier, pool: PagePool, slices: int, row: int, on_release: Callable[[int], None]
    ) -> None:
        self.row = row
        self.pages: list[int] = []
        self.frames = BlockTable(pool, slices)
        self.whole = BlockTable(pool, slices)
        self._host = host
        self._on_release = on_release

    @property
    def tables(self) -> list[BlockTable]:
        return [self.frames, self.whole]

    def release(self) -> None:
        """Give everything back. The host's pages stay findable, until others need their room."""
        for page in reversed(self.pages):
            self._host.unpin(page)
        for table in self.tables:
            table.release()
        self.pages = []
        self._on_release(self.row)
