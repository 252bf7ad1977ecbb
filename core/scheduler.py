"""Continuous batching: which tokens of which sequences the next step computes, and where their KV goes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from octavo.core.config import EngineConfig
from octavo.core.encoding.sources import find_nodes, lent_entries, place_loans
from octavo.core.execution.decode_batch import DecodeBatch
from octavo.core.execution.token_list import NO_LOG
from octavo.core.execution.verification import Verification
from octavo.core.inspection.trace_recorder import TraceRecorder
from octavo.core.memory.block_table import append_pages
from octavo.core.memory.host_tier import HostTier
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_pool import PagePool, Units
from octavo.core.memory.prefix_cache import Node, PageKey
from octavo.core.prefix_match import PrefixMatch, match_prefix
from octavo.core.sequence import Sequence
from octavo.core.shared_list import SharedList
from octavo.core.step_plan import Chunk, Growth, StepPlan

if TYPE_CHECKING:
    from octavo.core.encoding.encoded_items import EncodedItems


class Scheduler:
    """Owns the queues::

    waiting   no pages, no row
    running   pages, and a place among ``max_seqs``
    parked    pages, but nothing to compute: idle sessions, whose pages go before anybody is preempted

    ``publish(page, node, group, priority)`` makes a page findable. Pages of the ``host`` tier that a prefix hit meets
    are brought back.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        plan: LayerPlan,
        publish: Callable[[int, Node, int, int], None],
        host: HostTier | None,
        items: EncodedItems,
    ) -> None:
        self._config = config
        self._pool = pool
        self._plan = plan
        self._publish = publish
        self._host = host
        self._items = items
        self._page_tokens = config.text_page_tokens
        self._page_units = self._page_tokens // config.unit_tokens * plan.slices
        self._windowed = any(group.window for group in plan.groups)
        self._step = 0
        self._computing: dict[PageKey, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.parked: list[Sequence] = []
        self.hit_tokens = 0
        self.query_tokens = 0
        self.preemptions = 0
        self.running_peak = 0
        self.recorder: TraceRecorder | None = None
        self._copies: list[Units] = []  # of a plan that is being made, or has failed: tables say that they are made

    def schedule(self, sparing: bool = False) -> StepPlan:
        """Plan the next step.

        There are no phases. Each sequence has ``computed`` tokens chasing ``goal`` tokens, and a step moves some of
        them forward: a whole prompt, a chunk of one, what a prefix hit left over, one decoded token, or everything
        again after a preemption are all "the next ``count`` tokens".

        Highest priority first, and within a priority:

        1. Running sequences: by who was served least recently, then by arrival. One that cannot get its pages takes
           those of parked sequences, then preempts the running sequence of least worth (lowest priority, then latest
           arrival), whose chunk leaves the plan if it had one. If it is itself the one of least worth, it goes back
           to waiting.
        2. Then waiting sequences, by arrival. Admission is a transaction: the pages of a prefix hit, which may have
           to be taken from the idle ones, and the pages of the first chunk are added up, and only if all of them can
           be had is anything changed. The first sequence that does not fit ends admission, so that nobody overtakes
           it for ever; so does one that was preempted in this step. A sequence whose next prefix page is just being
           computed by a running one of no lower priority is passed over: soon it will find that page.

        A sequence is computed as far as its images are encoded, or can be in this step (``EncodedItems.reach``). One
        that waits for the encoder is passed over, and holds up nobody; where images are encoded beside the engine,
        those of sequences that cannot run yet are asked for meanwhile.
        A sequence that reuses images is passed over until the KV of all of them is there, while its sources, which
        compute what is not, come right in front of it (``octavo.core.encoding.sources``). A source that is done is
        parked until then. If its pages are lost all the same, its second turn ends admission for whoever comes later.

        A sequence that drafts (``octavo.core.execution.drafts``) goes on one token at a time behind ``computed``, and
        then computes all of these again as one chunk. When one verifies, all whose rounds are as long do, and who has
        no draft yet decodes without, so that they stay in step with one another.

        An image whose tokens see one another is computed in one step. Where it does not fit into what is left of a
        step it waits, and as its sequence was then served least recently, it comes first in the next; a sequence that
        begins with such an image is admitted with the pages of its prefix hit alone.

        The running sequence of most worth always gets its pages, so every step makes progress. One that is alone and
        does not fit is ``stranded``, and the engine ends it.

        A ``sparing`` plan is made while tokens are under way that may end some sequences and free their pages. It takes
        none from others. As soon as it would have to it is ``short``, and only good for its copies: what has its pages
        then, or is admitted, keeps them for the plan that is made once these tokens are read.
        """
        self._step += 1
        self._pool.book.clock = self._step
        self._items.begin()
        if self.recorder is not None:
            self.recorder.stepping(self._step, self._pool.evictions)
        plan = StepPlan(copies=self._copies, sparing=sparing, number=self._step)
        self._end_sources()
        waiting = set(self.waiting)
        admitting = True
        due = {s.drafts.most for s in self.running if s.drafts.tokens and not s.drafting}
        for s in self.running if due else []:
            s.drafts.called |= s.drafts.most in due

        def turn(s: Sequence) -> tuple[int, ...]:
            return -s.request.priority, s in waiting, 0 if s in waiting else s.served_at, *_age(s)

        queue = sorted([*self.running, *self.waiting], key=turn)
        for at, sequence in enumerate(queue):  # it may grow behind ``at``
            left = self._config.step_tokens - plan.tokens
            if plan.short or (left <= 0 and not self._items.ahead):
                break
            if sequence.compares and sequence not in waiting:
                plan.compared.append(sequence)
                continue
            if sequence not in waiting:
                count = self._reached(sequence, sequence.computed, left)
                if count > 0 and sequence not in plan.preempted:
                    self._serve(sequence, count, plan)
                continue
            barred = any(_worth(other) < _worth(sequence) for other in plan.preempted)
            if (barred or left <= 0 or not admitting) and not self._items.wants(sequence):
                continue
            match = match_prefix(sequence, self._pool.index, self._plan, self._config.prefix_cache)
            owner = self._computing.get(match.missing) if match.missing else None
            if owner is not None and owner.request.priority >= sequence.request.priority:
                continue
            if sequence.serves is not None and self._is_needless(sequence):
                self.remove(sequence)
                continue
            if match.missing_sources:
                if not barred and admitting:
                    fresh = [s for s in match.missing_sources if s not in waiting and s not in self.running]
                    admitting = not (fresh and sequence.lost_sources)
                    sequence.lost_sources = True
                    for source in fresh:
                        source.finish_reason = None
                    self.waiting += fresh
                    waiting |= set(fresh)
                    queue[at + 1 : at + 1] = fresh
                continue
            found = sequence.layout.first_token(len(match.nodes))
            count = self._reached(sequence, found, left) or self._reached(sequence, found, self._config.step_tokens)
            if barred or left <= 0 or not admitting or count == 0:
                continue
            admitting = self._admit(sequence, match, count, plan)
            if not admitting and not self.running and not plan.chunks:
                plan.stranded.append(sequence.serves or sequence)
        self.running_peak = max(self.running_peak, len(self.running))
        if self.recorder is not None:
            self.recorder.planned(self._pool.evictions)
        self._copies = []
        return plan

    def decode(self, batch: DecodeBatch, running: int, verification: Verification | None = None) -> StepPlan | None:
        """The plan that ``schedule`` would make if it is this batch and nothing else, without looking around: nobody
        waits, no more than ``running`` sequences run, and there is room. None if it is not. The batch may be the last
        tokens of a ``verification``; traces are taken of those that ``schedule`` has planned.

        Most sequences have room in their last page, and there is nothing to do for those.
        """
        if self.waiting or len(self.running) != running:
            return None
        if verification is not None:
            if self.recorder is not None:
                return None
            verification.call()
        growing, others = self._turning(batch, verification)
        units = len(growing) * self._page_units
        if units + sum(sequence.units_for(count) for _, sequence, count in others) > self._pool.available:
            return None
        assert self.recorder is None or not self.recorder.reads_tokens, "some tokens are not known yet"
        self._step += 1
        self._pool.book.clock = self._step
        if self.recorder is not None:
            self.recorder.stepping(self._step, self._pool.evictions)
        changed = [sequence for _, sequence, _ in others]
        plan = StepPlan(copies=self._copies, batch=batch, verification=verification, ahead=True, changed=changed)
        if growing:
            self._pool.prepare(units)
            tables, at = [batch.tables[member] for member in growing], np.array(growing)
            numbers = batch.starts[at] // self._page_tokens
            pages = append_pages(tables, self._pool, self._page_units)
            plan.growth = Growth(batch.sequences[growing[0]].layout, at, tables, numbers, pages)
            batch.turns[at] += self._page_tokens
        for member, sequence, count in others:
            sequence.drop_unseen()
            self._pool.prepare(sequence.units_for(count))
            self._take_pages(sequence, count, plan)
            batch.turns[member] = sequence.turn
        if self.recorder is not None:
            for member in sorted([*growing, *(member for member, *_ in others)]):
                if not batch.drafting[member]:
                    self.recorder.placed(batch.sequences[member], int(batch.starts[member]) + 1)
            self.recorder.planned(self._pool.evictions)
        self._copies = []
        return plan

    def _turning(
        self, batch: DecodeBatch, verification: Verification | None
    ) -> tuple[list[int], list[tuple[int, Sequence, int]]]:
        """The members of a batch whose pages must be seen to: those that take one more page of text behind theirs, and
        that is all, and the others, with their sequences and tokens. Pages of a batch are of one size."""
        growing, others = [], []
        turning = batch.turning
        for member, turn in zip(turning.tolist(), batch.turns[turning].tolist(), strict=True):
            if not self._windowed and turn == batch.tables[member].n_pages * self._page_tokens:
                growing.append(member)
            else:
                drafts = 0 if verification is None else int(verification.drafts[member])
                others.append((member, batch.sequences[member], 1 + drafts))
        return growing, others

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that holds no pages."""
        self.waiting.append(sequence)

    def run(self, sequence: Sequence) -> bool:
        """Run a sequence that brings its pages (a fork, a session); False if ``max_seqs`` are running."""
        if len(self.running) >= self._config.max_seqs:
            return False
        self.running.append(sequence)
        return True

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue and give its pages back."""
        if sequence in self.running:
            self._stop(sequence)
        else:
            (self.waiting if sequence in self.waiting else self.parked).remove(sequence)
        sequence.rewind()
        if sequence.serves is not None:
            sequence.finish_reason = "abort"
        self._drop_sources(sequence, [*self.running, *self.waiting, *self.parked])
        if self.recorder is not None:
            self.recorder.closed(sequence)

    def park(self, sequence: Sequence) -> None:
        """Let a running sequence keep its pages while it has nothing to compute."""
        self._stop(sequence)
        sequence.unread = 0  # nobody reads what is drawn behind its end
        sequence.tokens.follow(NO_LOG)  # which would otherwise be kept as long as the sequence
        self.parked.append(sequence)
        if self.recorder is not None:
            self.recorder.parked(sequence)

    def unpark(self, sequence: Sequence) -> bool:
        """Take a sequence out of the parked ones; False if its pages have been reclaimed in the meantime."""
        if sequence not in self.parked:
            return False
        self.parked.remove(sequence)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Back to waiting without pages: they will be computed again, or found."""
        self._stop(sequence)
        sequence.rewind()
        self.waiting.append(sequence)
        self.preemptions += 1
        if self.recorder is not None:
            self.recorder.preempted(sequence)

    def make_room(self, units: Callable[[], int], sequence: Sequence) -> bool:
        """Have ``units()`` units available for a running sequence between two steps, at the cost of the same others as
        in ``schedule``; False if it was itself the one of least worth, and waits now."""
        self._pool.prepare(units())
        while units() > self._pool.available:
            if self.parked:
                self._reclaim()
                continue
            victim = max(self.running, key=_worth)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def published(self, key: PageKey, sequence: Sequence) -> None:
        """A page is findable now; nobody needs to wait for it any more."""
        if self._computing.get(key) is sequence:
            del self._computing[key]

    def check(self) -> None:
        queues = [*self.waiting, *self.running, *self.parked]
        if len(set(map(id, queues))) != len(queues):
            raise AssertionError("a sequence is in two queues, or twice in one")
        for sequence in self.waiting:
            if sequence.computed or any(table.n_pages for table in sequence.tables):
                raise AssertionError(f"waiting sequence of {sequence.request.request_id!r} holds pages")
        for sequence in [*self.running, *self.parked]:
            pages = sequence.layout.pages_for(sequence.computed)
            for number, table in enumerate(sequence.tables):
                if table.n_pages < pages or table.n_pages != sequence.table.n_pages:
                    raise AssertionError(f"{sequence.computed} tokens are computed in {table.n_pages} pages")
                seen = sequence.first_seen(number, sequence.computed)
                if number == 0:
                    seen = max(seen, sequence.away, sequence.first_whole)
                if sequence.computed and table.first_page > seen:
                    raise AssertionError(f"page {table.first_page - 1} is gone and will be seen again")
        if len(self.running) > self._config.max_seqs:
            raise AssertionError(f"{len(self.running)} sequences run, at most {self._config.max_seqs} may")
        strangers = [s.request.request_id for s in self._computing.values() if s not in self.running]
        if strangers:
            raise AssertionError(f"{strangers} claim to compute pages but do not run")

    def _serve(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        """Place the next ``count`` tokens of a running sequence, making room for them if need be."""
        sequence.drop_unseen()
        self._pool.prepare(sequence.units_for(count))
        if plan.sparing and sequence.units_for(count) > self._pool.available:
            plan.short = True
            return
        if (sequence.drafting or sequence.drafts.tokens) and sequence.units_for(count) > self._pool.available:
            sequence.drafts.cut(0)
            count = 1
        while sequence.units_for(count) > self._pool.available:
            victim = max(self.running, key=_worth)
            if self.parked:
                self._reclaim()
            elif victim is not sequence or len(self.running) > 1:
                self._preempt(victim, plan)
                if victim is sequence:
                    return
            else:
                count = sequence.fitting(bisect_right(range(1, count), self._pool.available, key=sequence.units_for))
                if count == 0:
                    plan.stranded.append(sequence.serves or sequence)
                    return
        self._place(sequence, count, plan)

    def _reached(self, sequence: Sequence, computed: int, room: int) -> int:
        """Tokens that a step with ``room`` may compute of a sequence of which ``computed`` are there, as far as its
        items are."""
        before, sequence.computed = sequence.computed, computed
        count = sequence.chunk(max(room, 0))
        sequence.computed = before
        return self._items.reach(sequence, computed, computed + count) - computed if count else 0

    def _admit(self, sequence: Sequence, match: PrefixMatch, count: int, plan: StepPlan) -> bool:
        """Start a waiting sequence with its prefix hit and its next ``count`` tokens, or change nothing and say
        False."""
        layout = sequence.layout
        hit_pages = len(match.nodes)
        hit_tokens = layout.first_token(hit_pages)
        restored = sum(layout.page_entries(page) * self._plan.groups[group].slices for page, group in match.restores)

        lent = lent_entries(layout, hit_tokens) if match.loans else 0
        placed = max((loan.first_page + len(loan.pages) for loan in match.loans), default=0)

        def fresh_for(count: int) -> int:
            last = max(layout.pages_for(hit_tokens + count), placed)
            grown = layout.first_entry(last) - layout.first_entry(hit_pages) - lent
            return grown * self._plan.slices + restored

        if not self.running and any(group.window for group in self._plan.groups):
            # As much as there is room for: what a window passes makes room for the rest.
            room = self._pool.units_left(match.device_pages)
            count = bisect_right(range(1, count + 1), room, key=fresh_for)
            count = max(sequence.least_chunk(hit_tokens), sequence.unsplit(hit_tokens + count) - hit_tokens)
        fresh = fresh_for(count)
        victims = sorted((s for s in self.running if s.request.priority < sequence.request.priority), key=_worth)
        if not self._could_fit(fresh, match, len(victims)):
            return False
        self._pool.prepare(fresh)
        if not self._could_fit(fresh, match, len(victims)):  # what was hoped for could not be had
            return False
        found = match.device_pages

        def no_place() -> bool:
            return len(self.running) >= self._config.max_seqs

        def no_pages() -> bool:
            return fresh + self._pool.idle_among(found) > self._pool.available

        if plan.sparing and (no_place() or no_pages()):
            plan.short = True
            return False
        while no_place():
            self._preempt(victims.pop(), plan)
        while no_pages():
            if self.parked:
                self._reclaim()
            elif victims:
                self._preempt(victims.pop(), plan)
            else:  # a policy pinned what it had not said that it would
                return False

        self._pool.retain(match.hit_pages)
        self._restore(sequence, match)
        for table, pages in zip(sequence.tables, match.pages, strict=True):
            table.append(pages)
        if match.loans:
            plan.copies += place_loans(match.loans, sequence.table, layout, self._pool)
            self._drop_sources(sequence, [*self.waiting, *self.parked])
            sequence.lost_sources = False
        self._pool.book.touch(np.unique(found), sequence.request.priority)
        sequence.computed, sequence.nodes = hit_tokens, SharedList(match.nodes)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        if self.recorder is not None:
            self.recorder.admitted(sequence, hit_tokens)
        sequence.compares = any(loan.item.reuse.layer is not None for loan in match.loans)  # type: ignore[union-attr]
        if sequence.compares:
            plan.compared.append(sequence)
        elif sequence.work(count) <= self._config.step_tokens - plan.tokens:  # if not, it comes first in the next step
            self._place(sequence, count, plan)
        if self._config.prefix_cache:
            for key in sequence.keys(sequence.findable_pages(sequence.goal))[hit_pages:]:
                self._computing.setdefault(key, sequence)
        spared = hit_tokens + sum(loan.item.spared for loan in match.loans)
        if sequence.request.cached_tokens is None:
            sequence.request.cached_tokens = spared
        self.hit_tokens += spared
        self.query_tokens += len(sequence.tokens)
        return True

    def _could_fit(self, fresh: int, match: PrefixMatch, victims: int) -> bool:
        """Whether a sequence fits once all parked sequences and the ``victims`` of least worth are out of the way."""
        if len(self.running) - victims >= self._config.max_seqs:
            return False
        found = match.device_pages
        if fresh + self._pool.idle_among(found) <= self._pool.available + self._pool.growable:
            return True
        if not self.parked and not victims:
            return False
        staying = sorted(self.running, key=_worth)[: len(self.running) - victims]
        held = np.concatenate([found, *(s.held for s in staying)])
        return fresh <= self._pool.units_left(held)

    def _restore(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Bring the pages of a hit that are in the host tier back, into ``match.pages``. They are findable at once: the
        copies are carried out before anybody reads."""
        if not match.restores:
            return
        assert self._host is not None
        wanted = [(number, group, match.holders[number].host[group]) for number, group in match.restores]
        for *_, host_page in wanted:
            self._host.hold(host_page)  # what is evicted to make room for them must not push them out
        for number, group, host_page in wanted:
            size = self._host.page_units(host_page)
            (page,) = self._pool.allocate(1, size)
            self._host.restore(host_page, self._pool.units_of(np.array([page], np.int32), size)[0])
            self._publish(int(page), match.holders[number], group, sequence.request.priority)
            match.pages[group][number] = page

    def _place(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        """Give a chunk its pages and put it in the plan."""
        assert count > 0, "a chunk has tokens"
        draft = sequence.drafting
        if sequence.drafts.tokens and not draft:
            sequence.drafts.cut(count - 1)
        self._take_pages(sequence, count, plan)
        for start, end in sequence.pieces(count):
            plan.add(Chunk(sequence, start, end - start, draft))
        if self.recorder is not None and not draft:
            self.recorder.placed(sequence, min(sequence.frontier + count, sequence.goal))

    def _take_pages(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        """Let a sequence have the pages, of its own, that its next ``count`` tokens are written to."""
        layout = sequence.layout
        sequence.take_frames()
        first, last = sequence.first_written(count), layout.pages_for(sequence.frontier + count)
        for table in sequence.tables:
            if first < table.n_pages and table.copy_needed(first):
                plan.copies.append(table.copy_on_write(first))
            table.extend(last, layout)
        sequence.writable = layout.first_token(last)

    def _end_sources(self) -> None:
        """Park the sources that are done, for who waits for them; nobody needs the others any more."""
        for source in [s for s in self.running if s.serves is not None and s.computed == s.goal]:
            if source.serves in self.waiting:
                self.park(source)
            else:
                self.remove(source)

    def _is_needless(self, source: Sequence) -> bool:
        """Whether a source that waits has nothing to compute: its pages are there, or nobody waits for it."""
        pages = source.layout.full_pages(source.goal)
        nodes = find_nodes(source, pages, self._pool.index)
        return source.serves not in self.waiting or (len(nodes) == pages and all(node.page(0) for node in nodes))

    def _drop_sources(self, sequence: Sequence, among: list[Sequence]) -> None:
        """A sequence needs its sources no more. Those that run may be in the plan, and end with the next step."""
        for source in sequence.sources.values():
            if source in among:
                self.remove(source)

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Preempt a sequence while planning: its chunk, if it has one, leaves the plan."""
        plan.leave_out(sequence)
        plan.compared = [other for other in plan.compared if other is not sequence]
        plan.preempted.append(sequence)
        self.preempt(sequence)

    def _reclaim(self) -> None:
        sequence = self.parked.pop(0)
        sequence.rewind()
        if self.recorder is not None:
            self.recorder.preempted(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        for key in [key for key, owner in self._computing.items() if owner is sequence]:
            del self._computing[key]


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.arrival, sequence.sample


def _worth(sequence: Sequence) -> tuple[int, int, int]:
    """Greatest for the sequence to preempt first."""
    return -sequence.request.priority, *_age(sequence)
