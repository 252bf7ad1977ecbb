"""The block tables as kernels see them: one flat int32 tensor, updated by difference."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from octavo.core.sequence import Sequence
from octavo.kernels.layout import pack_entries


class DeviceTables:
    """``entries`` int32 [rows, units of the longest sequence]: a row a running sequence, packed as in layout.py.

    A decoded token changes one entry every ``unit_tokens`` steps, so a step writes the few entries that differ and
    never a whole row.
    """

    def __init__(self, rows: int, max_tokens: int, page_tokens: int, unit_tokens: int, device: torch.device) -> None:
        self._page_units = page_tokens // unit_tokens
        self._unit_tokens = unit_tokens
        self._offsets = np.arange(self._page_units, dtype=np.int64)
        self._rows: dict[Sequence, int] = {}
        self._free = list(range(rows))[::-1]
        width = -(-max_tokens // page_tokens) * self._page_units
        self.entries = torch.zeros((rows, width), dtype=torch.int32, device=device)

    def sync(self, running: Iterable[Sequence]) -> None:
        """Give every running sequence a row, and bring the rows up to date."""
        running = list(running)
        for sequence in self._rows.keys() - set(running):
            self._free.append(self._rows.pop(sequence))
        where, what, written = [], [], []
        for sequence in running:
            if sequence not in self._rows:
                self._rows[sequence] = self._free.pop()
                sequence.table.stale_from = 0
            table = sequence.table
            if table.stale_from == table.n_pages:
                continue
            units = table.pages(table.stale_from).astype(np.int64)[:, None] + self._offsets  # [pages, page_units]
            what.append(units.ravel())
            first = self._rows[sequence] * self.entries.shape[1] + table.stale_from * self._page_units
            where.append(np.arange(first, first + units.size))
            written.append(table)
        if where:
            device = self.entries.device
            index = torch.from_numpy(np.concatenate(where)).to(device)
            values = pack_entries(torch.from_numpy(np.concatenate(what)), self._unit_tokens).to(device)
            self.entries.view(-1).index_copy_(0, index, values)
        for table in written:  # only now: a copy that failed is made again
            table.stale_from = table.n_pages

    def rows(self, sequences: Iterable[Sequence]) -> Tensor:
        """Row numbers int64, on the device."""
        return torch.tensor([self._rows[sequence] for sequence in sequences], device=self.entries.device)
