"""Pages become findable when they are full and computed, and go to the host tier when they are evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Sequential

import numpy as np

from octavo.core.execution.decode_batch import DecodeBatch
from octavo.core.memory.host_tier import HostTier
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_pool import PagePool, Units
from octavo.core.memory.prefix_cache import Node, PageKey, Parent
from octavo.core.memory.transfer_costs import PageCosts
from octavo.core.sequence import NEVER, Sequence
from octavo.core.shared_list import SharedList


class Publisher:
    """Enters pages in the prefix index of a pool, all that a step has filled at once.

    Args:
        cached: whether there is a prefix cache.
        published: is told of each key that can be found from now on, and of the sequence that computed its page.
    """

    def __init__(
        self,
        pool: PagePool,
        plan: LayerPlan,
        costs: PageCosts,
        host: HostTier | None,
        cached: bool,
        published: Callable[[PageKey, Sequence], None],
    ) -> None:
        self._pool = pool
        self._windows = [group.window for group in plan.groups]
        self._costs = costs
        self._host = host
        self._cached = cached
        self._published = published

    def publish(self, sequences: Iterable[Sequence]) -> None:
        """Make the pages of some sequences findable that are full and are not yet."""
        if not self._cached:
            for sequence in sequences:
                sequence.full_at = NEVER
            return
        filled = [(s, len(s.nodes), s.findable_pages(s.computed)) for s in dict.fromkeys(sequences)]
        for sequence, _, full in filled:
            sequence.full_at = sequence.layout.end_token(full)
        try:
            self._publish(filled)
        except BaseException:
            self._take_back(filled)
            raise
        for sequence, done, full in filled:
            if sequence.shelf is not None:
                self._pool.unchain(sequence.table.pages(done, full))

    def _publish(self, filled: list[tuple[Sequence, int, int]]) -> None:
        """Publish of each sequence the pages from one to another (exclusive)."""
        entered: list[tuple[Node, list[int], int]] = []  # node, its page in each group of layers, priority
        for sequence, done, full in filled:
            for node, pages in self._enter(sequence, done, full):
                entered.append((node, pages, sequence.request.priority))
        for group in range(len(self._windows)):
            found: dict[int, tuple[Node, int]] = {}  # page -> node, priority
            for node, pages, priority in entered:
                if pages[group] and pages[group] not in self._pool.index:
                    found.setdefault(pages[group], (node, priority))
            if found:
                nodes, priorities = zip(*found.values(), strict=True)
                self._make_findable(list(found), nodes, group, priorities)

    def _take_back(self, filled: list[tuple[Sequence, int, int]]) -> None:
        """Leave to a later step what could not be published; what has been entered for it and has no page goes."""
        for sequence, done, _ in filled:
            entered = sequence.nodes[done:]
            sequence.nodes, sequence.full_at = SharedList(sequence.nodes[:done]), 0
            for node in reversed(entered):
                self._pool.index.prune(node)

    def publish_filled(self, batch: DecodeBatch) -> None:
        """Publish what a batch has filled, once the step behind it is under way."""
        rows = batch.filled
        if len(rows):
            members = [batch.sequences[row] for row in rows.tolist()]
            self.publish(sequence for sequence in members if sequence.computed >= sequence.full_at)
            batch.fills[rows] = [sequence.full_at for sequence in members]

    def _enter(self, sequence: Sequence, done: int, full: int) -> Iterator[tuple[Node, list[int]]]:
        """Give a sequence the nodes of its pages ``done`` to ``full`` (exclusive); with each comes which page that is
        in each group of layers. Where that has failed before, some of them may be gone by now, behind a window."""
        front: Parent = sequence.nodes[-1] if done else sequence.request.root
        layout = sequence.layout
        for number, (key, content) in enumerate(sequence.keyed(done, full), done):
            pages = [table.page(number) for table in sequence.tables]
            lent = not any(pages) or layout.lent(number)
            front = node = self._pool.index.enter(key, front, *content, lent=lent)
            sequence.nodes.append(node)
            self._published(key, sequence)
            yield node, pages

    def make_findable(self, page: int, node: Node, group: int, priority: int) -> None:
        """Make a page findable as a node's, in a group of layers."""
        self._make_findable([page], [node], group, [priority])

    def demote(self, units: Units, node: Node, group: int) -> None:
        """Let the host tier have a page that is being evicted, if bringing it back is cheaper than computing it, or if
        pages that are there can only be reached through it: of a chain the tail goes first, and costs most."""
        assert self._host is not None
        nbytes = len(units) * self._pool.unit_bytes
        needed = not self._windows[group] and self._host.leads_on(node, group)
        if node.host[group] or needed or self._costs.restore_is_cheaper(nbytes, node.end - node.start, node.start):
            self._host.store(units, node, group)

    def _make_findable(
        self, pages: Sequential[int], nodes: Sequential[Node], group: int, priorities: Sequential[int]
    ) -> None:
        """Behind a window a page may be evicted before what comes after it."""
        starts, ends = np.array([(node.start, node.end) for node in nodes], np.float64).T
        seconds = self._costs.recompute_seconds(ends - starts, starts)
        chained = not self._windows[group]
        self._pool.publish_each(pages, nodes, group, chained=chained, priorities=priorities, recompute_s=seconds)
