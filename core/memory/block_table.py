"""A sequence's map from logical pages to units, in two levels, shared on fork and copied on write."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

from octavo.core.memory.page_layout import PageLayout
from octavo.core.memory.page_pool import PagePool, Pages, Units

LEAF_PAGES = 128


class Leaf:
    """Up to ``LEAF_PAGES`` pages, and the number of tables that hold the leaf. Page 0 is a hole: a page that was let
    go of because nobody sees it any more. ``row`` has room for all, of which ``count`` are there: one more is one
    number that is written, and no array is made for it."""

    __slots__ = ("count", "row", "tables")

    def __init__(self, pages: Pages) -> None:
        self.row = array("i", bytes(4 * LEAF_PAGES))
        self.count = 0
        self.tables = 1
        self.extend(pages)

    @property
    def pages(self) -> Pages:
        """The pages themselves, int32 [count], to be read and written."""
        return np.frombuffer(self.row, np.int32, self.count)

    def extend(self, pages: Pages) -> None:
        """Add pages at the end; there is room for them."""
        before, self.count = self.count, self.count + len(pages)
        self.pages[before:] = pages

    @property
    def listed(self) -> Pages:
        pages = self.pages
        return pages[pages > 0]


class BlockTable:
    """The root of a sequence's page map, for one group of layers.

    ::

        root  [ leaf | leaf | leaf ]            a fork copies the root only: 64 entries for 8,192 pages
                  |      |      +-- [p8 p9]     each page counts the distinct leaves that list it
                  |      +--------- [p4 .. p7]  each leaf counts the tables that hold it
                  +---------------- [0 0 p2 p3] behind a sliding window there are holes

    A table owns the leaves that it alone holds. To change a shared leaf it first takes a copy, and to change a page
    that other leaves list it first takes a fresh page and queues a copy of the units.

    A page has ``slices`` times as many units as it has table entries, slice by slice: one for each ``unit_layers``
    layers of the group. ``stale_from`` is the first page whose entries on the device differ from this table;
    ``first_page`` is the first that is no hole.
    """

    __slots__ = ("_pool", "_root", "first_page", "n_pages", "slices", "stale_from")

    def __init__(self, pool: PagePool, slices: int = 1) -> None:
        self._pool = pool
        self._root: list[Leaf] = []
        self.slices = slices
        self.n_pages = 0
        self.first_page = 0
        self.stale_from = 0

    def pages(self, start: int = 0, stop: int | None = None) -> Pages:
        """Pages ``start`` to ``stop`` (exclusive) by their first units; 0 is a hole."""
        stop = self.n_pages if stop is None else stop
        if start >= stop:
            return np.empty(0, np.int32)
        first, last = start // LEAF_PAGES, (stop - 1) // LEAF_PAGES
        within = slice(start - first * LEAF_PAGES, stop - first * LEAF_PAGES)
        if first == last:
            return self._root[first].pages[within].copy()
        return np.concatenate([leaf.pages for leaf in self._root[first : last + 1]])[within]

    def page(self, number: int) -> int:
        """One page by its first unit; 0 is a hole."""
        return self._root[number // LEAF_PAGES].row[number % LEAF_PAGES]

    @property
    def held(self) -> Pages:
        """The pages that are no holes."""
        return self.pages(self.first_page)

    @property
    def near(self) -> int | None:
        """The last unit of the last page, if its units lie side by side: more pages had better come right after it."""
        if self.first_page == self.n_pages:
            return None
        last = self._root[-1].row[self._root[-1].count - 1]
        return last + int(self._pool.size[last]) - 1

    def entries(self, start: int, stop: int, layout: PageLayout) -> Units:
        """Units int32 [slices, n] of the n table entries of pages ``start`` to ``stop`` (exclusive)."""
        pages = self.pages(start, stop)
        if layout.uniform:
            return self.listed(pages, layout.page_entries(0))
        parts = [np.empty((self.slices, 0), np.int32)]
        for size, group in groupby(range(start, stop), key=layout.page_entries):
            numbers = list(group)
            parts.append(self.listed(pages[numbers[0] - start : numbers[-1] + 1 - start], size))
        return np.concatenate(parts, axis=1)

    def append(self, pages: Pages) -> None:
        """Add pages at the end; zeros are holes. The caller's references pass to this table."""
        if len(pages) == 0:
            return
        room = -self.n_pages % LEAF_PAGES
        if room:
            self._own_leaf(len(self._root) - 1).extend(pages[:room])
        if room < len(pages):
            self._root += [Leaf(pages[i : i + LEAF_PAGES]) for i in range(room, len(pages), LEAF_PAGES)]
        if self.first_page == self.n_pages:
            self.first_page += int(np.argmax(pages > 0)) if pages.any() else len(pages)
        self.n_pages += len(pages)

    def append_page(self, page: int) -> None:
        """The same of one page, which is no hole."""
        at = self.n_pages % LEAF_PAGES
        if at:
            leaf = self._root[-1]
            if leaf.tables > 1:
                leaf = self._own_leaf(len(self._root) - 1)
            leaf.row[at] = page
            leaf.count = at + 1
        else:
            self._root.append(Leaf(np.array([page], np.int32)))
        self.n_pages += 1

    def extend(self, pages: int, layout: PageLayout) -> None:
        """Let the table have ``pages`` pages of a sequence laid out so. Precondition: as many units are available."""
        if layout.uniform:
            missing = pages - self.n_pages
            if missing > 0:
                self.append(self._pool.allocate(missing, layout.page_entries(0) * self.slices, self.near))
            return
        for page in range(self.n_pages, pages):
            self.append(self._pool.allocate(1, layout.page_entries(page) * self.slices, self.near))

    def listed(self, pages: Pages, size: int) -> Units:
        """Units int32 [slices, n * size] of n pages of ``size`` table entries each."""
        if size == self.slices == 1:
            return pages[None]
        units = self._pool.units_of(pages, size * self.slices)
        return units.reshape(-1, self.slices, size).transpose(1, 0, 2).reshape(self.slices, -1)

    def fork(self) -> BlockTable:
        """A table of the same pages; costs one count a leaf and nothing a page."""
        twin = BlockTable(self._pool, self.slices)
        twin._root = self._root.copy()
        for leaf in self._root:
            leaf.tables += 1
        twin.n_pages, twin.first_page = self.n_pages, self.first_page
        return twin

    def copy_needed(self, page: int) -> bool:
        """Whether a write to logical ``page`` takes a fresh page first."""
        leaf = self._root[page // LEAF_PAGES]
        return leaf.tables > 1 or int(self._pool.refs[leaf.row[page % LEAF_PAGES]]) > 1

    def copy_on_write(self, page: int) -> Units:
        """Put a fresh page in place of a shared one; gives (source, destination) units int32 [k, 2], to be copied
        before the write.

        Precondition: ``copy_needed(page)`` and as many units are available.
        """
        leaf = self._own_leaf(page // LEAF_PAGES)
        source = np.array([leaf.row[page % LEAF_PAGES]], np.int32)
        size = int(self._pool.size[source[0]])
        fresh = self._pool.allocate(1, size)
        leaf.row[page % LEAF_PAGES] = int(fresh[0])
        pairs = np.stack([self._pool.units_of(source, size)[0], self._pool.units_of(fresh, size)[0]], axis=1)
        self._pool.release(source)
        self.stale_from = min(self.stale_from, page)
        return pairs

    def drop_before(self, page: int) -> None:
        """Let go of the pages before ``page``, which nobody will see again; they become holes."""
        while self.first_page < min(page, self.n_pages):
            leaf = self._own_leaf(self.first_page // LEAF_PAGES)
            start = self.first_page % LEAF_PAGES
            stop = min(leaf.count, start + page - self.first_page)
            passed = leaf.pages[start:stop]
            self._pool.release(passed[::-1].copy())
            passed[:] = 0
            self.stale_from = min(self.stale_from, self.first_page)
            self.first_page += stop - start

    def truncate(self, pages: int) -> None:
        """Let go of every page from ``pages`` on, chain tail first."""
        while self.n_pages > pages:
            leaf = self._own_leaf(len(self._root) - 1)
            kept = max(0, pages - (len(self._root) - 1) * LEAF_PAGES)
            gone = leaf.pages[kept:][::-1]
            self._pool.release(gone[gone > 0])
            self.n_pages -= leaf.count - kept
            leaf.count = kept
            if kept == 0:
                self._root.pop()
        self.first_page = min(self.first_page, self.n_pages)
        self.stale_from = min(self.stale_from, pages)

    def release(self) -> None:
        """Let go of every page, chain tail first. The table is empty afterwards."""
        for leaf in reversed(self._root):
            leaf.tables -= 1
            if leaf.tables == 0:
                self._pool.release(leaf.listed[::-1])
        self._root, self.n_pages, self.first_page, self.stale_from = [], 0, 0, 0

    def _own_leaf(self, index: int) -> Leaf:
        leaf = self._root[index]
        if leaf.tables > 1:
            leaf.tables -= 1
            self._pool.retain(leaf.listed)
            leaf = self._root[index] = Leaf(leaf.pages)
        return leaf


def append_pages(tables: Sequence[BlockTable], pool: PagePool, units: int) -> Pages:
    """One more page of ``units`` units at the end of each of some tables, all allocated at once. Precondition: as many
    units are available."""
    if pool.looks_near:
        pages = pool.allocate_each(units, [table.near for table in tables])
    else:
        pages = pool.allocate(len(tables), units)
    for table, page in zip(tables, pages.tolist(), strict=True):
        table.append_page(page)
    return pages


def check_tables(tables: Iterable[BlockTable], pool: PagePool, split: Units | None = None) -> None:
    """Recount what tables hold: leaves by tables, and pages by distinct leaves. ``split`` units are held once, by who
    deals in their runs."""
    holders: Counter[int] = Counter()
    leaves: dict[int, Leaf] = {}
    for table in tables:
        if sum(leaf.count for leaf in table._root) != table.n_pages:
            raise AssertionError(f"a table of {table.n_pages} pages lists another number")
        holes = np.flatnonzero(table.pages() == 0)
        if not np.array_equal(holes, np.arange(table.first_page)):
            raise AssertionError(f"a table that begins at page {table.first_page} has holes at {holes.tolist()}")
        for leaf in table._root:
            holders[id(leaf)] += 1
            leaves[id(leaf)] = leaf
    refs = np.zeros_like(pool.refs)
    if split is not None:
        refs[split] = 1
    for key, leaf in leaves.items():
        if leaf.tables != holders[key]:
            raise AssertionError(f"a leaf counts {leaf.tables} tables, {holders[key]} hold it")
        np.add.at(refs, leaf.listed, 1)
    if not np.array_equal(refs, pool.refs):
        wrong = np.flatnonzero(refs != pool.refs)
        raise AssertionError(
            f"pages {wrong.tolist()} count {pool.refs[wrong].tolist()} leaves, {refs[wrong].tolist()} list them"
        )
