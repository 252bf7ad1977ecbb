"""The block tables as kernels see them: flat int32 tensors, updated by difference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.memory.block_table import BlockTable
from octavo.core.sequence import Sequence
from octavo.core.step_plan import Growth
from octavo.core.uploads import upload
from octavo.kernels.layout import packed

Entries = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Units, valid counts and places of some table entries, slice by slice."""


@dataclass(frozen=True)
class Due:
    """Packed ``entries`` int64 [n] that are still to be written at ``places`` int64 [n] of all entries: then ``tables``
    are up to date."""

    entries: NDArray[np.int64]
    places: NDArray[np.int64]
    tables: list[BlockTable]


class DeviceTables:
    """``entries`` int32 [slices of all groups, rows, entries of the longest sequence]: a row a running sequence, packed
    as in layout.py. ``unit_pos``, of one slice, says where each entry begins; None as long as no sequence needs it,
    because its pages have sealed ones among them.

    A decoded token changes one entry every ``unit_tokens`` steps, so a step writes the few entries that differ and
    never a whole row. Entries of pages that sequences have grown by are ``due``: the step that needs them may write
    them itself (``step_mail.py``).
    """

    def __init__(self, rows: int, slices: int, max_entries: int, device: torch.device) -> None:
        self._rows: dict[Sequence, int] = {}
        self._free = list(range(rows))  # a heap: rows in use stay low, for programs over the first so many rows
        self.entries = torch.zeros((slices, rows, max_entries), dtype=torch.int32, device=device)
        self.unit_pos: Tensor | None = None
        self.due: Due | None = None

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
                if self.unit_pos is not None:  # first, for it may fail
                    self.unit_pos[self._free[0]] = self._logical(sequence.layout.unit_tokens)
                self._rows[sequence] = heappop(self._free)
                for table in sequence.tables:
                    table.stale_from = 0

    def update(self, sequences: Iterable[Sequence]) -> None:
        """Write what differs in the rows of some sequences, whose tables are the only ones that have changed."""
        self.due = None  # of a step that came to nothing: its tables differ
        stale = [s for s in sequences if any(table.stale_from < table.n_pages for table in s.tables)]
        if not stale:
            return
        self._widen(max(s.layout.first_entry(s.table.n_pages) for s in stale))
        uniform = [sequence for sequence in stale if sequence.layout.uniform]
        written: list[BlockTable] = []
        changes: list[Entries] = []
        first_slice = 0
        for number in range(len(stale[0].tables)):
            slices = stale[0].tables[number].slices
            if uniform:
                changes.append(self._differences(uniform, number, first_slice))
            for sequence in stale:
                table = sequence.tables[number]
                if table.stale_from < table.n_pages:
                    written.append(table)
                    if not sequence.layout.uniform:
                        changes.append(self._difference(sequence, table, first_slice))
                        if number == 0:
                            self._write_positions(sequence)
            first_slice += slices
        units, counts, places = (np.concatenate(columns) for columns in zip(*changes, strict=True))
        self._write(Due(packed(units, counts), places, written))

    def grow(self, growth: Growth, rows: NDArray[np.int64]) -> None:
        """Let one more full page of text in each of some ``rows`` int64 [m] be due. All in front of it is up to
        date."""
        layout, tables = growth.layout, growth.tables
        assert not [t for t in tables if t.stale_from != t.n_pages - 1], "more than the last page has changed"
        width = layout.page_entries(0)
        self._widen((int(growth.numbers.max()) + 1) * width)
        places = rows * self.entries.shape[2] + growth.numbers * width
        if width > 1:
            places = (places[:, None] + np.arange(width)).ravel()
        units = tables[0].listed(growth.pages, width).ravel().astype(np.int64)
        places = self._in_slices(places, 0, tables[0].slices)
        self.due = Due(packed(units, layout.unit_tokens), places, tables)

    def write_due(self) -> None:
        """Write what is due, if anything."""
        if self.due is not None:
            self._write(self.due)

    def settle_due(self) -> None:
        """What is due is written."""
        if self.due is not None:
            for table in self.due.tables:
                table.stale_from = table.n_pages
            self.due = None

    def _write(self, due: Due) -> None:
        flat, entries = self.entries.view(-1), due.entries.astype(np.int32)
        flat.index_copy_(0, upload(due.places, flat.device), upload(entries, flat.device))
        self.due = due
        self.settle_due()  # only now: a copy that failed is made again

    def _widen(self, entries: int) -> None:
        """Room for rows of so many entries: sealed pages leave holes, so a table may be longer than its tokens."""
        missing = entries - self.entries.shape[2]
        if missing <= 0:
            return
        missing = max(missing, self.entries.shape[2] // 4)
        self.entries = torch.nn.functional.pad(self.entries, (0, missing))
        if self.unit_pos is not None:
            self.unit_pos = torch.nn.functional.pad(self.unit_pos, (0, missing))

    def _differences(self, sequences: list[Sequence], number: int, first_slice: int) -> Entries:
        """The entries that differ in table ``number`` of some sequences whose pages are all alike."""
        layout, tables = sequences[0].layout, [sequence.tables[number] for sequence in sequences]
        width, n = layout.page_entries(0), [table.n_pages - table.stale_from for table in tables]
        pages = np.concatenate([table.pages(table.stale_from) for table in tables])
        behind = np.arange(len(pages)) - np.repeat(np.cumsum(n) - n, n) + np.repeat([t.stale_from for t in tables], n)
        rows = np.repeat([self._rows[sequence] for sequence in sequences], n) * self.entries.shape[2]
        places = ((rows + behind * width)[:, None] + np.arange(width)).ravel()
        units = tables[0].listed(pages, width)  # [slices, entries]
        counts = np.where(units > 0, layout.unit_tokens, 0)
        return units.ravel().astype(np.int64), counts.ravel(), self._in_slices(places, first_slice, tables[0].slices)

    def _difference(self, sequence: Sequence, table: BlockTable, first_slice: int) -> Entries:
        """The same of a sequence with pages of several sizes."""
        layout = sequence.layout
        start, stop = layout.first_entry(table.stale_from), layout.first_entry(table.n_pages)
        units = table.entries(table.stale_from, table.n_pages, layout)
        counts = np.where(units > 0, layout.valid(layout.end_token(table.n_pages - 1))[start:], 0)
        places = self._rows[sequence] * self.entries.shape[2] + np.arange(start, stop)
        return units.ravel().astype(np.int64), counts.ravel(), self._in_slices(places, first_slice, table.slices)

    def _in_slices(self, places: NDArray[np.int64], first: int, slices: int) -> NDArray[np.int64]:
        """Places of the entries of one slice in each of several."""
        if first == 0 and slices == 1:
            return places
        stride = self.entries.shape[1] * self.entries.shape[2]
        return (np.arange(first, first + slices)[:, None] * stride + places).ravel()

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

    def rows(self, sequences: Iterable[Sequence]) -> NDArray[np.int64]:
        """Row numbers."""
        return np.array([self._rows[sequence] for sequence in sequences], np.int64)

    def close_gaps(self) -> list[tuple[int, int]]:
        """Move the last rows in use into free ones before them; what was moved, (from, to)."""
        used, free = sorted(self._rows.items(), key=lambda item: -item[1]), sorted(self._free)
        moved = [(sequence, row, to) for (sequence, row), to in zip(used, free, strict=False) if to < row]
        moves = [(row, to) for _, row, to in moved]
        if moves:
            source, target = (
                upload(np.array(side, np.int64), self.entries.device) for side in zip(*moves, strict=True)
            )
            self.entries[:, target] = self.entries[:, source]
            if self.unit_pos is not None:
                self.unit_pos[target] = self.unit_pos[source]
        for sequence, row, to in moved:  # only now: a move that failed is made again
            self._rows[sequence] = to
            self._free[self._free.index(to)] = row
        heapify(self._free)
        return moves
