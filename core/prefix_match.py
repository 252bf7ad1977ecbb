"""What a prefix cache, the host tier and images seen before have of a sequence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.core.encoding.sources import Loan, find_loans, find_nodes, lent_nodes
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_pool import Pages
from octavo.core.memory.prefix_cache import Node, PageKey, PrefixCache
from octavo.core.sequence import Sequence


class PrefixMatch(NamedTuple):
    """Findable pages at the head of a sequence: their nodes, the pages of each group of layers (0 where nobody will
    see them, or where they are in the host tier), and the key of the first page that was not found.

    ``holders`` are the nodes whose pages those are: the same, but for pages that are lent, whose KV has a prefix of its
    own. ``restores`` are (page number, group) of the pages to be brought back from the host tier. ``loans`` are the
    images behind the hit whose KV is reused, and ``missing_sources`` compute what is not there of it.
    """

    nodes: list[Node]
    pages: list[Pages]
    restores: list[tuple[int, int]]
    missing: PageKey | None
    holders: list[Node]
    loans: list[Loan]
    missing_sources: list[Sequence]

    @property
    def hit_pages(self) -> Pages:
        """The pages of the hit that are on the device, of all groups."""
        joined = np.concatenate(self.pages) if self.pages else np.empty(0, np.int32)
        return joined[joined > 0]

    @property
    def device_pages(self) -> Pages:
        """These, and those of the images behind it."""
        return np.concatenate([self.hit_pages, *(loan.pages for loan in self.loans)])


def match_prefix(sequence: Sequence, index: PrefixCache, plan: LayerPlan, publishes: bool) -> PrefixMatch:
    """Look a sequence up in the index, if the engine ``publishes`` pages at all. Changes nothing; the pages are not
    held.

    A prefix is found as far as its nodes are known and every group of layers has the pages that the next query will
    see: all of them, or those that its window touches. Reused images behind it are looked up by their sources.
    """
    layout = sequence.layout
    wanted = layout.full_pages(max(0, sequence.findable_tokens())) if publishes else 0
    keys = sequence.keys(wanted)
    nodes = find_nodes(sequence, wanted, index)
    lent = {} if layout.uniform else lent_nodes(sequence, len(nodes), index)
    holders = [lent.get(number, node) for number, node in enumerate(nodes)]
    found = _longest_kept(sequence, holders, plan)
    nodes, holders = nodes[:found], holders[:found]
    pages, restores = [], []
    for number in range(len(plan.groups)):
        start = sequence.first_seen(number, layout.first_token(found)) if found else 0
        pages.append(np.array([0] * start + [node.page(number) for node in holders[start:]], np.int32))
        restores += [(page, number) for page in range(start, found) if not holders[page].pages[number]]
    missing = keys[found] if found < len(keys) else None
    loans, sources = ([], []) if layout.uniform else find_loans(sequence, layout.first_token(found), index)
    return PrefixMatch(nodes, pages, restores, missing, holders, loans, sources)


def _longest_kept(sequence: Sequence, nodes: list[Node], plan: LayerPlan) -> int:
    """How many of the nodes' pages can be used: the largest number such that no item that is bidirectional or reused,
    and no block of queries, is split, and every group still has what is seen."""
    layout = sequence.layout

    def kept(page: int, group: int) -> bool:
        return bool(nodes[page].pages[group] or nodes[page].host[group])

    full = [number for number, group in enumerate(plan.groups) if not group.window]
    windowed = [number for number, group in enumerate(plan.groups) if group.window]
    found = next((page for page in range(len(nodes)) if not all(kept(page, group) for group in full)), len(nodes))
    while found:
        end = sequence.whole(layout.first_token(found))
        found = layout.pages_for(end)
        gone = [
            page
            for group in windowed
            for page in range(sequence.first_seen(group, end), found)
            if not kept(page, group)
        ]
        if not gone:
            break
        found = max(gone)
    return found
