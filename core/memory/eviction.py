"""Idle pages, and the order in which they are given up: ranks by a policy, chains kept whole whatever it says."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces import EvictionPolicy
from octavo.core.memory.chains import Chains
from octavo.core.memory.page_facts import FactsBook

Pages = NDArray[np.int32]


class IdlePages:
    """The pages that nobody holds and that can still be found, by page id::

        idle   [units + 1]  bool   nobody holds the page
        rank   [units + 1]  fp64   what the policy said when it became idle; infinite: pinned
        since  [units + 1]  int64  in the order in which pages became idle; no two are equal
        chains                     which page needs which

    ``published`` and ``forgotten`` must be called for every page that enters or leaves the prefix index, save that
    ``evict`` forgets its victims itself. With ``chained=False`` no page needs another (layers that see a window can
    use a page without those in front of it): both calls do nothing, and only ranks decide.
    """

    def __init__(self, policy: EvictionPolicy, book: FactsBook, *, chained: bool = True) -> None:
        units, remembered = len(book.facts.uses) - 1, book.facts.history.shape[1]
        assert policy.history <= remembered, f"the policy reads {policy.history} uses, the book keeps {remembered}"
        self.idle_count = 0
        self.failure: Exception | None = None
        self._policy = policy
        self._book = book
        self._chained = chained
        self._chains = Chains(units)
        self._idle = np.zeros(units + 1, np.bool_)
        self._rank = np.zeros(units + 1, np.float64)
        self._since = np.zeros(units + 1, np.int64)
        self._next_since = 0
        self._pinned_count = 0
        self._kept: Pages | None = np.empty(0, np.int32)

    @property
    def evictable(self) -> int:
        """Pages that ``evict`` can give."""
        return self.idle_count - len(self.kept)

    @property
    def kept(self) -> Pages:
        """Idle pages that ``evict`` cannot give, int32: the pinned ones, and one page of each node through which alone
        a pinned page is reached."""
        if self._kept is None:
            pinned = np.flatnonzero(self._idle & (self._rank == np.inf)).astype(np.int32)
            self._kept = np.concatenate([pinned, self._kept_for(pinned)])
        return self._kept

    def would_pin(self, pages: Pages) -> NDArray[np.bool_]:
        """Which of some findable pages the policy would pin if they became idle now."""
        pinned: NDArray[np.bool_] = self._policy.rank(pages, self._book.facts) == np.inf
        return pinned

    def published(self, page: int, node: int, parent: int) -> None:
        """A held page became findable as ``node``, behind the node ``parent`` (0: at the head of a chain)."""
        self.published_each([page], [node], [parent])

    def published_each(self, pages: Iterable[int], nodes: Iterable[int], parents: Iterable[int]) -> None:
        """The same for several pages; those in front come first."""
        if self._chained:
            for page, node, parent in zip(pages, nodes, parents, strict=True):
                self._chains.published(page, node, parent)
            self._changed()

    def forgotten(self, page: int) -> None:
        """A held page is findable no longer."""
        assert not self._idle[page], f"page {page} is idle: it leaves by `remove` or `evict` first"
        if self._chained:
            self._chains.forgotten(page)
            self._changed()

    def add(self, pages: Pages) -> None:
        """Pages that became idle just now, each once, a chain's tail before its head. The policy ranks them now."""
        assert not self._idle[pages].any(), f"of pages {pages.tolist()} some are idle already"
        assert not self._chained or self._chains.row[pages].all(), f"of pages {pages.tolist()} some cannot be found"
        self._book.release(pages)
        self._idle[pages] = True
        self._rank[pages] = self._ranked(pages)
        self._since[pages] = np.arange(self._next_since, self._next_since + len(pages))
        self._next_since += len(pages)
        self._count(pages, 1)

    def _ranked(self, pages: Pages) -> NDArray[np.float64]:
        """The policy's ranks. If it fails, the pool must not be left half changed: the pages go by their last use, and
        ``failure`` keeps what happened until somebody can report it."""
        try:
            rank = np.asarray(self._policy.rank(pages, self._book.facts), np.float64)
            if rank.shape != pages.shape or np.isnan(rank).any():
                raise ValueError(f"ranks of {len(pages)} pages must be as many numbers and not NaN, got {rank}")
        except Exception as error:  # a user's policy may raise anything
            self.failure = self.failure or error
            return self._book.facts.last_used[pages].astype(np.float64)
        return rank

    def remove(self, pages: Pages) -> None:
        """Idle pages, each once, that are in use again."""
        assert self._idle[pages].all(), f"of pages {pages.tolist()} some are not idle"
        self._idle[pages] = False
        self._count(pages, -1)

    def evict(self, count: int) -> Pages:
        """The ``count`` pages to give up, int32, in the order in which they go. They are forgotten here; the caller
        takes them out of the prefix index. Precondition: ``count <= evictable``.

        1. A page may go if it is idle, its rank is finite and it is a leaf: no findable page needs it.
        2. Of those that may go, the one of lowest rank does; among equals the one that is idle longest, which of one
           chain is the tail.
        3. When nothing stands behind a node any longer, the last page that holds it may go too.
        4. What is left then stands in front of held pages whose holders hold another page of the same node, which was
           unchained (``PagePool.unchain``): those go by rank.

        What goes first does not depend on how many follow: ``evict(k)`` and ``evict(m)`` give what ``evict(k + m)``
        does. One pass over the arrays finds the leaves; the heap holds about ``count`` pages, however many are idle.
        """
        assert count <= self.evictable, f"{count} pages asked for, {self.evictable} can be evicted"
        chains = self._chains
        heap = self._lowest_leaves(count)
        victims: list[int] = []
        exhausted = False
        while len(victims) < count:
            if not heap:
                left, exhausted = np.setdiff1d(np.flatnonzero(self._idle), self.kept), True
                heap = list(zip(self._rank[left].tolist(), self._since[left].tolist(), left.tolist(), strict=True))
                heapify(heap)
            *_, page = heappop(heap)
            # Of twins all but the last are leaves. That one enters the heap again when nothing needs it any longer.
            if not self._idle[page] or not (exhausted or chains.is_leaf(page)):
                continue
            victims.append(page)
            self._idle[page] = False
            above = int(chains.parent[chains.row[page]])
            self.forgotten(page)
            if chains.children[above] == 0 and chains.pages[above] == 1:
                uncovered = int(chains.first[above])
                heappush(heap, (float(self._rank[uncovered]), int(self._since[uncovered]), uncovered))
        gone = np.asarray(victims, np.int32)
        self._count(gone, -1)
        return gone

    def _lowest_leaves(self, count: int) -> list[tuple[float, int, int]]:
        """A heap of (rank, since, page), of all leaves that may be among the next ``count`` victims.

        A pinned page may be in it, but comes after all that can be evicted.
        """
        pages = np.flatnonzero(self._idle)
        rows = self._chains.row[pages]
        childless = self._chains.children[rows] == 0
        leaves, twins = pages[childless], pages[~childless & (self._chains.pages[rows] > 1)]
        if count < len(leaves):
            # A page with nothing behind it stays a leaf, so those past the first `count` cannot have their turn.
            rank = self._rank[leaves]
            leaves = leaves[rank <= np.partition(rank, count)[count]]
            leaves = leaves[np.lexsort((self._since[leaves], self._rank[leaves]))[:count]]
        chosen = np.concatenate([leaves, twins])
        heap = list(zip(self._rank[chosen].tolist(), self._since[chosen].tolist(), chosen.tolist(), strict=True))
        heapify(heap)
        return heap

    def _count(self, pages: Pages, sign: int) -> None:
        """Pages became idle (1) or are idle no longer (-1)."""
        self.idle_count += sign * len(pages)
        self._pinned_count += sign * int((self._rank[pages] == np.inf).sum())
        self._changed()

    def _changed(self) -> None:
        if self._pinned_count or self._kept is None or len(self._kept):
            self._kept = None

    def _kept_for(self, pinned: Pages) -> Pages:
        """One page of each node in front of a pinned page has to stay. The nodes where that must be an idle page of
        finite rank, because no pinned page and no held one holds the node: one page of each."""
        chains = self._chains
        idle_pages = np.bincount(chains.row[self._idle], minlength=len(chains.pages))
        stays = chains.pages > idle_pages
        stays[chains.row[pinned]] = True
        in_front: set[int] = set()
        for row in chains.parent[chains.row[pinned]].tolist():
            while chains.pages[row] and row not in in_front:
                in_front.add(row)
                row = int(chains.parent[row])
        return np.array([next(chains.holders(row)) for row in sorted(in_front) if not stays[row]], np.int32)

    def grow(self, units: int) -> None:
        """Room for ``units`` more units at the end; the book grows apart."""
        self._chains.grow(units)
        for name in ("_idle", "_rank", "_since"):
            setattr(self, name, np.pad(getattr(self, name), (0, units)))

    def check(self, held: NDArray[np.bool_] | None = None) -> Pages:
        """The idle pages, ascending; raises AssertionError where the bookkeeping is broken.

        ``held`` [units + 1], if given, says which pages a table lists: whoever holds a page must then hold one of the
        node in front of it too. That is why a held page never needs an idle one.
        """
        chains = self._chains
        chains.check()
        idle = np.flatnonzero(self._idle).astype(np.int32)
        pinned = int((self._rank[idle] == np.inf).sum())
        if (self.idle_count, self._pinned_count) != (len(idle), pinned):
            raise AssertionError(
                f"{self.idle_count} idle and {self._pinned_count} pinned counted, {len(idle)} and {pinned} found"
            )
        if self._chained and not chains.row[idle].all():
            raise AssertionError(f"of the idle pages {idle.tolist()} some cannot be found")
        if len(np.unique(self._since[idle])) != len(idle):
            raise AssertionError("two pages became idle at the same place in the order")
        if held is not None:
            if held[idle].any():
                raise AssertionError(f"pages {idle[held[idle]].tolist()} are idle and held")
            held_rows = np.unique(chains.row[held])
            needed = np.unique(chains.parent[held_rows])
            needed = needed[chains.pages[needed] > 0]
            unheld = [page for row in np.setdiff1d(needed, held_rows).tolist() for page in chains.holders(row)]
            if unheld:
                raise AssertionError(f"pages behind {unheld} are held, these are not")
        return idle
