"""What is left of a sequence's tokens, in every layer and KV head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from octavo.core.compression.recallable import Recallable
from octavo.core.compression.split_units import Slabs, SplitUnits
from octavo.core.memory.page_pool import Units


class Point(NamedTuple):
    """A sequence is compressed when ``at`` of its tokens are computed, with the queries of the last ``window`` of them
    at hand."""

    at: int
    window: int


@dataclass(eq=False)
class KeptSet:
    """The tokens before ``end``, the beginning of a page, that a sequence still sees; from there on its tables go on as
    ever::

        layer 0, head 0   [ 0-15 | 40.. 91- ]             [ end ... | ... tokens since ]
                 head 1   [ 0-15 | 16-31 | 70.. | 91- ]   [ end ... | ... tokens since ]
                            ^ entries, each a run           ^ units of the block tables, for all heads alike

    It never changes: a fork holds the same one, and a later compression makes another.

    Attributes:
        entries: int32 [L, Hkv, M] for the L layers of the first group, packed as in layout.py, with slabs for units.
        counts: int32 [L, Hkv] of them that are meant.
        positions: int64 [L, Hkv, n] of the tokens, ascending, -1 behind the last.
        carry: fp32 [L, Hkv, n], what the compressor has left for itself.
        tokens: of the head that keeps most, for each layer.
        digests: of the pages that the tokens make, [L, Hkv, P, ...] by part, if a method chooses among them.
        slabs: by head, the slabs whose runs it uses; None: entries are of the sequence's own pages.
        recallable: what decode steps may ask back of what is not kept.
        holders: sequences that hold it.
    """

    end: int
    entries: Tensor
    counts: Tensor
    positions: Tensor
    carry: Tensor | None
    slabs: list[Slabs] | None
    split: SplitUnits
    tokens: Sequence[int]
    digests: Mapping[str, Tensor]
    recallable: Recallable | None = None
    holders: int = field(default=1)

    @property
    def units(self) -> Units:
        """The split units that it has runs in."""
        if self.slabs is None:
            return np.empty(0, np.int32)
        return np.unique(np.concatenate(self.slabs) // self.split.unit_layers).astype(np.int32)

    def share(self) -> KeptSet:
        self.holders += 1
        return self

    def release(self) -> None:
        """One holder less; with the last one its runs are free, and nothing is asked back any more."""
        self.holders -= 1
        if self.holders == 0 and self.slabs is not None:
            self.split.release(self.slabs)
        if self.holders == 0 and self.recallable is not None:
            self.recallable.release()
