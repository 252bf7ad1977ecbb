"""A sequence's map from logical pages to units, in two levels, shared on fork and copied on write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from octavo.core.page_pool import PagePool, Pages

LEAF_PAGES = 128


class Leaf:
    """Up to ``LEAF_PAGES`` pages, and the number of tables that hold the leaf."""

    __slots__ = ("pages", "tables")

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.tables = 1


class BlockTable:
    """The root of a sequence's page map.

    ::

        root  [ leaf | leaf | leaf ]            a fork copies the root only: 64 entries for 8,192 pages
                  |      |      +-- [p8 p9]     each page counts the distinct leaves that list it
                  |      +--------- [p4 .. p7]  each leaf counts the tables that hold it
                  +---------------- [p0 .. p3]

    A table owns the leaves that it alone holds. To change a shared leaf it first takes a copy, and to change a page
    that other leaves list it first takes a fresh page and queues a copy of the units.

    ``stale_from`` is the first page whose entries on the device differ from this table.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._root: list[Leaf] = []
        self.n_pages = 0
        self.stale_from = 0

    def pages(self, start: int = 0, stop: int | None = None) -> Pages:
        """Pages ``start`` to ``stop`` (exclusive) by their first units."""
        stop = self.n_pages if stop is None else stop
        if start >= stop:
            return np.empty(0, np.int32)
        first, last = start // LEAF_PAGES, (stop - 1) // LEAF_PAGES
        joined = np.concatenate([leaf.pages for leaf in self._root[first : last + 1]])
        return joined[start - first * LEAF_PAGES : stop - first * LEAF_PAGES]

    def append(self, pages: Pages) -> None:
        """Add pages at the end. The caller's references pass to this table."""
        if len(pages) == 0:
            return
        filled = self.n_pages % LEAF_PAGES
        room = (LEAF_PAGES - filled) % LEAF_PAGES
        if room:
            leaf = self._own_leaf(len(self._root) - 1)
            leaf.pages = np.concatenate([leaf.pages, pages[:room]])
        self._root += [Leaf(pages[i : i + LEAF_PAGES].copy()) for i in range(room, len(pages), LEAF_PAGES)]
        self.n_pages += len(pages)

    def fork(self) -> BlockTable:
        """A table of the same pages; costs one count a leaf and nothing a page."""
        twin = BlockTable(self._pool)
        twin._root = self._root.copy()
        for leaf in self._root:
            leaf.tables += 1
        twin.n_pages = self.n_pages
        return twin

    def copy_needed(self, page: int) -> bool:
        """Whether a write to logical ``page`` takes a fresh page first."""
        leaf = self._root[page // LEAF_PAGES]
        return leaf.tables > 1 or int(self._pool.refs[leaf.pages[page % LEAF_PAGES]]) > 1

    def copy_on_write(self, page: int) -> tuple[int, int]:
        """Put a fresh page in place of a shared one; gives (source, destination), to be copied before the write.

        Precondition: ``copy_needed(page)`` and a page is available.
        """
        fresh = self._pool.allocate(1)
        leaf = self._own_leaf(page // LEAF_PAGES)
        source = leaf.pages[page % LEAF_PAGES : page % LEAF_PAGES + 1].copy()
        leaf.pages[page % LEAF_PAGES] = fresh[0]
        self._pool.release(source)
        self.stale_from = min(self.stale_from, page)
        return int(source[0]), int(fresh[0])

    def truncate(self, pages: int) -> None:
        """Let go of every page from ``pages`` on, chain tail first."""
        while self.n_pages > pages:
            leaf = self._own_leaf(len(self._root) - 1)
            kept = max(0, pages - (len(self._root) - 1) * LEAF_PAGES)
            self._pool.release(leaf.pages[kept:][::-1])
            self.n_pages -= len(leaf.pages) - kept
            leaf.pages = leaf.pages[:kept].copy()
            if kept == 0:
                self._root.pop()
        self.stale_from = min(self.stale_from, pages)

    def release(self) -> None:
        """Let go of every page, chain tail first. The table is empty afterwards."""
        for leaf in reversed(self._root):
            leaf.tables -= 1
            if leaf.tables == 0:
                self._pool.release(leaf.pages[::-1])
        self._root, self.n_pages, self.stale_from = [], 0, 0

    def _own_leaf(self, index: int) -> Leaf:
        leaf = self._root[index]
        if leaf.tables > 1:
            leaf.tables -= 1
            self._pool.retain(leaf.pages)
            leaf = self._root[index] = Leaf(leaf.pages.copy())
        return leaf


def check_tables(tables: Iterable[BlockTable], pool: PagePool) -> None:
    """Recount what tables hold: leaves by tables, and pages by distinct leaves."""
    holders: Counter[int] = Counter()
    leaves: dict[int, Leaf] = {}
    for table in tables:
        if sum(len(leaf.pages) for leaf in table._root) != table.n_pages:
            raise AssertionError(f"a table of {table.n_pages} pages lists another number")
        for leaf in table._root:
            holders[id(leaf)] += 1
            leaves[id(leaf)] = leaf
    refs = np.zeros_like(pool.refs)
    for key, leaf in leaves.items():
        if leaf.tables != holders[key]:
            raise AssertionError(f"a leaf counts {leaf.tables} tables, {holders[key]} hold it")
        np.add.at(refs, leaf.pages, 1)
    if not np.array_equal(refs, pool.refs):
        wrong = np.flatnonzero(refs != pool.refs)
        raise AssertionError(
            f"pages {wrong.tolist()} count {pool.refs[wrong].tolist()} leaves, {refs[wrong].tolist()} list them"
        )
