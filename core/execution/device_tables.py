"""The block tables as kernels see them: flat int32 tensors, updated by difference."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.memory.block_table import BlockTable
from octavo.core.sequence import Sequence
from octavo.core.uploads import upload
from octavo.kernels.layout import pack_entries


class DeviceTables:
    """``entries`` int32 [slices of all groups, rows, entries of the longest sequence]: a row a running sequence, packed
    as in layout.py. ``unit_pos``, of one slice, says where each entry begins; None as long as no sequence needs it,
    because its pages have sealed ones among them.

    A decoded token changes one entry every ``unit_tokens`` steps, so a step writes the few entries that differ and
    never a whole row.
    """

    def __init__(self, rows: int, slices: int, max_entries: int, device: torch.device) -> None:
        self._rows: dict[Sequence, int] = {}
        self._free = list(range(rows))  # a heap: rows in use stay low, for programs over the first so many rows
        self.entries = torch.zeros((slices, rows, max_entries), dtype=torch.int32, device=device)
        self.unit_pos: Tensor | None = None

    def sync(self, running: Iterable[Sequence]) -> None:
        """Give every running sequence a row, and bring the rows up to date."""
        running = list(running)
        self._seat(running)
        self.update(running)

    def _seat(self, running: list[Sequence]) -> None:
        for sequence in self._rows.keys() - set(running):
            heappush(self._free, self._rows.pop(sequence))
        for sequence in running:
            if sequence not in self._rows:
                self._rows[sequence] = heappop(self._free)
                if self.unit_pos is not None:
                    self.unit_pos[self._rows[sequence]] = self._logical(sequence.layout.unit_tokens)
                for table in sequence.tables:
                    table.stale_from = 0

    def update(self, sequences: Iterable[Sequence]) -> None:
        """Write what differs in the rows of some sequences, whose tables are the only ones that have changed."""
        stale = [s for s in sequences if any(table.stale_from < table.n_pages for table in s.tables)]
        what: list[NDArray[np.int64]] = []
        valid: list[NDArray[np.int32]] = []
        where: list[NDArray[np.int64]] = []
        written = []
        self._widen(max((s.layout.first_entry(s.table.n_pages) for s in stale), default=0))
        for sequence in stale:
            first_slice = 0
            for number, table in enumerate(sequence.tables):
                if table.stale_from < table.n_pages:
                    units, counts, at = self._difference(sequence, table, first_slice)
                    what.append(units)
                    valid.append(counts)
                    where.append(at)
                    written.append(table)
                    if number == 0 and not sequence.layout.uniform:
                        self._write_positions(sequence)
                first_slice += table.slices
        if where:
            values = pack_entries(torch.from_numpy(np.concatenate(what)), torch.from_numpy(np.concatenate(valid)))
            device = self.entries.device
            index = upload(np.concatenate(where), device)
            self.entries.view(-1).index_copy_(0, index, upload(values.numpy(), device))
        for table in written:  # only now: a copy that failed is made again
            table.stale_from = table.n_pages

    def _widen(self, entries: int) -> None:
        """Room for rows of so many entries: sealed pages leave holes, so a table may be longer than its tokens."""
        missing = entries - self.entries.shape[2]
        if missing <= 0:
            return
        missing = max(missing, self.entries.shape[2] // 4)
        self.entries = torch.nn.functional.pad(self.entries, (0, missing))
        if self.unit_pos is not None:
            self.unit_pos = torch.nn.functional.pad(self.unit_pos, (0, missing))

    def _difference(
        self, sequence: Sequence, table: BlockTable, first_slice: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
        """Units, valid counts and places of the entries that differ, each of ``slices * n``."""
        layout, table_shape = sequence.layout, self.entries.shape
        start, stop = layout.first_entry(table.stale_from), layout.first_entry(table.n_pages)
        units = table.entries(table.stale_from, table.n_pages, layout)  # [slices, n]
        if layout.uniform:
            counts = np.full(stop - start, layout.unit_tokens, np.int32)
        else:
            counts = layout.valid(layout.end_token(table.n_pages - 1))[start:]
        row = self._rows[sequence] * table_shape[2] + np.arange(start, stop)
        slices = np.arange(first_slice, first_slice + table.slices)[:, None] * (table_shape[1] * table_shape[2])
        counts = np.where(units > 0, counts, 0)
        return units.ravel().astype(np.int64), counts.ravel(), (slices + row).ravel()

    def _write_positions(self, sequence: Sequence) -> None:
        layout, table = sequence.layout, sequence.table
        if self.unit_pos is None:
            self.unit_pos = self._logical(layout.unit_tokens).expand(self.entries.shape[1], -1).contiguous()
        start = layout.first_entry(table.stale_from)
        positions = torch.from_numpy(layout.unit_pos(layout.end_token(table.n_pages - 1))[start:])
        row = self.unit_pos[self._rows[sequence]]
        row[start : start + len(positions)] = positions.to(row.device)

    def _logical(self, unit_tokens: int) -> Tensor:
        """Positions of entries that are stored in logical order without holes."""
        return torch.arange(self.entries.shape[2], dtype=torch.int32, device=self.entries.device) * unit_tokens

    def row(self, sequence: Sequence) -> int:
        return self._rows[sequence]

    def rows(self, sequences: Iterable[Sequence]) -> Tensor:
        """Row numbers int64, on the device."""
        return upload(np.array([self._rows[sequence] for sequence in sequences], np.int64), self.entries.device)

    def close_gaps(self) -> list[tuple[int, int]]:
        """Move the last rows in use into free ones before them; what was moved, (from, to)."""
        moves = []
        for sequence, row in sorted(self._rows.items(), key=lambda item: -item[1]):
            if not self._free or self._free[0] > row:
                break
            self._rows[sequence] = heappop(self._free)
            heappush(self._free, row)
            moves.append((row, self._rows[sequence]))
        if moves:
            source, target = (
                upload(np.array(side, np.int64), self.entries.device) for side in zip(*moves, strict=True)
            )
            self.entries[:, target] = self.entries[:, source]
            if self.unit_pos is not None:
                self.unit_pos[target] = self.unit_pos[source]
        return moves
