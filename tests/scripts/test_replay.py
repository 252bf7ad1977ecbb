"""Replays: exact on small traces, like the engine that was recorded, and bounded by Belady."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core import SamplingParams
from octavo.core.inspection.trace import Event
from octavo.core.inspection.trace_recorder import TraceBuilder, TraceRecorder
from octavo.core.memory.page_layout import PageLayout, Segment
from octavo.core.policies import ALLOCATORS, EVICTIONS
from octavo.core.policies.page_divisors import WholePages
from octavo.scripts.arrivals import Bursty, Lengths, PrefixTree, Traffic
from octavo.scripts.paged_trace import PagedTrace
from octavo.scripts.replay import BELADY, recompute_cost, replay
from octavo.scripts.timed_allocator import TimedAllocator
from octavo.scripts.traces import SHIPPED, load_shipped

PAGES = {"text": 4}


def one(builder: TraceBuilder, step: int, tokens: list[int], **facts: Any) -> int:
    """A sequence that opens, computes all its tokens and closes, in a step of its own."""
    builder.at(step, float(step))
    number = builder.open(tokens, **facts)
    builder.grow(number, len(tokens))
    builder.close(number)
    return number


def run(builder: TraceBuilder, pool_tokens: int, **more: Any) -> Any:
    return replay(PagedTrace(builder.build(), PAGES), pool_tokens=pool_tokens, check=True, **more)


A, B, C = [[k] * 9 for k in (1, 2, 3)]  # two full pages of four, and a token


class TestExact:
    def test_hits_never_cover_the_last_token(self) -> None:
        builder = TraceBuilder()
        for step, tokens in enumerate([A, A, A[:8], A[:8]]):
            one(builder, step, tokens)
        found = run(builder, 40)
        assert found.lookups.found.tolist() == [0, 8, 4, 4] and found.lookups.asked.tolist() == [9, 9, 8, 8]
        assert found.lookups.time_s.tolist() == [0, 1, 2, 3]
        assert (found.hit_tokens, found.query_tokens, found.hit_rate) == (16, 34, 16 / 34)
        assert (found.evictions, found.failures, found.units_total) == (0, 0, 10)

    def test_namespaces_and_provenance_keep_pages_apart(self) -> None:
        builder = TraceBuilder()
        one(builder, 0, A)
        one(builder, 1, A, namespace=1)
        one(builder, 2, A, exact_tokens=6, provenance=1)  # its first page is exact and found, its second is not
        one(builder, 3, A, exact_tokens=6, provenance=1)
        one(builder, 4, A, exact_tokens=6, provenance=2)
        one(builder, 5, A, exact_tokens=7, provenance=1)  # another part of the page was shaped
        one(builder, 6, A)
        assert run(builder, 100).lookups.found.tolist() == [0, 0, 4, 8, 4, 4, 8]

    def test_pages_of_a_step_are_found_after_it(self) -> None:
        builder = TraceBuilder()
        builder.at(0, 0.0)
        first, twin = builder.open(A), builder.open(A)
        builder.grow(first, 9)
        builder.grow(twin, 9)
        builder.at(1, 1.0)
        late = builder.open(A)
        builder.grow(late, 9)
        found = run(builder, 60)
        assert found.lookups.found.tolist() == [0, 0, 8]
        assert (found.units_held_peak, found.units_used_peak) == (7, 7)

    def test_eviction_follows_the_policy_and_belady_looks_ahead(self) -> None:
        """Room for two sequences: for C, LRU evicts the tail of A, which comes next; Belady that of B."""
        builder = TraceBuilder()
        for step, tokens in enumerate([A, B, C, A, B]):
            one(builder, step, tokens)
        lru, belady = run(builder, 24), run(builder, 24, eviction=BELADY)
        assert (lru.lookups.found.tolist(), lru.evictions) == ([0, 0, 0, 4, 4], 3)
        assert (belady.lookups.found.tolist(), belady.evictions) == ([0, 0, 0, 8, 4], 2)

    def test_priorities_and_costs_reach_the_policies(self) -> None:
        builder = TraceBuilder()
        one(builder, 0, A, priority=1)
        for step, tokens in enumerate([B, C, A], 1):
            one(builder, step, tokens)
        assert run(builder, 24).lookups.found[-1] < run(builder, 24, eviction="priority").lookups.found[-1] == 8
        assert recompute_cost(0, 16) == 16 * (1 + 8 / 4096) < recompute_cost(4096, 4112)

    def test_a_fork_shares_until_it_writes(self) -> None:
        """Six tokens are a full page and half a page. The fork takes a page of its own for the half one, no sooner
        than it grows."""
        builder = TraceBuilder()
        builder.at(0, 0.0)
        first = builder.open(A[:6])
        builder.grow(first, 6)
        twin = builder.fork(first, 6)
        builder.at(1, 1.0)
        builder.grow(first, 7, [8])
        builder.at(2, 2.0)
        builder.grow(twin, 7, [9])
        builder.close(first)
        builder.at(3, 3.0)
        builder.grow(twin, 9, [9, 9])
        found = run(builder, 40)
        assert (found.units_held_peak, found.hit_tokens, found.query_tokens) == (3, 0, 6)
        # Slots after each step: 6 of 8 used, 4 + 3 + 2 of 12, 4 + 3 + 3 of 12, 4 + 4 + 1 of 12.
        assert (found.held_slot_steps, found.waste_slot_steps) == (8 + 12 + 12 + 12, 2 + 3 + 2 + 3)

    def test_a_fork_that_is_cut_within_a_full_page_computes_it_again(self) -> None:
        builder = TraceBuilder()
        builder.at(0, 0.0)
        first = builder.open(A)
        builder.grow(first, 9)
        builder.park(first)
        turn = builder.fork(first, 6, [7, 7, 7])
        builder.close(first)
        builder.at(1, 1.0)
        builder.grow(turn, 9)
        found = run(builder, 40)
        assert (found.held_slot_steps, found.waste_slot_steps, found.units_held_peak) == (24, 6, 3)

    def test_who_cannot_grow_leaves(self) -> None:
        builder = TraceBuilder()
        builder.at(0, 0.0)
        first, second = builder.open(A), builder.open(B)
        builder.grow(first, 9)
        builder.grow(second, 9)
        builder.at(1, 1.0)
        builder.grow(second, 10, [5])
        third = builder.fork(second, 9, [6])
        builder.close(second)
        builder.grow(first, 10, [5])
        builder.at(2, 2.0)
        builder.close(first)
        builder.grow(third, 10)
        found = run(builder, 16)
        assert (found.failures, found.units_held_peak) == (1, 3)
        assert found.lookups.asked.tolist() == [9, 10]  # the fork of a sequence that has left looks for its prefix

    def test_parked_sequences_make_room_and_find_their_pages_again(self) -> None:
        builder = TraceBuilder()
        builder.at(0, 0.0)
        idle = builder.open(A)
        builder.grow(idle, 9)
        builder.park(idle)
        one(builder, 1, B[:5])
        builder.at(2, 2.0)
        builder.grow(idle, 10, [1])
        found = run(builder, 16)
        assert (found.reclaimed, found.failures, found.evictions) == (1, 0, 0)
        assert found.lookups.found.tolist() == [0, 0, 8] and found.lookups.asked.tolist() == [9, 5, 10]
        assert run(builder, 24).reclaimed == 0

    def test_utilisation_is_weighted_by_time(self) -> None:
        builder = TraceBuilder()
        builder.at(0, 0.0)
        first = builder.open([1, 2])
        builder.grow(first, 2)
        builder.at(1, 3.0)
        builder.grow(first, 4, [3, 4])
        builder.at(2, 4.0)
        builder.grow(first, 5, [5])
        found = run(builder, 20)
        assert found.utilisation == (2 * 3 + 4 * 1) / (4 * 3 + 4 * 1)
        assert found.utilisation_at_peak == 5 / 8
        assert found.waste_slot_steps == found.predicted_waste_slot_steps == 2 + 0 + 3

    def test_images_are_paged_by_their_own_policy(self) -> None:
        """Text of 5 on pages of 16, an image of 25 on pages of 24, two tokens of text: 11, 23 and 14 empty slots."""
        builder = TraceBuilder()
        segments = [Segment("text", 5), Segment("image", 25), Segment("text", 2)]
        for step in range(2):
            one(builder, step, list(range(32)), segments=segments)
        paged = PagedTrace(builder.build(), {"text": 16, "image": 24})
        found = replay(paged, pool_tokens=400, check=True)
        assert paged.unit_tokens == 8 and found.lookups.found.tolist() == [0, 30]
        assert found.waste_slot_steps == found.predicted_waste_slot_steps == 2 * (11 + 23 + 14)
        assert found.units_held_peak == 2 + 3 + 3 + 2

    def test_nothing_happens_in_an_empty_trace(self) -> None:
        found = run(TraceBuilder(), 16)
        assert (found.hit_rate, found.utilisation, found.mean_run_units, found.units_held_peak) == (0, 0, 0, 0)


@given(
    st.lists(st.tuples(st.sampled_from(["text", "image"]), st.integers(1, 40)), min_size=1, max_size=5),
    st.integers(0, 30),
    st.integers(0, 200),
)
def test_predicted_waste_is_that_of_the_layout(parts: list[tuple[str, int]], more: int, cut: int) -> None:
    segments = [Segment(*part) for part in parts]
    total = sum(segment.tokens for segment in segments)
    builder = TraceBuilder()
    builder.grow(builder.open([0] * total, segments=segments), total + more, [0] * more)
    paged = PagedTrace(builder.build(), {"text": 4, "image": WholePages()})
    tokens = min(cut, total + more)
    assert isinstance(paged.layouts[0], PageLayout)
    assert paged.predicted_waste(0, tokens) == paged.layouts[0].waste(tokens)


# The engine and a replay do not know the same recomputation costs.
COMBINATIONS = [
    *(("lru", name) for name in ALLOCATORS),
    *((name, "stack") for name in sorted({*EVICTIONS} - {"lru", "cost"})),
]


@pytest.mark.parametrize(("eviction", "allocator"), COMBINATIONS)
def test_a_replay_sees_what_the_engine_saw(t_model: Any, engine_for: Any, eviction: str, allocator: str) -> None:
    """Requests with common beginnings, samples and forked sessions, on a pool that has to evict."""
    engine = engine_for(t_model, pool_tokens=160, eviction=eviction, allocator=allocator, step_tokens=40)
    engine.recorder = recorder = TraceRecorder()
    random = Random(0)
    heads = [[random.randrange(3, 128) for _ in range(30)] for _ in range(4)]
    for seed in range(9):
        prompt = [*random.choice(heads)[: random.randrange(6, 30)], random.randrange(3, 128)]
        params = SamplingParams(max_tokens=5, n=1 + seed % 2, seed=seed, temperature=0.9, ignore_eos=True)
        engine.submit(prompt, params, priority=seed % 2)
        for _ in range(4):
            engine.step()
    while engine.has_work():
        engine.step()
    session = engine.session(heads[0][:10])
    session.generate(SamplingParams(max_tokens=4, ignore_eos=True))
    twin = session.fork()
    for turn in (session, twin, session):
        turn.append([7, 8, 9])
        turn.generate(SamplingParams(max_tokens=4, ignore_eos=True))
    twin.close()
    session.close()

    stats, trace = engine.stats(), recorder.trace()
    assert stats.preemptions == 0 and stats.evictions > 0 and stats.hit_tokens > 0
    found = replay(PagedTrace(trace, PAGES), pool_tokens=160, eviction=eviction, allocator=allocator, check=True)
    assert (found.hit_tokens, found.query_tokens) == (stats.hit_tokens, stats.query_tokens)
    assert (found.evictions, found.units_held_peak) == (stats.evictions, stats.units_held_peak)
    assert found.hit_tokens == trace.total(Event.HIT) and found.evictions == trace.total(Event.EVICT)
    assert (found.failures, found.reclaimed) == (0, 0)


@pytest.mark.parametrize("name", SHIPPED)
def test_belady_bounds_every_policy_on_the_shipped_traces(name: str) -> None:
    paged = PagedTrace(load_shipped(name), {"text": 16})
    ample = replay(paged, pool_tokens=1 << 18)
    assert ample.evictions == ample.failures == 0 and ample.hit_tokens > 0
    idle = ample.units_used_peak - ample.units_held_peak
    tokens = (ample.units_held_peak + idle // 10) * paged.unit_tokens
    bound = replay(paged, pool_tokens=tokens, eviction=BELADY)
    assert 0 < bound.hit_tokens <= ample.hit_tokens and bound.evictions > 0
    for eviction in EVICTIONS:
        assert replay(paged, pool_tokens=tokens, eviction=eviction).hit_tokens <= bound.hit_tokens


def test_the_shipped_traces_are_of_real_runs() -> None:
    job, chat = map(load_shipped, SHIPPED)
    assert (job.exact_tokens < 9000).any() and np.count_nonzero(job.event == Event.FORK) == 0
    assert np.count_nonzero(chat.event == Event.FORK) > 20
    for trace in (job, chat):
        found = replay(PagedTrace(trace, {"text": 16}), pool_tokens=1 << 18)
        assert found.hit_tokens == trace.total(Event.HIT) and np.count_nonzero(trace.event == Event.EVICT) == 0


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_allocator_changes_no_hit(allocator: str) -> None:
    arrivals = Bursty(calm_per_s=1, burst_per_s=8, calm_s=5, burst_s=2)
    traffic = Traffic(12, arrivals, Lengths(30), Lengths(20), PrefixTree(2, 2, 12), turns=2, think_s=2)
    paged = PagedTrace(traffic.trace(0), PAGES)
    stack = replay(paged, pool_tokens=400)
    found = replay(paged, pool_tokens=400, allocator=allocator, check=True)
    assert (found.hit_tokens, found.evictions, found.failures) == (stack.hit_tokens, stack.evictions, stack.failures)
    assert stack.evictions > 0 and found.allocator_s > 0 and found.mean_run_units >= 1


def test_runs_of_units() -> None:
    """Units 1-3 after nothing, 4-5 right after 3, then 1 again: two runs of six units."""
    allocator = TimedAllocator(ALLOCATORS["first_fit"](8))
    allocator.free(allocator.allocate(0))
    units = allocator.allocate(3)
    allocator.allocate(2, near=3)
    allocator.free(units)
    assert allocator.allocate(1).tolist() == [1]
    assert (allocator.units, allocator.runs) == (6, 2) and allocator.seconds > 0
    assert len(allocator.check()) == allocator.free_units == allocator.total_units - 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pool_tokens": 0}, "pool_tokens must be at least 1, got 0"),
        ({"pool_tokens": 4, "eviction": "lur"}, "eviction='lur' is unknown; did you mean 'lru'"),
        ({"pool_tokens": 4, "allocator": "slab"}, "allocator='slab' is unknown"),
    ],
)
def test_refusals(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(PagedTrace(TraceBuilder().build(), PAGES), **more)
