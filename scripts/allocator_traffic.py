"""Page traffic of many sequences, the same for every allocator, and whoever can serve it."""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces import Allocator
from octavo.core.policies.allocators import ALLOCATORS

VLLM = "vllm"

SEQUENCE_PAGES = 32
"""Pages at which a sequence ends and gives all of them back."""

STEPS_A_PAGE = 16
"""Steps in which a sequence fills a page, one token a step."""

LIFETIME = SEQUENCE_PAGES * STEPS_A_PAGE
"""Steps of a sequence."""

BULK_PAGES, BULK_CALLS = 2048, 200

MIXES = {"1": (1,), "1:1.5": (2, 3), "1:4": (1, 4)}
"""Page sizes in one pool -> units of each. Text of 16 tokens and images of 24: units of 8; 16 and 64: units of 16."""


@dataclass(frozen=True)
class Step:
    """Sequences that end, then those that grow by one page: of each size, in the order of its mix."""

    ended: list[int]
    growing: tuple[list[int], ...]


@dataclass(frozen=True)
class Traffic:
    """What happens, step by step, to sequences that begin with ``first[size][sequence]`` pages of one size each."""

    mix: tuple[int, ...]
    first: tuple[dict[int, int], ...]
    steps: tuple[Step, ...]
    peak_units: int


def traffic(mix: tuple[int, ...], sequences: int, steps: int, seed: int) -> Traffic:
    """Sequences at all points of their life. Whoever ends begins again at once, empty, with pages of a size drawn anew.

    No allocator is asked, so that each serves the same.
    """
    random = np.random.default_rng(seed)
    pages = random.integers(0, SEQUENCE_PAGES + 1, sequences)
    phase = random.integers(0, STEPS_A_PAGE, sequences)
    size = random.integers(0, len(mix), sequences)
    units = np.array(mix)
    first = tuple({int(who): int(pages[who]) for who in np.flatnonzero(size == kind)} for kind in range(len(mix)))
    peak = int((pages * units[size]).sum())
    found = []
    for number in range(steps):
        due = np.flatnonzero((phase + number) % STEPS_A_PAGE == 0)
        ended = due[pages[due] == SEQUENCE_PAGES]
        pages[ended] = 0
        size[ended] = random.integers(0, len(mix), len(ended))
        pages[due] += 1
        growing = tuple(due[size[due] == kind].tolist() for kind in range(len(mix)))
        found.append(Step(ended.tolist(), growing))
        peak = max(peak, int((pages * units[size]).sum()))
    return Traffic(mix, first, tuple(found), peak)


class Contender(Protocol):
    """Allocates pages with one reference each, and releases them. A page is whatever it says a page is."""

    def allocate(self, pages: int, page_units: int) -> Sequence[Any]: ...

    def together(self, pages: Sequence[Any]) -> Any:
        """Pages, of one call or of several, as ``release`` takes them: each has its own form of a block table."""
        ...

    def release(self, pages: Any) -> None: ...


