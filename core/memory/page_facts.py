"""What is known of every page, kept up to date for the eviction policies."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces import PageFacts

Pages = NDArray[np.int32]


class FactsBook:
    """Owns the ``PageFacts`` of a pool of ``units`` units, and the ``clock`` that dates them.

    ``history`` is the number of uses of a page to remember (``EvictionPolicy.history``). A use begins with the page's
    publication or with a prefix hit (``touch``) and lasts until nobody holds the page (``release``)::

        clock       3 ............ 9       20 ... 25
        page        publish  release       touch  release
        history [3, -1]                    [20, 3]              when uses began, latest first
        last_used   3              9       20     25            up to when the page was used

    A hit must touch the whole chain up to the last page that was found, and so must a request that goes on with the
    table of an earlier one. Then a page has at least the uses and the priority of every page that was reached through
    it and was last used no earlier, so what a policy reads in these facts falls along a chain, from head to tail.
    """

    def __init__(self, units: int, history: int = 1) -> None:
        assert history >= 1, f"a page's history needs at least 1 entry, not {history}"
        self.clock = 0
        self.facts = _blank(units + 1, history)

    def publish(
        self,
        pages: NDArray[np.integer],
        priority: NDArray[np.int64] | int,
        recompute_s: NDArray[np.float64] | float,
        nbytes: NDArray[np.int64] | int,
    ) -> None:
        """New contents became findable, which is their first use: what was known of the pages before is void.

        ``priority`` is the request's, ``recompute_s`` seconds and ``nbytes`` bytes of each page (> 0).
        """
        facts = self.facts
        facts.published[pages] = facts.last_used[pages] = self.clock
        facts.uses[pages] = 1
        facts.history[pages] = -1
        facts.history[pages, 0] = self.clock
        facts.priority[pages] = priority
        facts.recompute_s[pages] = recompute_s
        facts.nbytes[pages] = nbytes

    def touch(self, pages: Pages, priority: NDArray[np.int64] | int) -> None:
        """One more use of each of ``pages`` (each at most once in the array) begins, by a request of ``priority``."""
        facts = self.facts
        facts.last_used[pages] = self.clock
        facts.uses[pages] += 1
        facts.history[pages, 1:] = facts.history[pages, :-1]
        facts.history[pages, 0] = self.clock
        facts.priority[pages] = np.maximum(facts.priority[pages], priority)

    def release(self, pages: Pages) -> None:
        """Nobody holds ``pages`` any more. Every step until now has read them, so they were last used just now."""
        self.facts.last_used[pages] = self.clock

    def grow(self, units: int) -> None:
        """Room for ``units`` more units at the end."""
        more = _blank(units, self.facts.history.shape[1])
        for field in fields(PageFacts):
            both = np.concatenate([getattr(self.facts, field.name), getattr(more, field.name)])
            setattr(self.facts, field.name, both)


def _blank(entries: int, history: int) -> PageFacts:
    """Facts of pages that were never published."""
    return PageFacts(
        published=np.full(entries, -1, np.int64),
        last_used=np.full(entries, -1, np.int64),
        uses=np.zeros(entries, np.int64),
        history=np.full((entries, history), -1, np.int64),
        priority=np.zeros(entries, np.int64),
        recompute_s=np.zeros(entries, np.float64),
        nbytes=np.zeros(entries, np.int64),
    )
