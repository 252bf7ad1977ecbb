"""Which sequences of a decoding batch share the head of their block tables, so that it is read once for all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Sequential
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from octavo.core.memory.page_pool import Pages
from octavo.core.sequence import Sequence


@dataclass(frozen=True)
class SharedRuns:
    """What a batch shares.

    Attributes:
        groups: int32 [4, b + 1] as the op ``decode_shared`` takes them; ``kernels/reference/shared.py`` draws them.
        spared: slots that each KV head of a layer need not read, in closed form: the sum over the groups of (n - 1) * P
            for n sequences that share P slots.
    """

    groups: NDArray[np.int32]
    spared: int


class RunFinder:
    """Finds the runs of a batch, step after step.

    Forks share pages and so do hits in the prefix cache; whichever it was, two tables list the same pages at their
    heads. The known sequences are kept in the order of their pages, as strings are in a dictionary, with the number of
    pages that each has in common with the one in front of it::

        pages          common
        1 2 3 4        0            what any two share is the least ``common`` of those behind the first,
        1 2 3 5 6      3            up to the second
        1 2 7          2
        8 9            0

    A sequence comes in with the pages that are full when it first decodes; what it fills from then on are pages of its
    own. It leaves when it stops running or when a page of those is replaced. So a step costs a look at each sequence,
    and pages are compared only where somebody comes in; while the same sequences decode, the answer stays the same.

    Args:
        page_tokens: tokens of a page.
        cost: of a group, in tokens that need not be read: it spares more, or there is no group.
    """

    def __init__(self, page_tokens: int, cost: int) -> None:
        self._page_tokens = page_tokens
        self._cost = cost
        self._order: list[_Known] = []
        self._known: dict[Sequence, _Known] = {}
        self._asked: list[Sequence] | None = None
        self._answer: SharedRuns | None = None

    def forget(self, running: Sequential[Sequence]) -> None:
        """Let go of sequences that do not run any more, and of those whose pages have changed since the last step.

        To be called before ``DeviceTables.sync``, which brings ``stale_from`` up to date.
        """
        known_of = self._known
        gone = known_of.keys() - set(running)
        gone |= {s for s in running if s in known_of and s.table.stale_from < len(known_of[s].pages)}
        for sequence in gone:
            known = known_of.pop(sequence)
            at = self._order.index(known)
            if at + 1 < len(self._order):
                self._order[at + 1].common = min(known.common, self._order[at + 1].common)
            del self._order[at]
        if gone:
            self._asked = None

    def find(self, sequences: list[Sequence], positions: Sequential[int] | NDArray[np.int64]) -> SharedRuns | None:
        """The runs of sequences with queries at these positions, in their order; None if nothing is worth sharing.

        Every query stands behind the pages that its sequence comes in with, and so behind every run.
        """
        if sequences != self._asked:
            for sequence, position in zip(sequences, positions, strict=True):
                if sequence not in self._known:
                    self._come_in(sequence, int(position))
            self._answer = self._choose(sequences)
            self._asked = list(sequences)
        return self._answer

    def _come_in(self, sequence: Sequence, position: int) -> None:
        pages = sequence.table.pages(0, position // self._page_tokens)
        known = _Known(sequence, pages.tobytes(), pages)
        at = bisect_left(self._order, known.key, key=attrgetter("key"))
        self._known[sequence] = known
        self._order.insert(at, known)
        if at > 0:
            known.common = _common(self._order[at - 1].pages, pages)
        if at + 1 < len(self._order):
            self._order[at + 1].common = _common(pages, self._order[at + 1].pages)

    def _choose(self, sequences: list[Sequence]) -> SharedRuns | None:
        if not any(known.common for known in self._order):
            return None
        row_of = {sequence: row for row, sequence in enumerate(sequences)}
        rows, common = [], []
        least = 0
        for known in self._order:
            least = min(least, known.common)
            row = row_of.get(known.sequence)
            if row is not None:
                rows.append(row)
                common.append(least * self._page_tokens)
                least = len(known.pages)
        chosen = [run for run in choose_runs(common, self._cost) if len(run.places) > 1]
        if not chosen:
            return None
        groups = np.zeros((4, len(rows) + 1), np.int32)
        members, bounds, shared, own = groups
        stop = 0
        for number, run in enumerate(chosen):
            of_run = [rows[place] for place in run.places]
            members[stop : stop + len(of_run)] = of_run
            stop += len(of_run)
            bounds[number + 1 :] = stop
            shared[number] = run.tokens
            own[of_run] = run.tokens
        members[stop:-1] = np.flatnonzero(own[:-1] == 0)
        return SharedRuns(groups, sum((len(run.places) - 1) * run.tokens for run in chosen))


@dataclass(eq=False, slots=True)
class _Known:
    """A sequence with the pages that it came in with; ``key`` are their bytes, which sort so that the more pages two
    have in common, the closer they are. ``common`` pages are those of the one in front."""

    sequence: Sequence
    key: bytes
    pages: Pages
    common: int = 0


@dataclass(slots=True)
class Run:
    """Sequences at ``places`` of the order that share their first ``tokens`` tokens. ``gain`` is what it spares, less
    what a group costs; a sequence by itself has no gain and costs nothing."""

    places: list[int]
    tokens: int
    gain: int


def choose_runs(common: list[int], cost: int) -> list[Run]:
    """One run a sequence, at most, so that much is spared: (n - 1) * P - ``cost`` tokens by n sequences sharing P.

    ``common[i]`` are the tokens that sequence i shares with sequence i - 1, in an order as ``RunFinder`` keeps it.

    The sequences are the leaves of a tree that branches where tables part. From the deepest branching point up, what
    was found below either stays as it is or joins a run that ends at this point, whichever spares more: n sequences
    that join spare n * P, except that the run itself must be read once and costs. ``open`` are the branching points
    from the root to the present sequence, each with what was found below it so far::

        common  -  96  96  32  32 |                    open
                0   1   2   3   4 |                    (0, [])  (32, [run of 0 1 2 at 96, 3, 4])
    """
    open_points: list[tuple[int, list[Run]]] = [(0, [])]
    for place in range(len(common)):
        found = [Run([place], 0, 0)]
        depth = common[place + 1] if place + 1 < len(common) else 0
        while depth < open_points[-1][0]:
            ended, below = open_points.pop()
            found = _joined(below + found, ended, cost)
        if depth > open_points[-1][0]:
            open_points.append((depth, found))
        else:
            open_points[-1][1].extend(found)
    return open_points[0][1]


def _joined(below: list[Run], tokens: int, cost: int) -> list[Run]:
    """The runs at a branching point after ``tokens`` tokens: those from below, or one of all that had better join."""
    joining = [run for run in below if len(run.places) * tokens > run.gain]
    places = [place for run in joining for place in run.places]
    gain = (len(places) - 1) * tokens - cost
    if gain <= sum(run.gain for run in joining):
        return below
    staying = [run for run in below if len(run.places) * tokens <= run.gain]
    return [*staying, Run(places, tokens, gain)]


def _common(a: Pages, b: Pages) -> int:
    """Leading pages that are the same."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n