class Octavo:
    """An allocator and the reference counts beside it, as the page pool keeps them. A page is its units."""

    def __init__(self, name: str, total_units: int) -> None:
        self.allocator: Allocator = ALLOCATORS[name](total_units)
        self._refs = np.zeros(total_units + 1, np.int32)

    def allocate(self, pages: int, page_units: int) -> NDArray[np.int32]:
        """int32 [pages, page_units]."""
        found = self.allocator.allocate(pages * page_units).reshape(pages, page_units)
        self._refs[found[:, 0].astype(np.intp)] = 1
        return found

    def together(self, pages: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """First unit of each page, and the units of all."""
        if isinstance(pages, np.ndarray):
            return pages[:, 0], pages.ravel()
        return np.array([page[0] for page in pages], np.int32), np.concatenate(pages)

    def release(self, pages: tuple[NDArray[np.int32], NDArray[np.int32]]) -> None:
        firsts, units = pages
        at = firsts.astype(np.intp)
        refs = self._refs.take(at) - 1
        self._refs[at] = refs
        assert np.count_nonzero(refs) == 0, "a page of this traffic has one holder"
        self.allocator.free(units)


class BlockPool:
    """vLLM's, with its prefix cache off. A page is one block object, which counts its own references."""

    def __init__(self, total_units: int) -> None:
        from vllm.v1.core.block_pool import BlockPool as Pool

        self._pool = Pool(total_units + 1, enable_caching=False, hash_block_size=16)  # one block is its own

    def allocate(self, pages: int, page_units: int) -> list[Any]:
        assert page_units == 1
        blocks: list[Any] = self._pool.get_new_blocks(pages)
        return blocks

    def together(self, pages: Sequence[Any]) -> Sequence[Any]:
        return pages

    def release(self, pages: Sequence[Any]) -> None:
        self._pool.free_blocks(pages)


def contender(name: str, total_units: int) -> Contender:
    return BlockPool(total_units) if name == VLLM else Octavo(name, total_units)


def vllm_is_missing() -> str | None:
    """Why vLLM's pool cannot take part."""
    if importlib.util.find_spec("vllm") is None:
        return "it is not installed"
    try:
        import vllm.v1.core.block_pool  # noqa: F401
    except ImportError as error:
        return f"its block pool cannot be imported: {error}"
    return None


@dataclass(frozen=True)
class Outing:
    """One pass. operations: pages allocated and pages released; call_seconds: of each step's calls together."""

    operations: int
    call_seconds: list[float]


def bulk(who: Contender, pages: int = BULK_PAGES, calls: int = BULK_CALLS) -> Outing:
    """Allocate ``pages`` at once and release them, over and over."""
    seconds = []
    with _no_collector():
        for _ in range(calls):
            start = time.perf_counter()
            who.release(who.together(who.allocate(pages, 1)))
            seconds.append(time.perf_counter() - start)
    return Outing(2 * pages * calls, seconds)


def replay(
    who: Contender, traffic: Traffic, look: Callable[[int, list[Any], dict[int, list[Any]]], None] | None = None
) -> Outing:
    """Serve the traffic: in each step one call releases all pages of the sequences that ended, and one call a page
    size allocates those of all that grow.

    Args:
        look: is shown, after each step and outside the time taken, its number, what the calls gave, and all tables.
    """
    tables: dict[int, list[Any]] = {}
    for page_units, sequences in zip(traffic.mix, traffic.first, strict=True):
        for sequence, pages in sequences.items():
            tables[sequence] = list(who.allocate(pages, page_units))
    operations = 0
    seconds = []
    with _no_collector():
        for number, step in enumerate(traffic.steps):
            gone = [page for sequence in step.ended for page in tables[sequence]]
            operations += len(gone) + sum(map(len, step.growing))
            calls = [(len(growing), units) for units, growing in zip(traffic.mix, step.growing, strict=True) if growing]
            released = who.together(gone) if gone else None  # tables are their holders' business, and not timed
            start = time.perf_counter()
            if released is not None:
                who.release(released)
            given = [who.allocate(pages, page_units) for pages, page_units in calls]
            seconds.append(time.perf_counter() - start)
            for sequence in step.ended:
                tables[sequence] = []
            for growing, pages in zip(filter(None, step.growing), given, strict=True):
                for sequence, page in zip(growing, pages, strict=True):
                    tables[sequence].append(page)
            if look is not None:
                look(number, given, tables)
    return Outing(operations, seconds)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Without Python's cyclic garbage collector, whose pauses would fall on whoever happens to run."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class Waste:
    """How the units of a pool lie, over one lifetime of the sequences: the last ``LIFETIME`` steps of the traffic.

    A *split* page or call is one whose units are not one run. *External waste* are free units in runs too short for
    the largest page, or left over behind the last one that a run holds. *Internal waste* are units that are held but
    belong to no page.
    """

    def __init__(self, allocator: Allocator, traffic: Traffic) -> None:
        self._allocator = allocator
        self._largest = max(traffic.mix)
        self._begin = max(0, len(traffic.steps) - LIFETIME)
        self._pages = self._split_pages = self._calls = self._split_calls = self._runs = self._units = 0
        self._free: list[int] = []
        self._useless: list[int] = []
        self._internal = 0

    def look(self, number: int, given: list[Any], tables: dict[int, list[Any]]) -> None:
        if number < self._begin:
            return
        for pages in given:
            self._pages += len(pages)
            self._split_pages += int((np.diff(pages) != 1).any(axis=1).sum())
            runs = 1 + int((np.diff(pages.ravel()) != 1).sum())
            self._calls += 1
            self._split_calls += runs > 1
            self._runs += runs
            self._units += pages.size
        if number % STEPS_A_PAGE == 0:
            free = self._allocator.check()
            lengths = np.diff(np.flatnonzero(np.diff(free, prepend=-1, append=-1) != 1)) if len(free) else free
            self._free.append(len(free))
            self._useless.append(int((lengths % self._largest).sum()))
            listed = sum(page.size for table in tables.values() for page in table)
            self._internal = max(self._internal, self._allocator.total_units - len(free) - listed)

    def found(self) -> dict[str, Any]:
        """The keys of a sample."""
        return {
            "pages": self._pages,
            "split_pages": self._split_pages,
            "calls": self._calls,
            "split_calls": self._split_calls,
            "runs": self._runs,
            "units": self._units,
            "free_units": sum(self._free),
            "external_waste_units": sum(self._useless),
            "internal_waste_units": self._internal,
        }
