"""Which findable page can only be reached through which other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class Chains:
    """Counts that tell of each findable page whether others need it.

    A *node* is one distinct prefix, and several pages (*twins*) may hold it (``octavo.core.memory.prefix_cache``). A
    page is found through the node in front of it; so a page is needed while pages stand behind its node and no twin
    holds the node as well. A page that is not needed is a *leaf*::

        node 7  pages 4, 9       two leaves, for as long as both are there: either will do for 5 and 6
         ├─ node 8  page 5       a leaf
         └─ node 9  page 6       needed by 2
             └─ node 12  page 2  a leaf

        by page  [units + 1]      row       of its node; 0 if the page is not findable
                                  twin      the next page of the same node, 0 after the last
        by row   [2 units + 1]    node      whose row this is
                                  pages     number of pages that hold the node
                                  children  number of pages right behind the node
                                  parent    row of the node in front, 0 at the head of a chain
                                  first     the first page that holds the node, 0 if none does

    Node ids only go up; rows are used again. A node has a row while a page holds it or stands behind it, which makes
    two rows a page at most. Row 0 belongs to no node: its counts stay 0.
    """

    def __init__(self, units: int) -> None:
        self.row = np.zeros(units + 1, np.int32)
        self._twin = np.zeros(units + 1, np.int32)
        self._node = np.zeros(2 * units + 1, np.int64)
        self.pages = np.zeros(2 * units + 1, np.int32)
        self.children = np.zeros(2 * units + 1, np.int32)
        self.parent = np.zeros(2 * units + 1, np.int32)
        self.first = np.zeros(2 * units + 1, np.int32)
        self._rows: dict[int, int] = {}
        self._spare_rows: list[int] = []

    def is_leaf(self, page: int) -> bool:
        row = self.row[page]
        return bool(self.children[row] == 0 or self.pages[row] > 1)

    def holders(self, row: int) -> Iterator[int]:
        """The pages that hold the node of a row."""
        page = int(self.first[row])
        while page:
            yield page
            page = int(self._twin[page])

    def published(self, page: int, node: int, parent: int) -> None:
        """``page`` can be found, and holds ``node`` behind the node ``parent`` (0: at the head of a chain)."""
        assert node > 0 and self.row[page] == 0, f"page {page} is published already, or its node {node} is none"
        row, above = self._row_of(node), self._row_of(parent) if parent else 0
        assert not self.pages[row] or self.parent[row] == above, f"node {node} has two parents"
        self.row[page], self._twin[page], self.first[row] = row, self.first[row], page
        self.pages[row] += 1
        self.parent[row] = above
        if above:
            self.children[above] += 1

    def forgotten(self, page: int) -> None:
        """``page`` cannot be found any more."""
        row = int(self.row[page])
        assert row, f"page {page} is not findable"
        above = int(self.parent[row])
        after = int(self._twin[page])
        if self.first[row] == page:
            self.first[row] = after
        else:
            before = next(twin for twin in self.holders(row) if self._twin[twin] == page)
            self._twin[before] = after
        self.row[page] = self._twin[page] = 0
        self.pages[row] -= 1
        self._drop_if_unused(row)
        if above:
            self.children[above] -= 1
            self._drop_if_unused(above)

    def _row_of(self, node: int) -> int:
        row = self._rows.get(node)
        if row is None:
            row = self._spare_rows.pop() if self._spare_rows else len(self._rows) + 1
            self._rows[node], self._node[row] = row, node
        return row

    def _drop_if_unused(self, row: int) -> None:
        if not self.pages[row] and not self.children[row]:
            del self._rows[int(self._node[row])]
            self._node[row] = self.parent[row] = 0
            self._spare_rows.append(row)

    def grow(self, units: int) -> None:
        """Room for ``units`` more units at the end."""
        for name in ("row", "_twin"):
            setattr(self, name, np.pad(getattr(self, name), (0, units)))
        for name in ("_node", "pages", "children", "parent", "first"):
            setattr(self, name, np.pad(getattr(self, name), (0, 2 * units)))

    def check(self) -> None:
        """Count again from each page's row, and raise AssertionError where a count differs."""
        findable = np.flatnonzero(self.row)
        rows = self.row[findable]
        above = self.parent[rows]
        if not np.array_equal(self.pages, np.bincount(rows, minlength=len(self.pages))):
            raise AssertionError("the number of pages that hold a node is wrong")
        if not np.array_equal(self.children, np.bincount(above[above > 0], minlength=len(self.children))):
            raise AssertionError("the number of pages behind a node is wrong")
        used = np.flatnonzero((self.pages > 0) | (self.children > 0)).tolist()
        if used != sorted(self._rows.values()) or any(self._rows[int(self._node[row])] != row for row in used):
            raise AssertionError(f"rows {used} are in use, {sorted(self._rows.values())} belong to a node")
        listed = sorted((page, row) for row in used for page in self.holders(row))
        if listed != list(zip(findable.tolist(), rows.tolist(), strict=True)):
            raise AssertionError("the pages listed under a node are not those that hold it")
