"""Runs of split units: whoever takes and gives them back, none is used twice and no unit is held for nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.compression.split_units import SplitUnits
from octavo.core.memory.page_pool import PagePool
from octavo.core.memory.prefix_cache import PrefixCache
from octavo.core.policies import ALLOCATORS, EVICTIONS

UNITS, LAYERS, HEADS = 12, 3, 2


def split_units():
    pool = PagePool(ALLOCATORS["stack"](UNITS), EVICTIONS["lru"](), PrefixCache())
    return SplitUnits(pool, LAYERS, HEADS), pool


def test_equal_heads_take_whole_units():
    split, pool = split_units()
    first = split.allocate(np.array([6, 6]))
    assert len(split.units) == pool.held_units == 2 and split.free_runs == 0
    assert [len(own) for own in first] == [6, 6] and sorted(first[0].tolist()) == sorted(first[1].tolist())
    split.release(first)
    assert pool.free_units == UNITS and not len(split.units)


def test_what_one_head_leaves_serves_another_request():
    split, pool = split_units()
    first = split.allocate(np.array([6, 1]))
    assert pool.held_units == 2 and split.free_runs == 5
    assert split.units_for(np.array([0, 5])) == 0 and split.units_for(np.array([1, 0])) == 1
    second = split.allocate(np.array([0, 5]))
    assert pool.held_units == 2 and split.free_runs == 0
    split.release(first)
    assert pool.held_units == 2, "the second still has runs in both"
    split.release(second)
    assert pool.held_units == 0


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)), max_size=25))
def test_any_order_of_taking_and_giving_back(wanted):
    split, pool = split_units()
    used = []
    for first, second, victim in wanted:
        runs = np.array([first, second])
        if split.units_for(runs) <= pool.available:
            before = pool.available
            needed = split.units_for(runs)
            used.append(split.allocate(runs))
            assert pool.available == before - needed and [len(own) for own in used[-1]] == [first, second]
        elif used:
            split.release(used.pop(victim % len(used)))
        split.check(used)
        pool.check()
    for slabs in used:
        split.release(slabs)
    assert pool.free_units == UNITS and not len(split.units)


def test_check_finds_a_run_that_was_forgotten():
    split, _ = split_units()
    slabs = split.allocate(np.array([2, 1]))
    with pytest.raises(AssertionError, match=r"no run of split units|are marked as free and are not"):
        split.check([])
    with pytest.raises(AssertionError, match="head 0 uses slabs"):
        split.check([slabs, slabs])
