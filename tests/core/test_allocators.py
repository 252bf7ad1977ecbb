"""Allocators over units: what each of them chooses, by exact ids; what all of them keep, against a set."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from octavo.core.policies.allocators import ALLOCATORS
from octavo.core.policies.unit_runs import runs_of, toggled, units_of

every = pytest.mark.parametrize("name", ALLOCATORS)
BY_ADDRESS = [name for name in ALLOCATORS if name != "stack"]


def ids(*units):
    return np.array(units, np.int32)


def with_free(name, total, *free):
    """An allocator in which only the units ``free`` are not held."""
    allocator = ALLOCATORS[name](total)
    allocator.allocate(total)
    allocator.free(ids(*free))
    return allocator


def free_of(allocator):
    return allocator.check().tolist()


class TestAll:
    @every
    def test_units_begin_at_1_and_are_int32(self, name):
        allocator = ALLOCATORS[name](5)
        taken = allocator.allocate(3)
        assert taken.dtype == np.int32 and taken.tolist() == [1, 2, 3]
        assert (allocator.total_units, allocator.free_units, free_of(allocator)) == (5, 2, [4, 5])

    @every
    def test_all_free_units_can_be_had_whatever_the_runs(self, name):
        allocator = with_free(name, 9, 1, 3, 4, 6, 9)
        assert sorted(allocator.allocate(5).tolist()) == [1, 3, 4, 6, 9]
        assert allocator.free_units == 0 and free_of(allocator) == []

    @every
    def test_nothing_is_nothing(self, name):
        allocator = ALLOCATORS[name](2)
        allocator.free(allocator.allocate(0))
        assert free_of(allocator) == [1, 2]
        allocator.allocate(2)
        assert allocator.allocate(0).tolist() == []

    @every
    def test_more_than_there_are_is_a_programmers_error(self, name):
        allocator = ALLOCATORS[name](3)
        with pytest.raises(AssertionError, match="4 units asked for, 3 free"):
            allocator.allocate(4)
        assert free_of(allocator) == [1, 2, 3]

    @every
    @pytest.mark.parametrize(
        "units, message",
        [
            ((0,), r"units \[0\] are none of this pool's, which are 1 to 6"),
            ((-1, 2), r"units \[-1\] are none of this pool's, which are 1 to 6"),
            ((2, 7, 99), r"units \[7, 99\] are none of this pool's, which are 1 to 6"),
            ((3, 2, 3), r"units \[3\] are listed more than once among 3 to free"),
            ((2, 5, 6), r"units \[5, 6\] are free already; 4 of 6 units are held"),
        ],
    )
    def test_what_cannot_be_given_back_is_refused_whole(self, name, units, message):
        allocator = with_free(name, 6, 5, 6)
        with pytest.raises(ValueError, match=message):
            allocator.free(ids(*units))
        assert free_of(allocator) == [5, 6] and allocator.free_units == 2
        allocator.free(ids(2, 3))
        assert free_of(allocator) == [2, 3, 5, 6]

    @every
    def test_many_wrong_ids_are_not_all_listed(self, name):
        allocator = ALLOCATORS[name](20)
        with pytest.raises(ValueError, match=r"units \[1, 2, 3, 4, 5, 6, 7, 8\] and 12 more are free already"):
            allocator.free(np.arange(1, 21, dtype=np.int32))

    @every
    @pytest.mark.parametrize("total", [0, -3, 2.0, True, "4", None])
    def test_sizes_that_are_none(self, name, total):
        with pytest.raises(ValueError, match=rf"total_units: {total!r}; must be"):
            ALLOCATORS[name](total)
        allocator = ALLOCATORS[name](4)
        for change in (allocator.grow, allocator.shrink):
            with pytest.raises(ValueError, match="must be"):
                change(total)
        assert free_of(allocator) == [1, 2, 3, 4] and allocator.total_units == 4

    @every
    def test_growing_joins_what_is_free_at_the_end(self, name):
        allocator = with_free(name, 4, 3, 4)
        allocator.grow(3)
        assert (allocator.total_units, free_of(allocator)) == (7, [3, 4, 5, 6, 7])
        if name != "buddy":  # whose blocks are 3 to 4, 5 to 6, and 7
            assert allocator.allocate(5).tolist() == [3, 4, 5, 6, 7]

    @every
    def test_shrinking_takes_free_units_only(self, name):
        allocator = with_free(name, 6, 2, 4, 5, 6)
        assert not allocator.shrink(4) and allocator.total_units == 6 and free_of(allocator) == [2, 4, 5, 6]
        assert allocator.shrink(2) and (allocator.total_units, allocator.free_units) == (4, 2)
        assert free_of(allocator) == [2, 4]
        assert allocator.shrink(1) and free_of(allocator) == [2]
        with pytest.raises(ValueError, match=r"\[6\] are none of this pool's, which are 1 to 3"):
            allocator.free(ids(6))
        with pytest.raises(ValueError, match="units to shrink by: 3 of 3; at least 1 unit must remain"):
            allocator.shrink(3)

    @every
    def test_what_was_handed_out_does_not_change_later(self, name):
        allocator = ALLOCATORS[name](4)
        first = allocator.allocate(2)
        given = first.copy()
        allocator.free(given)
        given[:] = 0
        allocator.allocate(4)
        assert first.tolist() == [1, 2]

    @every
    def test_check_finds_a_unit_that_the_policy_lost(self, name):
        allocator = with_free(name, 6, 3, 4)
        allocator._is_free[4] = False
        with pytest.raises(AssertionError):
            allocator.check()


class TestByAddress:
    """``near``, merging and the longest runs first: what all allocators that look at addresses agree on."""

    by_address = pytest.mark.parametrize("name", BY_ADDRESS)

    @by_address
    def test_near_takes_the_run_right_after(self, name):
        allocator = with_free(name, 8, 1, 2, 5, 6)
        assert allocator.allocate(1, near=4).tolist() == [5]
        assert allocator.allocate(1, near=np.int32(5)).tolist() == [6]  # as it comes out of a table

    @by_address
    @pytest.mark.parametrize("near", [3, 6, 8], ids=["no_run", "too_short", "end_of_the_pool"])
    def test_near_is_no_order(self, name, near):
        allocator = with_free(name, 8, 1, 2, 7)
        assert allocator.allocate(2, near=near).tolist() == [1, 2]

    @by_address
    def test_neighbours_merge_on_both_sides(self, name):
        allocator = with_free(name, 8, 1, 4)
        allocator.free(ids(3, 2))
        assert allocator.allocate(4).tolist() == [1, 2, 3, 4]

    @by_address
    def test_as_few_runs_as_possible(self, name):
        """No run holds 6: the longest (4) goes whole, and of the others one that holds the rest (2), not 1 and 1."""
        allocator = with_free(name, 16, 1, 3, 5, 6, 9, 10, 11, 12)
        assert allocator.allocate(6).tolist() == [5, 6, 9, 10, 11, 12]
        assert free_of(allocator) == [1, 3]


def test_the_stack_gives_out_last_what_it_grew_by_and_keeps_the_order_of_a_call():
    stack = ALLOCATORS["stack"](6)
    stack.allocate(6)
    stack.free(ids(5, 6))
    stack.grow(1)
    stack.free(ids(1, 2, 3))
    assert stack.allocate(4, near=5).tolist() == [1, 2, 3, 5]
    assert stack.allocate(2).tolist() == [6, 7]


def test_pages_of_one_size_stay_runs_on_the_stack():
    stack = ALLOCATORS["stack"](12)
    pages = stack.allocate(12).reshape(4, 3)
    stack.free(pages[[2, 0]].ravel())
    stack.free(pages[3])
    assert stack.allocate(9).reshape(3, 3).tolist() == [[10, 11, 12], [7, 8, 9], [1, 2, 3]]


@pytest.mark.parametrize("name", ["first_fit", "linear"])
def test_first_fit_takes_the_lowest(name):
    allocator = with_free(name, 12, 1, 4, 5, 6, 8, 9)
    assert [allocator.allocate(n).tolist() for n in (2, 1, 2, 1)] == [[4, 5], [1], [8, 9], [6]]


def test_next_fit_goes_on_from_the_hint_and_round_the_end():
    allocator = with_free("next_fit", 12, 1, 2, 4, 5, 6, 10, 11, 12)
    assert [allocator.allocate(n).tolist() for n in (1, 2, 1, 3)] == [[1], [4, 5], [6], [10, 11, 12]]
    allocator.free(ids(6))
    assert allocator.allocate(1).tolist() == [2]


def test_next_fit_keeps_the_hint_when_near_decides():
    allocator = with_free("next_fit", 9, 1, 3, 4, 7, 8)
    assert allocator.allocate(1).tolist() == [1]
    assert allocator.allocate(1, near=6).tolist() == [7]
    assert allocator.allocate(1).tolist() == [3]


def test_best_fit_takes_the_shortest_that_fits_and_the_lowest_of_those():
    allocator = with_free("best_fit", 16, 1, 2, 3, 5, 6, 9, 10, 13)
    assert [allocator.allocate(n).tolist() for n in (2, 1, 1, 1)] == [[5, 6], [13], [9], [10]]


def test_best_fit_checks_that_its_two_indices_agree():
    allocator = with_free("best_fit", 6, 3, 4)
    allocator._length_to[4] = 0
    with pytest.raises(AssertionError, match="different free runs"):
        allocator.check()


class TestBuddy:
    def blocks(self, allocator):
        """First unit and size of every free block."""
        return [
            (1 + (int(index) << order), 1 << order)
            for order, free in enumerate(allocator._free)
            for index in np.flatnonzero(free)
        ]

    def test_a_pool_of_any_size_is_cut_into_the_largest_blocks(self):
        assert self.blocks(ALLOCATORS["buddy"](13)) == [(13, 1), (9, 4), (1, 8)]

    def test_what_rounding_added_is_given_back_at_once(self):
        allocator = ALLOCATORS["buddy"](64)
        assert allocator.allocate(36).tolist() == list(range(1, 37))
        assert allocator.free_units == 28 and self.blocks(allocator) == [(37, 4), (41, 8), (49, 16)]

    def test_the_smallest_block_that_holds_the_request_is_split(self):
        allocator = with_free("buddy", 16, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12)
        assert allocator.allocate(1).tolist() == [11]
        assert allocator.allocate(3).tolist() == [1, 2, 3]
        assert self.blocks(allocator) == [(4, 1), (12, 1), (5, 4)]

    def test_halves_merge_up_to_the_whole(self):
        allocator = ALLOCATORS["buddy"](8)
        units = allocator.allocate(8)
        for unit in (1, 3, 2, 8, 7, 5):
            allocator.free(ids(unit))
        assert self.blocks(allocator) == [(3, 1), (5, 1), (1, 2), (7, 2)]
        allocator.free(units[3:4])
        assert self.blocks(allocator) == [(5, 1), (7, 2), (1, 4)]
        allocator.free(units[5:6])
        assert self.blocks(allocator) == [(1, 8)]

    def test_only_halves_of_one_block_merge(self):
        assert self.blocks(with_free("buddy", 8, 2, 3)) == [(2, 1), (3, 1)]

    def test_near_follows_one_block_after_the_other(self):
        allocator = with_free("buddy", 8, 2, 3, 4, 5)
        assert allocator.allocate(3, near=1).tolist() == [2, 3, 4]
        assert self.blocks(allocator) == [(5, 1)]


class TestRuns:
    def test_runs_and_back(self):
        units = ids(1, 2, 5, 7, 8, 9)
        starts, ends = runs_of(units)
        assert starts.tolist() == [1, 5, 7] and ends.tolist() == [3, 6, 10]
        assert units_of(starts, ends).tolist() == units.tolist()
        assert units_of(ids(), ids()).tolist() == []

    @pytest.mark.parametrize(
        "starts, ends, edges",
        [
            ([3], [5], [1, 8]),
            ([9], [10], [1, 3, 5, 8, 9, 10]),
            ([2], [3], [1, 2, 5, 8]),
            ([1, 6], [3, 7], [5, 6, 7, 8]),
            ([3, 8], [5, 10], [1, 10]),
        ],
        ids=["fills_a_gap", "stands_alone", "taken_from_the_end", "whole_and_middle", "two_at_once"],
    )
    def test_toggling(self, starts, ends, edges):
        assert toggled(ids(1, 3, 5, 8), ids(*starts), ids(*ends)).tolist() == edges


def fewest_runs(free, units, taken):
    """Whether nobody could have done with fewer runs than ``taken`` is."""
    lengths = sorted((len(run) for run in runs(free)), reverse=True)
    least = next(count for count in range(1, len(lengths) + 1) if sum(lengths[:count]) >= units)
    return len(runs(taken)) == least


def runs(units):
    """Maximal runs of ascending consecutive units, in the order given."""
    found = []
    for unit in units:
        if found and found[-1][-1] == unit - 1:
            found[-1].append(unit)
        else:
            found.append([unit])
    return found


class Traffic(RuleBasedStateMachine):
    """Allocations and frees in any grouping, and a pool whose size changes, against two sets."""

    name = "stack"

    def __init__(self):
        super().__init__()
        self.allocator = ALLOCATORS[self.name](12)
        self.free_set = set(range(1, 13))
        self.held = []

    @rule(data=st.data())
    def allocate(self, data):
        units = data.draw(st.integers(0, len(self.free_set)), "units")
        near = data.draw(st.one_of(st.none(), st.sampled_from(self.held)) if self.held else st.none(), "near")
        taken = self.allocator.allocate(units, near).tolist()
        assert len(taken) == units == len(set(taken)) and set(taken) <= self.free_set
        if self.name not in ("stack", "buddy") and units:
            assert fewest_runs(sorted(self.free_set), units, taken)
        if near is not None and self.name != "stack" and units:
            right_after = set(range(near + 1, near + 1 + units))
            assert set(taken) == right_after or not right_after <= self.free_set
        self.free_set -= set(taken)
        self.held += taken

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        given = data.draw(st.lists(st.sampled_from(self.held), unique=True), "given")
        self.allocator.free(np.array(given, np.int32))
        self.free_set |= set(given)
        self.held = [unit for unit in self.held if unit not in self.free_set]

    @rule(data=st.data())
    def refuse(self, data):
        """Good units and one that is none, is free, or is there twice."""
        bad = [-1, 0, self.allocator.total_units + 1, *self.free_set, *self.held[:1] * 2]
        given = [*self.held[:2], data.draw(st.sampled_from(bad), "bad")]
        with pytest.raises(ValueError):
            self.allocator.free(np.array(given, np.int32))

    @rule(units=st.integers(1, 9))
    def grow(self, units):
        total = self.allocator.total_units
        if total + units <= 40:
            self.allocator.grow(units)
            self.free_set |= set(range(total + 1, total + units + 1))

    @rule(units=st.integers(1, 9))
    def shrink(self, units):
        total = self.allocator.total_units
        if units < total:
            last = set(range(total - units + 1, total + 1))
            assert self.allocator.shrink(units) == (last <= self.free_set)
            if last <= self.free_set:
                self.free_set -= last

    @invariant()
    def agrees(self):
        assert self.allocator.check().tolist() == sorted(self.free_set)
        assert self.allocator.free_units == len(self.free_set)
        assert self.allocator.total_units == len(self.free_set) + len(self.held)


@every
def test_traffic(name):
    machine = type("Traffic", (Traffic,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=30))


def soak(name, operations, total=2048, seed=0):
    """Pages of 1 to 4 units for many owners, up to the last unit; every unit against an array of owners."""
    random = np.random.default_rng(seed)
    allocator = ALLOCATORS[name](total)
    owner = np.zeros(total + 1, np.int32)
    holdings = {}
    done = number = 0
    while done < operations:
        units = int(random.integers(1, 5)) * int(random.integers(1, 65))
        if units <= allocator.free_units:
            number += 1
            last = next(reversed(holdings.values()))[-1] if holdings and random.random() < 0.5 else None
            taken = allocator.allocate(units, near=last)
            assert len(taken) == units and not owner[taken].any()
            owner[taken] = number
            holdings[number] = taken
            assert (owner == number).sum() == units  # none was there twice
        else:
            leaving = random.choice(list(holdings), size=1 + len(holdings) // 4, replace=False)
            taken = random.permutation(np.concatenate([holdings.pop(who) for who in leaving]))
            allocator.free(taken)
            owner[taken] = 0
            if random.random() < 0.05:
                assert np.array_equal(allocator.check(), np.flatnonzero(owner[1:] == 0) + 1)
        done += len(taken)
    allocator.free(np.concatenate(list(holdings.values())))
    assert np.array_equal(allocator.check(), np.arange(1, total + 1))


@every
def test_soak(name):
    soak(name, 20_000)


@pytest.mark.slow
@every
def test_long_soak(name):
    """10^6 units, taken or given back, for each allocator."""
    soak(name, 10**6, seed=1)
