"""Who holds which page of the pool: reference counts, idle pages, and their eviction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces import Allocator, EvictionPolicy
from octavo.core.memory.eviction import IdlePages
from octavo.core.memory.page_facts import FactsBook
from octavo.core.memory.prefix_cache import Node, PrefixCache

Pages = NDArray[np.int32]
Units = NDArray[np.int32]


class PagePool:
    """Pages of one or more units, in exactly one of three states::

        held    refs > 0                     listed by a leaf of a live block table
        cached  refs = 0, in the index       idle; findable by its key until it is evicted
        free    refs = 0, not in the index   its units are the allocator's

    A page goes by its first unit; the others are chained to it, side by side where the allocator could::

        size      [ . 3 . . 1 . . ]      units of the page that begins here
        following [ . 2 5 . 0 0 . ]      the next unit of the same page, 0 after the last: page 1 is units 1, 2, 5

    ``refs[page]`` counts the distinct leaves that list the page, not tables; a leaf that lists a lent page several
    times counts as often. ``generation[page]``
    goes up whenever the page is given to somebody, so that whoever keeps something about a page (a digest) can see
    that it is about older contents.

    An elastic pool grows before anything is evicted: ``grow(units)`` is asked for at least so many more units and says
    how many it added, and ``growable`` is what may still come. ``on_evict(units, node, group)`` sees each page
    before it is forgotten.
    """

    def __init__(
        self,
        allocator: Allocator,
        eviction: EvictionPolicy,
        index: PrefixCache,
        *,
        unit_bytes: int = 1,
        growable: int = 0,
        grow: Callable[[int], int] | None = None,
        on_evict: Callable[[Units, Node, int], None] | None = None,
    ) -> None:
        most = allocator.total_units + growable
        self.index = index
        self.book = FactsBook(most, eviction.history)
        self.refs = np.zeros(most + 1, np.int32)
        self.size = np.zeros(most + 1, np.int32)
        self.generation = np.zeros(most + 1, np.int64)
        self.evictions = 0
        self.held_peak = 0
        self.growable = growable
        self._following = np.zeros(most + 1, np.int32)
        self._findable = np.zeros(most + 1, bool)
        self._idle = IdlePages(eviction, self.book)
        self.unit_bytes = unit_bytes
        self._allocator = allocator
        self._grow = grow
        self._on_evict = on_evict
        self._cached = 0

    @property
    def total_units(self) -> int:
        """Units there are now."""
        return self._allocator.total_units

    @property
    def most_units(self) -> int:
        """Units there can be."""
        return self.total_units + self.growable

    @property
    def free_units(self) -> int:
        return self._allocator.free_units

    @property
    def looks_near(self) -> bool:
        """Whether it makes a difference what pages had better lie next to."""
        return self._allocator.looks_near

    @property
    def cached_units(self) -> int:
        return self._cached

    @property
    def held_units(self) -> int:
        return self.total_units - self.free_units - self.cached_units

    @property
    def available(self) -> int:
        """Units that can be had at once: the free ones, and idle ones by eviction."""
        return self.free_units + self._cached - self.pinned_units

    @property
    def pinned_units(self) -> int:
        """Units of idle pages that are pinned, or needed by one that is."""
        kept = self._idle.kept
        return int(self.size[kept].sum()) if len(kept) else 0

    def idle_among(self, pages: Pages) -> int:
        """Units that retaining some findable pages takes from ``available``, at most: those of the idle ones that are
        not pinned."""
        idle = pages[self.refs[pages] == 0]
        return int(self.size[np.setdiff1d(idle, self._idle.kept)].sum())

    def units_left(self, pages: Pages) -> int:
        """Units that could be had, by growth and eviction, if no table held any page but ``pages``: all but theirs, and
        those of pages that are pinned or would be."""
        taken = np.zeros(len(self.refs), np.bool_)
        taken[pages] = taken[self._idle.kept] = True
        let_go = np.flatnonzero(self._findable & (self.refs > 0) & ~taken).astype(np.int32)
        taken[let_go[self._idle.would_pin(let_go)]] = True
        return self.most_units - int(self.size[taken].sum())

    def units_of(self, pages: Pages, size: int) -> Units:
        """Units int32 [n, size] of n pages of one size, in the order of their tokens; page 0 (a hole) gives zeros."""
        units = np.empty((len(pages), size), np.int32)
        units[:, 0] = pages
        for i in range(1, size):
            units[:, i] = self._following[units[:, i - 1]]
        return units

    def prepare(self, units: int) -> None:
        """Grow, if ``units`` units are about to be asked for and fewer are free. What cannot be had stays out of
        ``available``."""
        missing = units - self.free_units
        if missing <= 0 or not self.growable or self._grow is None:
            return
        added = self._grow(min(missing, self.growable))
        if added:
            self._allocator.grow(added)
            self.growable -= added
        else:
            self.growable = 0

    def raise_policy_failure(self) -> None:
        """Report, once, that the eviction policy failed.

        Raises:
            RuntimeError: with the policy's own exception as its cause.
        """
        failure, self._idle.failure = self._idle.failure, None
        if failure is not None:
            raise RuntimeError(
                f"the eviction policy failed ({type(failure).__name__}: {failure}); the pages that it should have "
                "ranked go by their last use, and every request can go on"
            ) from failure

    def shrink(self, units: int) -> bool:
        """Take the last ``units`` units away, if all of them are free. They may come back by ``prepare``."""
        gone = self._allocator.shrink(units)
        if gone:
            self.growable += units
        return gone

    def allocate(self, count: int, size: int = 1, near: int | None = None) -> Pages:
        """``count`` pages of ``size`` units with one reference each; evicts idle pages if too few units are free.

        Precondition: ``count * size <= available``.
        """
        self._require(count * size)
        return self._given_out(self._allocator.allocate(count * size, near), count, size)

    def allocate_each(self, size: int, near: list[int | None]) -> Pages:
        """The same, a page of ``size`` units for each of the units that they had better come right after."""
        self._require(len(near) * size)
        units = np.concatenate([self._allocator.allocate(size, unit) for unit in near])
        return self._given_out(units, len(near), size)

    def _require(self, units: int) -> None:
        assert units <= self.available, f"{units} units asked for, {self.available} available"
        if self.free_units < units:
            self._make_room(units)

    def _given_out(self, units: Units, count: int, size: int) -> Pages:
        """Pages, held once each, of units that are free no longer."""
        last = at = units.astype(np.intp)  # numpy converts other index types far more slowly itself
        if size > 1:
            rows = units.reshape(count, size)
            self._following[rows[:, :-1]] = rows[:, 1:]
            units, at, last = rows[:, 0].copy(), at[::size], at[size - 1 :: size]
        self._following[last] = 0
        self.refs[at] = 1
        self.size[at] = size
        self.generation[at] += 1
        self.held_peak = max(self.held_peak, self.held_units)
        return units

    def retain(self, pages: Pages) -> None:
        """One more leaf lists each of ``pages``, or lists it once more; idle ones come back to life."""
        idle = np.unique(pages[self.refs[pages] == 0])
        if len(idle):
            self._cached -= int(self.size[idle].sum())
            self._idle.remove(idle)
        np.add.at(self.refs, pages, 1)
        self.held_peak = max(self.held_peak, self.held_units)

    def release(self, pages: Pages) -> None:
        """One leaf less lists each of ``pages``. Chain tail first: in that order idle pages will be evicted."""
        np.subtract.at(self.refs, pages, 1)
        assert (self.refs[pages] >= 0).all(), "a page was released more often than it was retained"
        unheld = pages[self.refs[pages] == 0]
        if not len(unheld):
            return
        _, first = np.unique(unheld, return_index=True)
        if len(first) < len(unheld):
            unheld = unheld[np.sort(first)]
        findable = self._findable[unheld]
        idle = unheld[findable]
        if len(idle):
            self._cached += int(self.size[idle].sum())
            self._idle.add(idle)
        self._free(unheld[~findable])

    def publish(
        self,
        page: int,
        node: Node,
        group: int = 0,
        *,
        chained: bool = True,
        priority: int = 0,
        recompute_s: float = 0.0,
    ) -> None:
        """Make a held page findable as ``node``'s.

        Args:
            chained: it must not be evicted before longer prefixes (a page that a window has passed may).
            priority: of the request; recompute_s: predicted seconds to compute the page again.
        """
        self.publish_each([page], [node], group, chained=chained, priorities=[priority], recompute_s=[recompute_s])

    def publish_each(
        self,
        pages: Sequence[int],
        nodes: Sequence[Node],
        group: int,
        *,
        chained: bool,
        priorities: Sequence[int],
        recompute_s: Sequence[float] | NDArray[np.float64],
    ) -> None:
        """The same for several pages, each as the node's at its place; those in front come first."""
        for page, node in zip(pages, nodes, strict=True):
            self.index.attach(page, node, group)
        if chained:
            parents = [node.parent.id if isinstance(node.parent, Node) else 0 for node in nodes]
            self._idle.published_each(pages, [node.id for node in nodes], parents)
        else:
            self._idle.published_each(pages, [self.index.new_number() for _ in pages], [0] * len(pages))
        numbers = np.array(pages, np.intp)
        self._findable[numbers] = True
        nbytes = self.size[numbers].astype(np.int64) * self.unit_bytes
        self.book.publish(numbers, np.array(priorities, np.int64), np.array(recompute_s), nbytes)

    def withdraw(self, pages: Pages) -> None:
        """Held pages cannot be found any more: their memory is about to hold something else."""
        for page in pages[self._findable[pages]].tolist():
            self._idle.forgotten(page)
            self.index.forget(page)
        self._findable[pages] = False

    def unchain(self, pages: Pages) -> None:
        """Held pages, as far as they can be found, may be evicted before longer prefixes from now on, and what is in
        front of them need not be held."""
        for page in pages[self._findable[pages]].tolist():
            self._idle.forgotten(page)
            self._idle.published(page, self.index.new_number(), 0)

    def check(self) -> None:
        """Every unit is in exactly one state, and the counts say so."""
        free, idle = self._allocator.check(), self._idle.check()
        held = np.flatnonzero(self.refs).astype(np.int32)
        if not (self.size[held] > 0).all():
            raise AssertionError(f"pages {held[self.size[held] == 0].tolist()} are held and were never given out")
        listed = np.sort(np.concatenate([free, self._units(np.concatenate([idle, held]))]))
        if not np.array_equal(listed, np.arange(1, 1 + self.total_units)):
            raise AssertionError(
                f"held {self.size[held].sum()} + cached {self.size[idle].sum()} + free {len(free)} units do not "
                f"partition {self.total_units}"
            )
        if self._cached != self.size[idle].sum():
            raise AssertionError(f"{self._cached} units are counted as cached, {self.size[idle].sum()} are")
        missing = [page for page in idle.tolist() if page not in self.index]
        if missing:
            raise AssertionError(f"idle pages {missing} cannot be found by any key")
        findable = [page for page in free.tolist() if page in self.index]
        if findable:
            raise AssertionError(f"free pages {findable} can still be found by a key")
        wrong = [page for page in np.flatnonzero(self._findable).tolist() if page not in self.index]
        if wrong or self._findable.sum() != len(self.index):
            raise AssertionError(f"pages {wrong} are marked as findable and are not")
        if (self.refs < 0).any():
            raise AssertionError("a reference count is negative")
        self.index.check()

    def _make_room(self, wanted: int) -> None:
        """Evict until ``wanted`` units are free."""
        while self.free_units < wanted:
            victims = self._idle.evict(-(-(wanted - self.free_units) // int(self.size.max())))
            for page in victims.tolist():
                if self._on_evict is not None:
                    units = self._units(np.array([page], np.int32))
                    self._on_evict(units, self.index.node(page), self.index.group(page))
                self.index.forget(page)
            self._findable[victims] = False
            self._cached -= int(self.size[victims].sum())
            self._free(victims)
            self.evictions += len(victims)

    def _free(self, pages: Pages) -> None:
        self._allocator.free(self._units(pages))

    def _units(self, pages: Pages) -> Units:
        """All units of pages of any sizes, page by page."""
        if not len(pages):
            return pages
        sizes = self.size[pages]
        most = int(sizes.max())
        units = self.units_of(pages, most)
        return units.ravel() if (sizes == most).all() else units[np.arange(most) < sizes[:, None]]
