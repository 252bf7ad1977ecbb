"""Memory without pages, and backlogs worked off with and without them: exact on small cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.inspection.trace_recorder import TraceBuilder
from octavo.core.policies import ALLOCATORS
from octavo.scripts.backlog import Asked, Pages, Reservations, serve
from octavo.scripts.reservations import RULES, Regions, Reserved, largest_batch, reserve


def test_rules() -> None:
    wanted = {"longest": [32, 32, 32], "power of two": [1, 16, 32], "final length": [1, 9, 17]}
    assert {name: [rule(tokens, 32) for tokens in (1, 9, 17)] for name, rule in RULES.items()} == wanted
    assert RULES["power of two"](40, 48) == 48


def test_what_is_reserved_over_a_trace() -> None:
    """One request of 5 tokens, of which 3 come first, from second 0 to 4; another of 9 from second 1 on."""
    builder = TraceBuilder()
    builder.at(0, 0.0)
    first = builder.open([1, 2, 3])
    builder.grow(first, 3)
    builder.at(1, 1.0)
    second = builder.open([7] * 9)
    builder.grow(second, 9)
    builder.grow(first, 5, [4, 5])
    builder.close(first)
    builder.at(2, 4.0)
    builder.grow(second, 9)
    trace = builder.build()
    assert reserve(trace, "longest", 16) == Reserved(16 + 32 + 16, 13 + 18 + 7, (3 + 3 * 14) / (16 + 3 * 32))
    assert reserve(trace, "power of two", 16) == Reserved(8 + 24 + 16, 5 + 10 + 7, (3 + 3 * 14) / (8 + 3 * 24))
    assert reserve(trace, "final length", 16) == Reserved(5 + 14 + 9, 2, (3 + 3 * 14) / (5 + 3 * 14))


def test_the_largest_batch() -> None:
    slots = np.array([10, 20, 30])
    assert [largest_batch(slots, memory) for memory in (9, 10, 29, 30, 59, 60, 70, 120)] == [0, 1, 1, 2, 2, 3, 4, 6]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_regions_are_first_fit_and_merge(steps: list[tuple[bool, int]]) -> None:
    """Against a plain array of who holds which slot."""
    regions, owner, held = Regions(32), np.zeros(32, int), []
    for number, (takes, size) in enumerate(steps, 1):
        if takes:
            fits = [at for at in range(32 - size + 1) if not owner[at : at + size].any()]
            start = regions.allocate(size)
            assert start == (fits[0] if fits else None)
            if start is not None:
                owner[start : start + size] = number
                held.append((start, size))
        elif held:
            start, size = held.pop(size % len(held))
            regions.free(start, size)
            owner[start : start + size] = 0
    for region in held:
        regions.free(*region)
    assert regions._gaps == [(0, 32)]


def pages(count: int) -> Pages:
    return Pages(ALLOCATORS["stack"](count), 4)


class TestBacklog:
    def test_reservations(self) -> None:
        """Two of three requests fit. Each has its whole answer after two more steps."""
        requests = [Asked(4, 2)] * 3
        found = serve(requests, Reservations(20, "longest", 8), max_seqs=9)
        # Steps 0 to 2 while one waits: 4 tokens each, then 5, then 6, after which both leave; then the third alone.
        assert (found.running_mean, found.running_peak) == (2, 2)
        assert found.used_share == (8 + 10 + 12) / 3 / 20
        assert (found.preemptions, found.steps) == (0, 6)
        with_final = serve([Asked(4, 2)] * 4, Reservations(20, "final length", 8), max_seqs=9)
        assert (with_final.running_mean, with_final.used_share) == (3, (12 + 15 + 18) / 3 / 20)

    def test_pages_preempt_who_began_last(self) -> None:
        """Three pages of four. Both requests begin with a page and need a second one for their fifth token. The second
        request steps back, begins again a step later, and steps back again, until the first one has left."""
        memory = pages(3)
        found = serve([Asked(4, 3), Asked(4, 3)], memory, max_seqs=9)
        assert (found.preemptions, found.running_peak, found.steps) == (2, 1, 8)
        assert memory._pool.held_units == 0 and memory._pool.free_units == 3
        assert found.used_share == (5 + 7) / 2 / 12

    def test_no_more_than_max_seqs_run(self) -> None:
        assert serve([Asked(1, 1)] * 5, pages(9), max_seqs=2).running_peak == 2

    @given(st.lists(st.builds(Asked, st.integers(1, 12), st.integers(1, 12)), min_size=6, max_size=20))
    def test_every_request_is_served(self, requests: list[Asked]) -> None:
        for memory in (pages(6), *(Reservations(24, rule, 24) for rule in RULES)):
            found = serve(requests, memory, max_seqs=4)
            assert 0 < found.used_share <= 1 and 1 <= found.running_mean <= found.running_peak <= 4
            assert all(memory.admit(0, request, request.total) and memory.release(0) is None for request in requests)

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match="a request of 9 tokens does not fit into 8 slots"):
            serve([Asked(9, 1)], pages(2), max_seqs=1)
        with pytest.raises(ValueError, match="all 2 requests fit at once into 40 slots; give more"):
            serve([Asked(4, 1)] * 2, pages(10), max_seqs=9)
