"""Run recorded page traffic through the real pool, block tables and prefix cache, without a model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import closest
from octavo.core.inspection.trace import Event
from octavo.core.interfaces import EvictionPolicy
from octavo.core.memory.block_table import BlockTable
from octavo.core.memory.page_layout import PageLayout
from octavo.core.memory.page_pool import PagePool, Pages
from octavo.core.memory.prefix_cache import Node, Parent, PrefixCache
from octavo.core.policies import ALLOCATORS, EVICTIONS
from octavo.core.policies.belady import NEVER, Belady
from octavo.scripts.paged_trace import PagedTrace
from octavo.scripts.timed_allocator import TimedAllocator

BELADY = "belady"

ATTENTION_TOKENS = 4096
"""Tokens in front of a token at which attending to them takes as long as its linear layers: about right for the
embedded model, where 2 x 135 M operations meet 4 x 30 layers x 9 heads x 64 a token in front."""


@dataclass(frozen=True)
class Lookups:
    """Every look-up of a prefix: when, how many tokens were looked for, and how many were found."""

    time_s: NDArray[np.float64]
    asked: NDArray[np.int64]
    found: NDArray[np.int64]


@dataclass(frozen=True)
class Replay:
    """What a replay saw. Memory is looked at once a step, when the step has stored its tokens.

    Attributes:
        hit_tokens, query_tokens: found in the cache, and looked up, by sequences that did not fail at it.
        evictions: pages.
        failures: sequences that left, because a pool with nothing idle in it was too small for them.
        reclaimed: parked sequences whose pages were taken.
        units_total, units_held_peak: of the pool; units_used_peak: the most that are held or cached.
        utilisation: used slots over held slots, each step weighted by the time until the next; utilisation_at_peak:
            the same when most units are held.
        held_slot_steps, waste_slot_steps: slots of held pages, and the empty ones of them, summed over the steps.
        predicted_waste_slot_steps: the closed form for each sequence alone; equal to what is measured where
            nobody shares a page that is partly filled.
        mean_run_units: units that lie side by side, on average, as the allocator gave them out.
        allocator_s: seconds in the allocator.
        lookups: of all sequences that looked for a prefix, in order.
    """

    hit_tokens: int
    query_tokens: int
    evictions: int
    failures: int
    reclaimed: int
    units_total: int
    units_held_peak: int
    units_used_peak: int
    utilisation: float
    utilisation_at_peak: float
    held_slot_steps: int
    waste_slot_steps: int
    predicted_waste_slot_steps: int
    mean_run_units: float
    allocator_s: float
    lookups: Lookups = field(repr=False)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


def replay(
    paged: PagedTrace,
    *,
    pool_tokens: int,
    allocator: str = "stack",
    eviction: str | EvictionPolicy = "lru",
    check: bool = False,
) -> Replay:
    """Replay a trace on a pool of ``pool_tokens`` slots, rounded up to whole text pages.

    Events are followed in their order, as the engine's scheduler would:

    1. A sequence that opens, or that has lost its pages, looks for its prefix when it grows, and holds what it finds.
    2. Growth copies a shared page before writing to it, and takes what pages it lacks. Units come from the free ones,
       then from idle pages by the eviction policy, then from parked sequences, those parked longest first. If that is
       not enough, the sequence *fails*: it gives back what it holds, and the rest of its events are ignored.
    3. When a step has grown all its sequences, the pages that it filled become findable.
    4. Forks share the pages of their parents; closing gives pages back, chain tail first.

    One group of layers; a window would keep fewer pages.

    Args:
        eviction: a name, "belady" among them, or a policy.
        check: walk the pool after every event (slow).

    Raises:
        ValueError: a pool without a page, or an unknown name.
    """
    return _Machine(paged, pool_tokens, allocator, eviction).run(check)


@dataclass(eq=False)
class _Live:
    """A sequence that has begun: see ``octavo.core.sequence.Sequence``. ``reusable`` is None once it has looked for
    its prefix."""

    number: int
    layout: PageLayout
    table: BlockTable
    reusable: int | None
    computed: int = 0
    predicted: int = 0
    nodes: list[Node] = field(default_factory=list)


class _Machine:
    """The state of one replay. ``filled`` counts the tokens in each page, by its first unit; ``samples`` are time, held
    and used slots, and predicted waste of each step."""

    def __init__(self, paged: PagedTrace, pool_tokens: int, allocator: str, eviction: str | EvictionPolicy) -> None:
        if pool_tokens < 1:
            raise ValueError(f"pool_tokens must be at least 1, got {pool_tokens}")
        units = -(-pool_tokens // paged.page_tokens) * paged.page_tokens // paged.unit_tokens
        self.paged, self.trace = paged, paged.trace
        self.allocator = TimedAllocator(_named("allocator", allocator, ALLOCATORS)(units))
        self.index = PrefixCache()
        # Costs are compared a byte, and all tokens have as many: a token's count as one.
        self.pool = PagePool(self.allocator, self._policy(eviction), self.index, unit_bytes=paged.unit_tokens)
        self.live: dict[int, _Live] = {}
        self.parked: dict[int, _Live] = {}
        self.grown: list[_Live] = []
        self.filled = np.zeros(units + 1, np.int64)
        self.predicted = 0
        self.at = 0
        self.time_s = 0.0
        self.failures = self.reclaimed = self.used_peak = 0
        self.lookups: list[tuple[float, int, int]] = []
        self.samples: list[tuple[float, int, int, int]] = []

    def run(self, check: bool) -> Replay:
        trace = self.trace
        columns = (trace.step, trace.time_s, trace.event, trace.sequence, trace.a, trace.b)
        step = -1
        for self.at, (now, time_s, event, sequence, a, b) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            if self.grown and (now != step or event in (Event.FORK, Event.PARK, Event.CLOSE)):
                self._end_growth()
            step, self.time_s = now, time_s
            self.pool.book.clock = now
            if event == Event.OPEN:
                self._begin(sequence, b)
            elif event == Event.GROW and sequence in self.live:
                self._grow(self.live[sequence], a)
            elif event == Event.FORK:
                self._fork(sequence, a, b)
            elif event == Event.PARK and sequence in self.live:
                self.parked[sequence] = self.live[sequence]
            elif event == Event.CLOSE and sequence in self.live:
                self._let_go(self.live.pop(sequence))
                self.parked.pop(sequence, None)
            if check:
                self.pool.check()
        if self.grown:
            self._end_growth()
        return self._result()

    def _begin(self, number: int, reusable: int | None) -> _Live:
        sequence = _Live(number, self.paged.layouts[number], BlockTable(self.pool), reusable)
        self.live[number] = sequence
        return sequence

    def _fork(self, number: int, parent_number: int, shared: int) -> None:
        """Share the first tokens of a parent."""
        sequence = self._begin(number, None)
        parent = self.live.get(parent_number)
        if parent is None or not parent.table.n_pages:
            return
        pages, shared = sequence.layout.kept(min(shared, parent.computed), parent.computed)
        sequence.table = parent.table.fork()
        sequence.table.truncate(pages)
        sequence.nodes = parent.nodes[:pages]
        self._set_computed(sequence, shared)

    def _grow(self, sequence: _Live, end: int) -> None:
        """Let a sequence have ``end`` computed tokens."""
        self.parked.pop(sequence.number, None)
        layout, table = sequence.layout, sequence.table
        looks = not table.n_pages
        if end <= sequence.computed and not looks:
            return
        nodes = self._match(sequence, end - 1 if sequence.reusable is None else sequence.reusable) if looks else []
        found = np.array([node.page(0) for node in nodes], np.int32)
        held = len(nodes) if looks else table.n_pages
        start = layout.first_token(held) if looks else sequence.computed
        grows, end = end > start, max(end, start)
        first, last = layout.page_of(start), layout.pages_for(end)
        copies = grows and not looks and first < held and table.copy_needed(first)
        units = layout.first_entry(last) - layout.first_entry(held) if last > held else 0
        units += layout.page_entries(first) if copies else 0
        while units + self.pool.idle_among(found) > self.pool.available:
            if not self.parked:
                self.failures += 1
                self._let_go(self.live.pop(sequence.number))
                return
            self.reclaimed += 1
            self._let_go(self.parked.pop(next(iter(self.parked))))

        if looks:
            self.pool.retain(found)
            table.append(found)
            self.pool.book.touch(found, int(self.trace.priority[sequence.number]))
            sequence.nodes, sequence.reusable = nodes, None
            opened = sum(segment.tokens for segment in self.trace.segments(sequence.number))
            self.lookups.append((self.time_s, max(opened, end), start))
        if copies:
            table.copy_on_write(first)
        table.extend(last, layout)
        if grows:
            self._fill(table, layout, first, last, end)
        self._set_computed(sequence, end)
        self.grown.append(sequence)

    def _match(self, sequence: _Live, limit: int) -> list[Node]:
        """Nodes of the longest prefix, of at most ``limit`` tokens, whose pages are all there."""
        number = sequence.number
        nodes: list[Node] = []
        parent: Parent = self.paged.root(number)
        for page in self.paged.pages(number, sequence.layout.full_pages(limit)):
            node = self.index.find(page.key, parent, page.tokens, page.provenance)
            if node is None or not node.page(0):
                break
            nodes.append(node)
            parent = node
        return nodes

    def _fill(self, table: BlockTable, layout: PageLayout, first: int, last: int, end: int) -> None:
        """Note how many tokens pages ``first`` to ``last`` (exclusive) hold now."""
        pages = table.pages(first, last)
        if layout.uniform:
            self.filled[pages] = layout.page_slots(0)
        else:
            starts = [layout.first_token(page) for page in range(first, last)]
            self.filled[pages] = [layout.end_token(page) - at for page, at in enumerate(starts, first)]
        self.filled[pages[-1]] = end - layout.first_token(last - 1)

    def _set_computed(self, sequence: _Live, tokens: int) -> None:
        predicted = self.paged.predicted_waste(sequence.number, tokens) if tokens else 0
        self.predicted += predicted - sequence.predicted
        sequence.computed, sequence.predicted = tokens, predicted

    def _let_go(self, sequence: _Live) -> None:
        sequence.table.release()
        sequence.nodes = []
        self._set_computed(sequence, 0)

    def _end_growth(self) -> None:
        """What the step has computed is findable now; see how full the memory is."""
        for sequence in self.grown:
            self._publish(sequence)
        self.grown = []
        self.used_peak = max(self.used_peak, self.pool.total_units - self.pool.free_units)
        used = int(self.filled[self.pool.refs > 0].sum())
        self.samples.append((self.time_s, self.pool.held_units * self.paged.unit_tokens, used, self.predicted))

    def _publish(self, sequence: _Live) -> None:
        number, nodes = sequence.number, sequence.nodes
        done, full = len(nodes), sequence.layout.full_pages(sequence.computed)
        priority = int(self.trace.priority[number])
        facts = self.paged.pages(number, full)[done:]
        for fact, page in zip(facts, sequence.table.pages(done, full).tolist(), strict=True):
            parent = nodes[-1] if nodes else self.paged.root(number)
            nodes.append(self.index.enter(fact.key, parent, fact.tokens, fact.provenance))
            if page not in self.index:
                cost = recompute_cost(fact.start, fact.stop)
                self.pool.publish(page, nodes[-1], priority=priority, recompute_s=cost)

    def _policy(self, eviction: str | EvictionPolicy) -> EvictionPolicy:
        if not isinstance(eviction, str):
            return eviction
        if eviction != BELADY:
            policy: EvictionPolicy = _named("eviction", eviction, {**EVICTIONS, BELADY: Belady})()
            return policy
        uses = self.paged.lookups()

        def next_use(pages: Pages) -> NDArray[np.int64]:
            later = []
            for page in pages.tolist():
                own = uses.get(self.index.node(page).key, [])
                place = bisect_right(own, self.at)
                later.append(own[place] if place < len(own) else NEVER)
            return np.array(later, np.int64)

        return Belady(next_use)

    def _result(self) -> Replay:
        times, held, used, predicted = (
            np.array(column) for column in (zip(*self.samples, strict=True) if self.samples else [[0]] * 4)
        )
        lasting = np.diff(times, append=times[-1])
        if not lasting.any():
            lasting = np.ones(len(times))
        peak = int(held.argmax())
        asked_at, asked, found = zip(*self.lookups, strict=True) if self.lookups else ((), (), ())
        return Replay(
            hit_tokens=sum(found),
            query_tokens=sum(asked),
            evictions=self.pool.evictions,
            failures=self.failures,
            reclaimed=self.reclaimed,
            units_total=self.pool.total_units,
            units_held_peak=self.pool.held_peak,
            units_used_peak=self.used_peak,
            utilisation=float((used * lasting).sum() / max((held * lasting).sum(), 1e-30)),
            utilisation_at_peak=float(used[peak] / max(held[peak], 1)),
            held_slot_steps=int(held.sum()),
            waste_slot_steps=int((held - used).sum()),
            predicted_waste_slot_steps=int(predicted.sum()),
            mean_run_units=self.allocator.units / max(self.allocator.runs, 1),
            allocator_s=self.allocator.seconds,
            lookups=Lookups(np.array(asked_at, np.float64), np.array(asked, np.int64), np.array(found, np.int64)),
        )


def recompute_cost(start: int, stop: int) -> float:
    """What computing tokens ``start`` to ``stop`` again takes, in times of a token's linear layers."""
    return (stop - start) * (1 + (start + stop) / 2 / ATTENTION_TOKENS)


def _named(what: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"{what}={name!r} is unknown; {closest(name, list(known))}")
    return known[name]
