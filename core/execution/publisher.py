"""Pages become findable when they are full and computed, and go to the host tier when they are evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequential

from octavo.core.memory.host_tier import HostTier
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_pool import PagePool, Units
from octavo.core.memory.prefix_cache import Node, PageKey, Parent
from octavo.core.memory.transfer_costs import PageCosts
from octavo.core.sequence import NEVER, Sequence


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
        found: list[dict[int, tuple[Node, int]]] = [{} for _ in self._windows]  # by group: page -> node, priority
        unchained, index = [], self._pool.index
        for sequence in sequences:
            if not self._cached:
                sequence.full_at = NEVER
                continue
            layout, priority = sequence.layout, sequence.request.priority
            done, full = len(sequence.nodes), sequence.findable_pages(sequence.computed)
            sequence.full_at = layout.end_token(full)
            if done == full:
                continue
            front: Parent = sequence.nodes[-1] if done else sequence.request.root
            for number, (key, content) in enumerate(sequence.keyed(done, full), done):
                front = node = index.enter(key, front, *content, lent=layout.lent(number))
                sequence.nodes.append(node)
                self._published(key, sequence)
                for pages, table in zip(found, sequence.tables, strict=True):
                    if (page := table.page(number)) not in index:
                        pages.setdefault(page, (node, priority))
            if sequence.shelf is not None:
                unchained.append(sequence.table.pages(done, full))
        for group, pages in enumerate(found):
            if pages:
                nodes, priorities = zip(*pages.values(), strict=True)
                self._make_findable(list(pages), nodes, group, priorities)
        for pages_away in unchained:
            self._pool.unchain(pages_away)

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
        seconds = [self._costs.recompute_seconds(node.end - node.start, node.start) for node in nodes]
        chained = not self._windows[group]
        self._pool.publish_each(pages, nodes, group, chained=chained, priorities=priorities, recompute_s=seconds)
