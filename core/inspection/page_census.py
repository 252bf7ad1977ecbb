"""What every unit of a pool is used for at one moment: the read-only walk behind page maps and block statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.core.memory.page_pool import PagePool, Pages, Units

if TYPE_CHECKING:
    from octavo.core.engine import Engine
    from octavo.core.memory.host_tier import HostTier, _HostPage
    from octavo.core.memory.page_layout import PageLayout
    from octavo.core.memory.prefix_cache import Node
    from octavo.core.sequence import Sequence

FREE, CACHED, HELD, SHARED, IMAGE, HOST, ABSENT = range(7)
STATES = ("free", "cached", "held", "shared", "image", "host", "absent")
"""Names of the states, each at its number. A unit that a block table lists is *held*, *shared* if several tables list
it, and *image* if it is part of an image's page and not shared; *host* units are those of the host tier that hold a
page; *absent* ones a growing pool does not have yet."""

CELL = np.dtype([("page", "<i4"), ("request", "<u2"), ("state", "u1"), ("tokens", "u1")])
"""One unit: the first unit of its page, the request that it is for (see ``PageCensus.requests``; 0: nobody known), its
state, and the tokens whose KV is in it. All zero is a free unit. Eight bytes, so two cells compare as one int64."""

Cells = NDArray[np.void]

MAX_REQUESTS = (1 << 16) - 1


class PageCensus:
    """The units of an engine's pool and host tier, as they were at the last ``take``. Safe between steps; changes
    nothing.

    ::

        cells   0       | 1 ... device_units | device_units + 1 ... units
                scratch | the device's pool  | the host tier: its unit u is unit device_units + u here

    Attributes:
        cells: CELL [1 + units], as drawn.
        tables: block tables that list each unit, int32 [1 + units].
        slices: units a table entry of the page that begins here has, int32 [1 + units]; kept while it is cached.
        requests: request ids; a cell's request r > 0 is ``requests[r - 1]``. From the 65,535th on they share the last.
    """

    def __init__(self) -> None:
        self.cells: Cells = np.zeros(0, CELL)
        self.tables = np.zeros(0, np.int32)
        self.slices = np.zeros(0, np.int32)
        self.requests: list[str] = []
        self._numbers: dict[str, int] = {}
        self._generation = np.zeros(0, np.int64)
        self._in_host: dict[int, _HostPage] = {}

    def take(self, engine: Engine) -> Cells:
        """Look at every unit, and give ``cells``, a new array.

        A held unit belongs to the earliest request whose table lists it. A cached one goes on belonging to the request
        that held it when it was last looked at; whose it was is not known if that was never.
        """
        pool, scheduler, host = engine._pool, engine._scheduler, engine._host
        units = 1 + pool.most_units + (0 if host is None else host.units_total)
        if len(self.cells) != units:
            self.cells, self.slices = np.zeros(units, CELL), np.ones(units, np.int32)
            self._generation = np.zeros(1 + pool.most_units, np.int64)
        self.tables = np.zeros(units, np.int32)
        cells = np.zeros(units, CELL)
        cells["state"][1 + pool.total_units : 1 + pool.most_units] = ABSENT
        if host is not None:
            self._mark_host(cells, engine, host)
        self._mark_cached(cells, engine)
        holders = [*scheduler.running, *scheduler.parked]
        for sequence in sorted(holders, key=lambda s: s.request.arrival, reverse=True):
            self._mark_held(cells, sequence)
            self._mark_kept(cells, sequence)
            self._mark_frames(cells, sequence, pool)
        cells["state"][self.tables > 1] = SHARED
        self.cells, self._generation = cells, pool.generation.copy()
        return cells

    def _mark_held(self, cells: Cells, sequence: Sequence) -> None:
        """Write what a sequence's tables list over what is there."""
        layout = sequence.layout
        tokens = _tokens(layout, sequence.computed, layout.first_entry(sequence.table.n_pages))
        for table in sequence.tables:
            units = table.entries(0, table.n_pages, layout)  # [slices, entries]
            first = layout.first_entry(table.first_page)  # in front of it there are holes
            listed = np.empty(units.shape[1], CELL)
            listed["page"] = np.repeat(table.pages(), _page_entries(layout, table.n_pages))
            listed["request"] = self._number(sequence.request.request_id)
            listed["state"] = HELD
            if not layout.uniform:
                images = np.array([layout.kind(page) == "image" for page in range(table.n_pages)], bool)
                listed["state"][np.repeat(images, _page_entries(layout, table.n_pages))] = IMAGE
            listed["tokens"] = tokens
            cells[units[:, first:]] = listed[first:]
            self.tables[units[:, first:]] += 1
            self.slices[listed["page"]] = table.slices

    def _mark_kept(self, cells: Cells, sequence: Sequence) -> None:
        """Split units that a sequence has runs in; their tokens are those of all runs in use, spread over the unit."""
        if sequence.kept is None:
            return
        units = sequence.kept.units
        cells["page"][units] = units
        cells["request"][units] = self._number(sequence.request.request_id)
        cells["state"][units] = HELD
        used = sequence.kept.split.used_share(units)
        cells["tokens"][units] = np.ceil(used * sequence.layout.unit_tokens)
        self.tables[units] += 1
        self.slices[units] = 1

    def _mark_frames(self, cells: Cells, sequence: Sequence, pool: PagePool) -> None:
        """Pages in which a sequence has copies of what is in the host tier: full, whatever they hold."""
        number, unit_tokens = self._number(sequence.request.request_id), sequence.layout.unit_tokens
        for table in sequence.holdings[len(sequence.tables) :]:
            for page in table.pages():
                units = pool.units_of(page[None], int(pool.size[page]))[0]
                cells[units] = np.array((page, number, HELD, unit_tokens), CELL)
                self.tables[units] += 1
                self.slices[page] = table.slices

    def _mark_cached(self, cells: Cells, engine: Engine) -> None:
        """Idle pages: those that were cached before stay as they are, the others' tokens are looked up in the index."""
        pool, before = engine._pool, self.cells
        cached = np.flatnonzero(pool._findable & (pool.refs == 0)).astype(np.int32)
        same = pool.generation[cached] == self._generation[cached]
        known = same & (before["state"][cached] == CACHED)
        units = pool._units(cached[known])
        cells[units] = before[units]
        for page, was_seen in zip(cached[~known].tolist(), same[~known].tolist(), strict=True):
            units = pool._units(np.array([page], np.int32))
            slices = engine._plan.groups[pool.index.group(page)].slices
            self._mark_page(cells, CACHED, units, slices, pool.index.node(page), engine.config.unit_tokens)
            cells["request"][units] = before["request"][page] if was_seen else 0

    def _mark_host(self, cells: Cells, engine: Engine, host: HostTier) -> None:
        """Pages of the host tier: what is in one never changes while it is there."""
        offset = engine._pool.most_units
        before, self._in_host = self._in_host, dict(host._pages)
        known = [offset + page.units for key, page in self._in_host.items() if before.get(key) is page]
        if known:
            units = np.concatenate(known)
            cells[units] = self.cells[units]
        for key, page in self._in_host.items():
            if before.get(key) is not page:
                slices = engine._plan.groups[page.group].slices
                self._mark_page(cells, HOST, offset + page.units, slices, page.node, engine.config.unit_tokens)

    def _mark_page(self, cells: Cells, state: int, units: Units, slices: int, node: Node, unit_tokens: int) -> None:
        """One full page, of as many tokens as its node has."""
        first_tokens = np.arange(len(units)) % (len(units) // slices) * unit_tokens
        self.slices[units[0]] = slices
        cells["page"][units] = units[0]
        cells["state"][units] = state
        cells["tokens"][units] = np.clip(len(node.tokens) - first_tokens, 0, unit_tokens)

    def _number(self, request_id: str) -> int:
        if request_id not in self._numbers:
            if len(self.requests) == MAX_REQUESTS:
                return MAX_REQUESTS
            self.requests.append(request_id)
            self._numbers[request_id] = len(self.requests)
        return self._numbers[request_id]


def units_by_request(engine: Engine) -> dict[str, int]:
    """Units that each request holds, most first; what several share counts for the earliest. Adds up to all held."""
    pool, scheduler = engine._pool, engine._scheduler
    counted = np.zeros(1 + pool.most_units, bool)
    counted[0] = True  # holes
    held: dict[str, int] = {}
    for sequence in sorted([*scheduler.running, *scheduler.parked], key=lambda s: s.request.arrival):
        pages = sequence.held
        own: Pages = np.unique(pages[~counted[pages]])
        counted[own] = True
        request_id = sequence.request.request_id
        held[request_id] = held.get(request_id, 0) + int(pool.size[own].sum())
    return dict(sorted(held.items(), key=lambda item: -item[1]))


def units_of_kind(engine: Engine, kind: str) -> tuple[int, int]:
    """Units of segments of a kind ("image") in the tables of the requests that run: as often as they are listed, and
    different ones."""
    listed: list[Pages] = []
    for sequence in engine._scheduler.running:
        numbers = [page for page in range(sequence.table.n_pages) if sequence.layout.kind(page) == kind]
        listed += [table.pages()[numbers] for table in sequence.tables]
    pages = np.concatenate([np.empty(0, np.int32), *listed])
    pages = pages[pages > 0]
    size = engine._pool.size
    return int(size[pages].sum()), int(size[np.unique(pages)].sum())


def _page_entries(layout: PageLayout, pages: int) -> NDArray[np.int64] | int:
    """Table entries of each of the first pages."""
    return layout.page_entries(0) if layout.uniform else np.array([layout.page_entries(p) for p in range(pages)], int)


def _tokens(layout: PageLayout, computed: int, entries: int) -> NDArray[np.int64]:
    """Tokens in each of the first ``entries`` entries of a table, of which ``computed`` tokens are computed."""
    stored = layout.entries_for(computed)
    tokens = np.zeros(max(entries, stored), np.int64)
    tokens[:stored] = np.clip(computed - layout.unit_pos(computed), 0, layout.valid(computed))
    return tokens[:entries]
