"""Sequences of one method whose cold pages lie in the host tier: what leaves the device, and where to find it."""

from __future__ import annotations

from collections.abc import Sequence as Sequential
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.execution.captured_calls import CapturedCalls
from octavo.core.hosting.away import StepAway, Waits
from octavo.core.hosting.copies_ahead import CopiesAhead
from octavo.core.hosting.interfaces import Hosting
from octavo.core.hosting.shelf import Shelf
from octavo.core.interfaces import ModelSpec
from octavo.core.memory.digests import DigestStore
from octavo.core.memory.host_tier import HostTier
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_pool import PagePool, Pages
from octavo.core.sequence import Sequence
from octavo.core.uploads import upload
from octavo.kernels import ops
from octavo.kernels.layout import pack_entries


@dataclass(frozen=True)
class _Leaving:
    """n pages, ``first`` onwards of a row: their first units on the device, their ids in the host tier, and where their
    runs in layers that read everything go, int32 [n, W, K] in units of one layer. ``frames`` int32 [F, slices, K] are
    the row's, with the first of its pages that leave."""

    row: int
    first: int
    pages: Pages
    host_pages: list[int]
    whole: NDArray[np.int32]
    frames: NDArray[np.int32] | None


class HostedPages:
    """Lets pages of a method's sequences leave the device, and knows where they went.

    A sequence that decodes under the method, and computes nothing densely any more, *offers* its full pages, all but a
    tail. They go to the host tier, as idle pages do, and are pinned there; whoever else has the same prefix shares
    them. On the device the sequence lets go of them: they are idle, and others may have their units. What it keeps of
    them, drawn in ``Shelf``:

    - *frames*, for the runs that it reads next. What is in them is each sequence's own, also where pages are shared.
    - *whole* pages, into which the runs of layers that read every page are packed: run (layer w of W, page p) is the
      (p W + w)-th, counted over the layers of each of those pages.
    - digests, which do not move: a method chooses among pages that are away as among all others.

    Nothing is ever refused for it: where the host has no room for pages, or the device none for frames and all pages
    are shared, they stay in the pool, and the tokens are the same. A sequence that is preempted gives everything back,
    and finds its pages in the host tier by their keys when it comes again.

    Maps on the device, a row a sequence (row 0 is that of those that have nothing away)::

        count         int64 [rows]                    pages that are away
        host_units    int32 [rows, P, slices, K]      where a page lies in the host's pool
        frame_units   int32 [rows, F, slices, K]      where a frame lies in the device's
        whole_entries int32 [rows, W, P K]            where the runs of layers that read everything lie
        digest_rows   int64 [rows, P]                 of the digest store, which has a row for every unit of both pools

    They change when pages leave, every ``page_tokens`` steps; a step gathers its rows of them.
    """

    def __init__(
        self,
        hosting: Hosting,
        spec: ModelSpec,
        kv: Tensor,
        plan: LayerPlan,
        pool: PagePool,
        host: HostTier,
        page_tokens: int,
        backend: str,
        digests: DigestStore | None,
    ) -> None:
        self._hosting = hosting
        self._kv = kv
        self._plan = plan
        self._pool = pool
        self._host = host
        self._page_tokens = page_tokens
        self._backend = backend
        self._digests = digests
        self._group = plan.groups[0]
        self._page_units = page_tokens // kv.shape[4]
        self._size = self._page_units * self._group.slices
        self._whole_at = [plan.places[layer] for layer in hosting.whole_layers]
        self.sets = hosting.sets(len(self._group.layers), spec.kv_heads, kv.device)
        self._leaving: list[_Leaving] = []
        self._digested: dict[int, int] = {}  # host page -> serial of the page whose digest is in the store
        self._waits = Waits(kv.device)
        self._calls = CapturedCalls(kv.device)
        self._ahead = CopiesAhead(kv.device)
        self._closed = False
        slices, units = self._group.slices, self._page_units
        self.count = self._zeros(1, dtype=torch.int64)
        self.host_units = self._zeros(1, 0, slices, units)
        self.frame_units = self._zeros(1, hosting.frames, slices, units)
        self.whole_entries = self._zeros(1, len(self._whole_at), 0)
        self.digest_rows = self._zeros(1, 0, dtype=torch.int64)
        self.wait_s = 0.0

    def offer(self, sequence: Sequence) -> None:
        """Let full pages of a sequence that decodes under the method leave, if there is room for them, and if that
        frees more than it takes. They are copied by the next ``carry_out``, before which nothing may write to the
        device.

        1. The host tier takes them, from the first on, as far as it has room.
        2. The frames, which come with the first page, and more whole pages are taken from the pool; where it has no
           room, they are pages that leave and that nobody else holds.
        3. The block table lets go of them. What is held behind them does not need them any longer.
        """
        first = sequence.away
        shelf, last = sequence.shelf, min(sequence.computed // self._page_tokens, len(sequence.nodes))
        last -= self._hosting.tail
        if last <= first or self._host.restoring:  # what is being restored is not on the device yet
            return
        if shelf is None and last <= self._hosting.frames + self._whole_pages(last):
            return
        taken = self._take_in(sequence, first, last)
        last = first + len(taken)
        frames = self._hosting.frames if shelf is None else 0
        worth = len(taken) > (0 if shelf is not None else frames + self._whole_pages(last))
        held = 0 if shelf is None else shelf.whole.n_pages
        got = self._room(sequence, first, last, frames + self._whole_pages(last) - held) if worth else None
        if got is None:
            self._unpin(taken)
            return
        try:
            self._widen(last)
            shelf = self._open() if shelf is None else shelf
        except BaseException:  # the device has no room for maps
            self._pool.release(got)
            self._unpin(taken)
            raise
        sequence.shelf = shelf
        shelf.frames.append(got[:frames])
        shelf.whole.append(got[frames:])
        shelf.pages += taken
        self._leave(sequence, shelf, first, last)

    def settle(self) -> None:
        """Nobody copies to frames any longer that were given back. To be called before anything is written to the
        device's pool."""
        if self._closed:
            self._ahead.wait_all()
        self._closed = False

    def carry_out(self) -> None:
        """Copy what the device keeps of the pages that are leaving, and enter them into the maps. To be called after
        the host tier has copied its part, before anything is written to the device's pool.

        In the order of the offers: what one lets go of may be another's frame already."""
        for leaving in self._leaving:
            where = leaving.row, slice(leaving.first, leaving.first + len(leaving.pages))
            if leaving.frames is not None:
                self._set(self.frame_units, (leaving.row,), leaving.frames)
            if self._digests is not None:  # first: where the pages are, runs and frames may be soon
                self._keep_digests(leaving)
                rows = np.array(leaving.host_pages, np.int64) + self._digests.host_rows
                self._set(self.digest_rows, where, rows)
            units = np.stack([self._host.units_of(page) for page in leaving.host_pages])
            units = units.reshape(-1, self._group.slices, self._page_units)
            self._set(self.host_units, where, units)
            if self._whole_at:
                self._keep_whole(leaving, units)
            self.count[leaving.row] = where[1].stop
        self._leaving = []

    def step(self, sequences: Sequential[Sequence], entries: int) -> StepAway | None:
        """What a step over these sequences, with tables of so many entries, reads of pages that are away; None if none
        are."""
        numbers = [0 if s.shelf is None else s.shelf.row for s in sequences]
        if not any(numbers):
            return None
        pages = -(-entries // self._page_units)
        self._widen(pages)
        rows = upload(np.array(numbers, np.int64), self._kv.device)
        return StepAway(
            kv=self._kv,
            host_kv=self._host.kv,
            plan=self._plan,
            backend=self._backend,
            sets=self.sets,
            rows=rows,
            count=self.count[rows],
            host_units=self.host_units[rows],
            frame_units=self.frame_units[rows],
            whole_entries=self.whole_entries[rows, :, :entries],
            whole_layers=self._hosting.whole_layers,
            digest_rows=self.digest_rows[rows, :pages],
            waits=self._waits,
            calls=self._calls,
            ahead=self._ahead,
            foresees=self._hosting.foresees,
        )

    def account(self, away: StepAway, sequences: Sequential[Sequence]) -> None:
        """Add what a step read from the host to its sequences. The device has computed the step."""
        unit = self._kv.shape[4] * self._kv.shape[5] * self._kv.element_size()
        counts = [away.lookups, away.misses, away.fetched, away.prefetched, away.prefetched_read]
        for sequence, lookups, misses, fetched, prefetched, read in zip(
            sequences, *torch.stack(counts).tolist(), strict=True
        ):
            sequence.resident_lookups += lookups
            sequence.resident_misses += misses
            sequence.pages_prefetched += prefetched
            sequence.prefetched_read += read
            sequence.host_bytes_read += (fetched + prefetched) * 2 * self._page_units * unit
        self.wait_s += self._waits.take()

    def forget(self, sequence: Sequence) -> None:
        """A step over a sequence has failed. Pages that it gave frames to have not come, perhaps, so all of them are
        fetched again."""
        if sequence.shelf is not None:
            self.sets.forget(sequence.shelf.row)
        self._waits.forget()
        self._closed = True  # copies ahead may be under way to frames that are empty now

    def check(self, sequences: Sequential[Sequence]) -> None:
        """Of each sequence: what is away is where the maps say, or is about to be entered into them."""
        waiting = {leaving.row for leaving in self._leaving}
        rows = [s.shelf.row for s in sequences if s.shelf is not None]
        if len(set(rows)) != len(rows):
            raise AssertionError(f"rows {rows} of resident maps are used twice")
        for sequence in sequences:
            shelf = sequence.shelf
            if shelf is None:
                continue
            name, away = sequence.request.request_id, len(shelf.pages)
            if sequence.table.first_page != away or away + self._hosting.tail > sequence.computed // self._page_tokens:
                raise AssertionError(
                    f"{name!r} has {away} pages away, and holds those from {sequence.table.first_page}"
                )
            if (shelf.frames.n_pages, shelf.whole.n_pages) != (self._hosting.frames, self._whole_pages(away)):
                raise AssertionError(f"{name!r} has {shelf.frames.n_pages} frames, {shelf.whole.n_pages} whole pages")
            for page, node in zip(shelf.pages, sequence.nodes, strict=False):
                if node.host[0] != page:
                    raise AssertionError(f"host page {page} of {name!r} is another prefix's")
            if shelf.row in waiting:
                continue
            self.sets.check(shelf.row, away)
            listed = np.stack([self._host.units_of(page) for page in shelf.pages])
            known = self.host_units[shelf.row, :away].cpu().numpy().reshape(away, -1)
            if int(self.count[shelf.row]) != away or not np.array_equal(known, listed):
                raise AssertionError(f"the maps of {name!r} do not say where its {away} pages are")

    def _take_in(self, sequence: Sequence, first: int, last: int) -> list[int]:
        """Pin pages in the host tier, from ``first`` on, until it has no room; their ids there."""
        taken: list[int] = []
        units = self._units(sequence.table.pages(first, last)).reshape(last - first, -1)
        for page, node in zip(units, sequence.nodes[first:last], strict=True):
            if not node.host[0] and not self._host.store(page, node, 0):
                break
            taken.append(node.host[0])
            self._host.pin(node.host[0])
        return taken

    def _unpin(self, taken: list[int]) -> None:
        for page in reversed(taken):
            self._host.unpin(page)

    def _open(self) -> Shelf:
        row = self.sets.open()
        try:
            for name in ("count", "host_units", "frame_units", "whole_entries", "digest_rows"):
                tensor = getattr(self, name)
                if missing := max(0, row + 1 - len(tensor)):
                    setattr(self, name, torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))]))
        except BaseException:
            self.sets.close(row)
            raise
        return Shelf(self._host, self._pool, self._group.slices, row, self._close)

    def _close(self, row: int) -> None:
        self.sets.close(row)
        self.count[row] = 0
        self._leaving = [leaving for leaving in self._leaving if leaving.row != row]
        self._closed = True

    def _room(self, sequence: Sequence, first: int, last: int, wanted: int) -> Pages | None:
        """So many pages of the device, with a reference each; None if there are none. Of pages ``first`` to ``last`` of
        the sequence those serve that nobody else holds: they are in the host tier."""
        self._pool.prepare(wanted * self._size)
        if wanted * self._size <= self._pool.available:
            return self._pool.allocate(wanted, self._size)
        table = sequence.table
        own = [page for at, page in enumerate(table.pages(first, last).tolist(), first) if not table.copy_needed(at)]
        if len(own) < wanted:
            return None
        pages = np.array(own[:wanted], np.int32)
        self._pool.withdraw(pages)
        self._pool.retain(pages)
        return pages

    def _leave(self, sequence: Sequence, shelf: Shelf, first: int, last: int) -> None:
        pages, host_pages = sequence.table.pages(first, last).copy(), shelf.pages[first:last]
        layers, wide = self._kv.shape[1], len(self._whole_at)
        index = np.arange(first, last)[:, None] * wide + np.arange(wide)  # [n, W]
        page, at = np.divmod(index, layers * self._group.slices)
        units = self._units(shelf.whole.pages())
        whole = units[page, at // layers] * layers + (at % layers)[..., None] if wide else units[:0]
        frames = None if first else self._units(shelf.frames.pages())
        self._leaving.append(_Leaving(shelf.row, first, pages, host_pages, whole.astype(np.int32), frames))
        sequence.table.drop_before(last)
        self._pool.unchain(sequence.table.held)

    def _keep_digests(self, leaving: _Leaving) -> None:
        assert self._digests is not None
        new = [
            (device, host)
            for device, host in zip(leaving.pages.tolist(), leaving.host_pages, strict=True)
            if self._digested.get(host) != self._host.serial(host)
        ]
        if new:
            device, host = (np.array(side, np.int32) for side in zip(*new, strict=True))
            self._digests.keep(device, host)
            self._digested.update({page: self._host.serial(page) for page in host.tolist()})

    def _keep_whole(self, leaving: _Leaving, host_units: NDArray[np.int32]) -> None:
        """Bring the runs of layers that read everything to their places, from ``host_units`` int32 [n, slices, K]."""
        unit_layers = np.array([place.unit_layer for place in self._whole_at], np.int32)
        source = host_units[:, [place.slice for place in self._whole_at]]  # the first group's slices come first
        source = source * self._kv.shape[1] + unit_layers[:, None]  # [n, W, K]
        pairs = np.stack([source, leaving.whole], -1).reshape(-1, 2)
        one_layer = (-1, 1, *self._kv.shape[2:])
        ops.transfer(
            self._host.kv.view(one_layer), self._kv.view(one_layer), upload(pairs, self._kv.device), self._backend
        )
        entries = slice(leaving.first * self._page_units, (leaving.first + len(leaving.pages)) * self._page_units)
        self.whole_entries[leaving.row, :, entries] = self._packed(leaving.whole)

    def _whole_pages(self, pages: int) -> int:
        """Device pages into which the runs of ``pages`` pages in layers that read everything are packed."""
        return -(-pages * len(self._whole_at) // len(self._group.layers))

    def _units(self, pages: Pages) -> NDArray[np.int32]:
        """int32 [n, slices, K]"""
        return self._pool.units_of(pages, self._size).reshape(len(pages), self._group.slices, self._page_units)

    def _packed(self, targets: NDArray[np.int32]) -> Tensor:
        """Entries int32 [W, n K] of whole runs [n, W, K]."""
        units = upload(np.ascontiguousarray(targets.transpose(1, 0, 2).reshape(targets.shape[1], -1)), self._kv.device)
        return pack_entries(units, self._kv.shape[4])

    def _widen(self, pages: int) -> None:
        """Room for pages 0 to ``pages`` (exclusive) in every row."""
        missing = pages - self.digest_rows.shape[1]
        if missing <= 0:
            return
        missing = max(missing, pages // 4)
        self.sets.widen(self.digest_rows.shape[1] + missing)
        self.host_units = torch.nn.functional.pad(self.host_units, (0, 0, 0, 0, 0, missing))
        self.whole_entries = torch.nn.functional.pad(self.whole_entries, (0, missing * self._page_units))
        self.digest_rows = torch.nn.functional.pad(self.digest_rows, (0, missing))  # the last: its width is that of all

    def _set(self, tensor: Tensor, where: tuple[int | slice, ...], values: NDArray[np.integer]) -> None:
        tensor[where] = upload(np.ascontiguousarray(values), tensor.device)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._kv.device)
