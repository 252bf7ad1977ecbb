"""Who holds which page of the pool: reference counts, idle pages, and their eviction."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces import Allocator, EvictionPolicy
from octavo.core.prefix_cache import PrefixCache

Pages = NDArray[np.int32]


class PagePool:
    """Pages by their first unit, in exactly one of three states::

        held    refs > 0                     listed by a leaf of a live block table
        cached  refs = 0, in the index       idle; findable by its key until it is evicted
        free    refs = 0, not in the index   on the allocator's list

    ``refs[page]`` counts the distinct leaves that list the page, not tables and not table slots. ``generation[page]``
    goes up whenever the page is given to somebody, so that whoever keeps something about a page (a digest) can see
    that it is about older contents.
    """

    def __init__(
        self, pages: int, page_units: int, allocator: Allocator, eviction: EvictionPolicy, index: PrefixCache
    ) -> None:
        self.page_units = page_units
        self.total_pages = pages
        self.index = index
        self.refs = np.zeros(pages * page_units + 1, np.int32)
        self.generation = np.zeros(pages * page_units + 1, np.int64)
        self.evictions = 0
        self.held_peak = 0
        self._allocator = allocator
        self._eviction = eviction

    @property
    def free_pages(self) -> int:
        return self._allocator.free_pages

    @property
    def cached_pages(self) -> int:
        return len(self._eviction)

    @property
    def held_pages(self) -> int:
        return self.total_pages - self.available

    @property
    def available(self) -> int:
        """Pages that can be had at once: the free ones, and the idle ones by eviction."""
        return self.free_pages + self.cached_pages

    def idle_among(self, pages: Pages) -> int:
        """How many of some findable pages are idle: retaining them takes so many from ``available``."""
        return int((self.refs[pages] == 0).sum())

    def allocate(self, count: int) -> Pages:
        """``count`` pages with one reference each; evicts idle pages if too few are free.

        Precondition: ``count <= available``.
        """
        assert count <= self.available, f"{count} pages asked for, {self.available} available"
        missing = count - self.free_pages
        if missing > 0:
            victims = self._eviction.evict(missing)
            for page in victims:
                self.index.forget(page)
            self._allocator.free(np.asarray(victims, np.int32))
            self.evictions += missing
        pages = self._allocator.allocate(count)
        self.refs[pages] = 1
        self.generation[pages] += 1
        self.held_peak = max(self.held_peak, self.held_pages)
        return pages

    def retain(self, pages: Pages) -> None:
        """One more leaf lists each of ``pages`` (each at most once in the array); idle ones come back to life."""
        idle = pages[self.refs[pages] == 0]
        if len(idle):
            self._eviction.remove(idle.tolist())
        self.refs[pages] += 1
        self.held_peak = max(self.held_peak, self.held_pages)

    def release(self, pages: Pages) -> None:
        """One leaf less lists each of ``pages``. Chain tail first: in that order idle pages will be evicted."""
        self.refs[pages] -= 1
        assert (self.refs[pages] >= 0).all(), "a page was released more often than it was retained"
        unheld = pages[self.refs[pages] == 0].tolist()
        self._eviction.add(page for page in unheld if page in self.index)
        self._allocator.free(np.asarray([page for page in unheld if page not in self.index], np.int32))

    def check(self) -> None:
        """Every page is in exactly one state, and the counts say so."""
        free, idle = self._allocator.check(), self._eviction.check()
        held = np.flatnonzero(self.refs)
        listed = np.sort(np.concatenate([free, idle, held]))
        expected = np.arange(1, 1 + self.total_pages * self.page_units, self.page_units)
        if not np.array_equal(listed, expected):
            raise AssertionError(
                f"held {len(held)} + cached {len(idle)} + free {len(free)} pages do not partition {len(expected)}"
            )
        missing = [page for page in idle.tolist() if page not in self.index]
        if missing:
            raise AssertionError(f"idle pages {missing} cannot be found by any key")
        findable = [page for page in free.tolist() if page in self.index]
        if findable:
            raise AssertionError(f"free pages {findable} can still be found by a key")
        if (self.refs < 0).any():
            raise AssertionError("a reference count is negative")
        self.index.check()
