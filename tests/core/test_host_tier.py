"""The host tier: states, order of eviction, and contents bit for bit. BR numbers are those of public bug reports."""

import pytest
import torch

from octavo.core.memory import host_tier
from octavo.core.memory.host_tier import HostTier
from octavo.core.memory.prefix_cache import PrefixCache, page_key

from .host_tier_cases import (
    ROOT,
    UNIT_BYTES,
    LowestFirst,
    Spy,
    carry_out,
    check,
    find,
    ids,
    kept,
    node_of,
    observed,
    pool_of,
    restore,
    store,
    stored,
    tier_of,
)


@pytest.fixture
def spied(monkeypatch):
    tier = tier_of(4)
    return tier, Spy(tier, monkeypatch)


class TestStates:
    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_from_store_to_restore(self, backend):
        kv = pool_of(8)
        before = kv.clone()
        tier = tier_of(4, kv, backend)
        assert find(tier, 7) is None
        assert store(tier, ids(5, 3), 7)
        page = find(tier, 7)
        assert page == 1 and page in tier and len(tier) == 1
        assert (tier.state(page), tier.page_units(page)) == ("dirty", 2)
        assert tier.kv.isnan().all() and (tier.units_total, tier.units_free, tier.units_held) == (4, 2, 2)
        check(tier)

        carry_out(tier, kv)
        assert tier.state(page) == "reclaimable"
        assert torch.equal(tier.kv[1:3], before[[5, 3]]) and tier.kv[[0, 3, 4]].isnan().all()
        check(tier)

        restore(tier, page, ids(2, 8))
        assert tier.state(page) == "clean" and torch.equal(kv, before)
        check(tier)

        carry_out(tier, kv)
        assert tier.state(page) == "reclaimable"
        before[[2, 8]] = before[[5, 3]]
        assert torch.equal(kv, before)
        assert (tier.stored, tier.restored, tier.evicted) == (1, 1, 0)
        assert (tier.bytes_out, tier.bytes_in) == (2 * UNIT_BYTES, 2 * UNIT_BYTES)
        check(tier)

    def test_pages_of_several_sizes_in_pieces(self):
        kv, tier = pool_of(8), tier_of(6)
        stored(tier, kv, 1)
        stored(tier, kv, 2, units=(2, 3))
        stored(tier, kv, 3, units=(4,))
        tier.forget(find(tier, 1))
        tier.forget(find(tier, 3))
        stored(tier, kv, 4, units=(5, 6, 7))  # host units 1, 4 and 5
        assert torch.equal(tier.kv[[2, 3, 1, 4, 5]], kv[[2, 3, 5, 6, 7]]) and tier.kv[6].isnan().all()
        before = kv.clone()
        restore(tier, find(tier, 4), ids(1, 2, 3))
        carry_out(tier, kv)
        assert torch.equal(kv[1:4], before[5:8])
        check(tier)

    def test_two_restores_of_one_page_at_once(self):
        kv, tier = pool_of(8), tier_of(1)
        stored(tier, kv, 1)
        restore(tier, 1, ids(4))
        restore(tier, 1, ids(6))
        check(tier)
        carry_out(tier, kv)
        assert tier.state(1) == "reclaimable" and torch.equal(kv[[4, 6]], kv[[1, 1]]) and tier.restored == 2
        check(tier)

    def test_clear_and_forget(self):
        kv, tier = pool_of(8), tier_of(4)
        stored(tier, kv, 1, 2)
        store(tier, ids(3, 4), 3)
        tier.forget(find(tier, 3))  # with its copy out
        assert not tier._out and tier.units_free == 2 and kept(tier, 1, 2, 3) == [1, 2]
        store(tier, ids(3), 3)
        tier.clear()
        assert (len(tier), tier.units_free, kept(tier, 1, 2, 3)) == (0, 4, [])
        assert not tier._index._nodes
        check(tier)
        carry_out(tier, kv)
        assert (tier.stored, tier.evicted) == (2, 0)


class TestOrderOfCopies:
    def test_one_launch_each_way_out_before_in(self, spied):
        tier, spy = spied
        kv = pool_of(8)
        stored(tier, kv, 1, 2)
        restore(tier, 1, ids(8))
        store(tier, ids(3, 4), 3)
        restore(tier, 2, ids(7))
        spy.calls.clear()
        carry_out(tier, kv)
        assert spy.calls == [("out", [[3, 3], [4, 4]]), ("in", [[1, 8], [2, 7]])]
        carry_out(tier, kv)
        assert len(spy.calls) == 2

    def test_a_unit_given_up_in_this_step_is_the_target_of_a_restore(self):
        kv, tier = pool_of(8), tier_of(4)
        stored(tier, kv, 1, units=(1, 2))
        before = kv.clone()
        store(tier, ids(5, 6), 2)
        restore(tier, find(tier, 1), ids(6, 5))
        carry_out(tier, kv)
        assert torch.equal(kv[[6, 5]], before[[1, 2]])
        assert torch.equal(tier.kv[[3, 4]], before[[5, 6]])

    def test_a_page_stored_in_this_step_is_restored_in_it(self):
        kv, tier = pool_of(8), tier_of(2)
        before = kv.clone()
        store(tier, ids(5, 6), 1)
        page = find(tier, 1)
        restore(tier, page, ids(1, 2))
        assert tier.state(page) == "dirty"
        check(tier)
        carry_out(tier, kv)
        assert torch.equal(kv[1:3], before[5:7]) and tier.state(page) == "reclaimable"
        check(tier)

    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_what_is_given_up_before_it_came_is_not_restored(self, backend):
        """Its units may be promised to others, another restore among them."""
        kv, tier = pool_of(8), tier_of(4, backend=backend)
        stored(tier, kv, 1, units=(1, 2))
        stored(tier, kv, 2, units=(3,))
        restore(tier, find(tier, 1), ids(7, 8))
        assert store(tier, ids(7, 8), 1)
        assert tier.state(find(tier, 1)) == "reclaimable"
        restore(tier, find(tier, 2), ids(7))
        check(tier)
        before = kv.clone()
        carry_out(tier, kv)
        assert torch.equal(kv[7], before[3]) and torch.equal(kv[8], before[8]) and tier.bytes_in == UNIT_BYTES
        check(tier)

    def test_only_the_restore_into_those_units_is_dropped(self):
        kv, tier = pool_of(8), tier_of(2)
        stored(tier, kv, 1, units=(1, 2))
        for units in ((3, 4), (5, 6), (7, 8)):
            restore(tier, 1, ids(*units))
        store(tier, ids(5, 6), 1)
        check(tier)
        before = kv.clone()
        carry_out(tier, kv)
        assert torch.equal(kv[[3, 4, 7, 8]], before[[1, 2, 1, 2]]) and torch.equal(kv[5:7], before[5:7])
        assert tier.state(1) == "reclaimable" and tier.restored == 2
        check(tier)

    def test_a_twin_on_the_device_may_go_while_the_page_comes(self):
        kv, tier = pool_of(8), tier_of(2)
        stored(tier, kv, 1)
        restore(tier, 1, ids(4))
        assert store(tier, ids(6), 1)
        carry_out(tier, kv)
        assert torch.equal(kv[4], kv[1]) and tier.stored == 1
        check(tier)

    @pytest.mark.parametrize(("fails", "left"), [("out", ["out", "in"]), ("in", ["in"])])
    def test_what_a_failing_transfer_did_not_carry_out_stays_queued(self, spied, fails, left):
        tier, spy = spied
        kv = pool_of(8)
        stored(tier, kv, 1, 2)
        store(tier, ids(5), 3)
        store(tier, ids(6), 4)
        restore(tier, 1, ids(5))
        restore(tier, 3, ids(7))
        before, seen = kv.clone(), observed(tier)
        spy.fail = fails
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the bus is gone"):
                carry_out(tier, kv)
            assert torch.equal(kv, before) and tier.restored == 0
            check(tier)
        if fails == "out":
            assert observed(tier) == seen and tier.kv[[3, 4]].isnan().all()
        else:
            assert tier.stored == 4 and [tier.state(page) for page in (1, 2, 3, 4)] == [
                "clean", "reclaimable", "clean", "reclaimable",
            ]  # fmt: skip
        spy.fail = None
        spy.calls.clear()
        carry_out(tier, kv)
        assert [way for way, _ in spy.calls] == left
        assert torch.equal(tier.kv[1:], before[[1, 1, 5, 6]]) and torch.equal(kv[[5, 7]], before[[1, 5]])
        assert (tier.stored, tier.restored, len(tier._out), len(tier._in)) == (4, 2, 0, 0)
        check(tier)


class TestFinding:
    def test_pages_whose_keys_collide_are_both_found(self):
        kv, tier = pool_of(8), tier_of(4)
        key, index = page_key(ROOT, ids(1)), tier._index
        for number, unit in ((1, 5), (2, 6)):
            tier.store(ids(unit), index.enter(key, ROOT, ids(number), ""))
        tier.copy_out(kv)
        assert [index.find(key, ROOT, ids(number), "").host for number in (1, 2)] == [[1], [2]]
        assert torch.equal(tier.kv[1:3], kv[5:7])
        check(tier)
        tier.forget(1)
        assert index.find(key, ROOT, ids(1), "") is None and index.find(key, ROOT, ids(2), "").host == [2]
        check(tier)

    def test_each_group_of_layers_has_a_page_of_its_own(self):
        kv, tier = pool_of(8), tier_of(4, groups=2)
        node = node_of(tier, 7)
        tier.store(ids(5), node, 1)
        assert node.host == [0, 1]
        tier.store(ids(2, 3), node, 0)
        assert node.host == [2, 1]
        tier.copy_out(kv)
        assert torch.equal(tier.kv[1:4], kv[[5, 2, 3]])
        check(tier)
        tier.forget(2)
        assert node.host == [0, 1] and find(tier, 7) is None and node in tier._index._nodes[node.key]
        tier.forget(1)
        assert not tier._index._nodes
        check(tier)

    def test_what_leads_to_a_page_stays_in_the_index(self):
        kv, tier = pool_of(8), tier_of(4, groups=2)
        head = node_of(tier, 7)
        tail = node_of(tier, 8, head)
        tier.store(ids(5), tail, 1)
        assert [tier.leads_on(head, group) for group in (0, 1)] == [False, True] and not tier.leads_on(tail, 1)
        tier.store(ids(6), node_of(tier, 9, head), 1)
        tier.copy_out(kv)
        check(tier)
        tier.forget(tail.host[1])
        assert tier.leads_on(head, 1) and tier._index.find(head.key, ROOT, head.tokens, "") is head
        check(tier)
        tier.clear()
        assert not tier.leads_on(head, 1) and not tier._index._nodes
        check(tier)

    def test_what_is_here_already_is_not_copied_again(self):
        kv, tier = pool_of(8), tier_of(4)
        stored(tier, kv, 1, 1)
        stored(tier, kv, 1, units=(5,))
        assert (tier.stored, tier.bytes_out, len(tier)) == (1, UNIT_BYTES, 1) and torch.equal(tier.kv[1], kv[1])

    def test_arrays_of_the_caller_may_change_later(self):
        kv, tier = pool_of(8), tier_of(4)
        units = ids(5, 6)
        store(tier, units, 1)
        units[:] = 1
        carry_out(tier, kv)
        assert find(tier, 1) == 1 and torch.equal(tier.kv[1:3], kv[5:7])
        before, units = kv.clone(), ids(1, 2)
        restore(tier, 1, units)
        units[:] = 4
        carry_out(tier, kv)
        assert torch.equal(kv[1:3], before[5:7]) and torch.equal(kv[3:], before[3:])


class TestEviction:
    def test_br58_the_victim_is_the_least_recently_used(self):
        kv, tier = pool_of(8), tier_of(3)
        stored(tier, kv, "A")
        stored(tier, kv, "B")
        restore(tier, find(tier, "A"), ids(4))
        carry_out(tier, kv)
        stored(tier, kv, "C")
        stored(tier, kv, "D")
        assert kept(tier, *"ABCD") == ["A", "C", "D"] and tier.evicted == 1

    def test_br58_a_tie_has_the_same_victim_every_time(self):
        """Pages stored in one step: the one that the device gave up first."""
        for _ in range(20):
            kv, tier = pool_of(8), tier_of(3)
            stored(tier, kv, *"ABC")
            stored(tier, kv, "D")
            assert kept(tier, *"ABCD") == ["B", "C", "D"]

    def test_storing_it_again_is_a_use(self):
        kv, tier = pool_of(8), tier_of(3)
        stored(tier, kv, *"ABC")
        stored(tier, kv, "A")
        stored(tier, kv, "D")
        assert kept(tier, *"ABCD") == ["A", "C", "D"]

    def test_storing_it_again_before_it_was_copied_is_a_use(self):
        kv, tier = pool_of(8), tier_of(3)
        stored(tier, kv, *"ABCA")
        stored(tier, kv, "D")
        assert kept(tier, *"ABCD") == ["A", "C", "D"]

    def test_the_head_of_a_chain_outlives_its_tail(self):
        """Given up tail first, restored head first."""
        kv, tier = pool_of(8), tier_of(3)
        stored(tier, kv, *"cba")
        for name, unit in zip("abc", (4, 5, 6), strict=True):
            restore(tier, find(tier, name), ids(unit))
        carry_out(tier, kv)
        for name, left in zip("xyz", ("abx", "axy", "xyz"), strict=True):
            stored(tier, kv, name)
            assert kept(tier, *"abcxyz") == list(left)

    def test_what_is_held_stays_until_it_was_restored(self):
        kv, tier = pool_of(8), tier_of(2)
        stored(tier, kv, "A")
        stored(tier, kv, "B")
        tier.hold(find(tier, "A"))
        assert not store(tier, ids(7, 8), "C") and store(tier, ids(7), "D")
        assert kept(tier, *"ABCD") == ["A", "D"]
        tier.restore(find(tier, "A"), ids(3))
        check(tier)
        carry_out(tier, kv)
        assert torch.equal(kv[3], kv[1]) and store(tier, ids(7, 8), "C")

    def test_as_many_pages_as_are_needed(self):
        kv, tier = pool_of(8), tier_of(6)
        for name, units in zip("ABC", ((1,), (2, 3), (4, 5, 6)), strict=True):
            stored(tier, kv, name, units=units)
        stored(tier, kv, "D", units=(7, 8))  # A has one unit, B two
        assert kept(tier, *"ABCD") == ["C", "D"] and (tier.evicted, tier.units_free) == (2, 1)
        stored(tier, kv, "E", units=(1,))
        assert kept(tier, *"CDE") == ["C", "D", "E"] and tier.evicted == 2
        check(tier)

    @pytest.mark.parametrize("units", [ids(7, 8), ids(4, 5, 6, 7, 8)], ids=len)
    def test_no_room_changes_nothing(self, units):
        """A is reclaimable, B is being restored, C is dirty; the second page is larger than the whole tier."""
        kv, tier = pool_of(8), tier_of(4)
        stored(tier, kv, "A")
        stored(tier, kv, "B", units=(2, 3))
        restore(tier, find(tier, "B"), ids(1, 2))
        store(tier, ids(3), "C")
        before = observed(tier)
        assert not store(tier, units, "D")
        assert observed(tier) == before and kept(tier, *"ABCD") == ["A", "B", "C"]
        check(tier)
        assert store(tier, ids(7), "E") and kept(tier, *"ABCE") == ["B", "C", "E"]


class TestRefusals:
    @pytest.mark.parametrize("units", [0, -3])
    def test_no_units(self, units):
        with pytest.raises(ValueError, match=f"{units} units .* at least 1"):
            HostTier(units, pool_of(1), "cpu", LowestFirst(1), PrefixCache())

    def test_no_memory(self, monkeypatch):
        monkeypatch.setattr(host_tier, "available_memory", lambda: 5 * UNIT_BYTES)
        tier_of(4)
        with pytest.raises(ValueError, match=f"{6 * UNIT_BYTES} bytes of host memory, and {5 * UNIT_BYTES} are avail"):
            tier_of(5)

    def test_memory_that_the_system_refuses(self, monkeypatch):
        def refuse(*args, **kwargs):
            raise RuntimeError("cannot lock so much")

        monkeypatch.setattr(torch, "empty", refuse)
        with pytest.raises(ValueError, match=r"5 units .* lower host_tokens \(cannot lock so much\)"):
            tier_of(5)

    def test_available_memory_is_plausible(self):
        assert 2**20 < host_tier.available_memory() < 2**50

    @pytest.mark.parametrize(
        ("mistake", "message"),
        [
            (lambda tier: store(tier, ids(7), 9), "waits for its restore"),
            (lambda tier: tier.forget(1), "page 1 is being restored"),
            (lambda tier: tier.clear(), "1 restores are queued"),
            (lambda tier: tier.restore(1, ids(4)), "a page of 2 units does not fit 1"),
            (lambda tier: tier.restore(1, ids(4, 4)), "distinct"),
            (lambda tier: tier.restore(1, ids(5, 7)), "waits for one restore"),
            (lambda tier: tier.restore(3, ids(4)), "restored and not held"),
            (lambda tier: tier.copy_out(pool_of(8).half()), "units of another shape"),
            (lambda tier: tier.copy_in(pool_of(8)), "1 pages are still to be copied out"),
        ],
        ids=[
            "store-unwritten",
            "forget-held",
            "clear-held",
            "too-few-units",
            "unit-twice",
            "unit-waits",
            "not-held",
            "other-pool",
            "in-before-out",
        ],
    )
    def test_mistakes_of_a_caller(self, mistake, message):
        kv, tier = pool_of(8), tier_of(4)
        stored(tier, kv, 1, units=(1, 2))
        stored(tier, kv, 2, units=(3,))
        restore(tier, 1, ids(6, 7))
        store(tier, ids(4), 3)
        before = observed(tier)
        with pytest.raises(AssertionError, match=message):
            mistake(tier)
        assert observed(tier) == before
        check(tier)

    def test_the_allocator_deals_in_the_tier_alone(self):
        with pytest.raises(AssertionError):
            HostTier(4, pool_of(1), "cpu", LowestFirst(5), PrefixCache())

    @pytest.mark.parametrize(
        ("break_it", "message"),
        [
            (lambda tier: tier._allocator.allocate(1), "do not partition"),
            (lambda tier: tier._allocator.free(ids(1)), "do not partition"),
            (lambda tier: tier._pages[1].node.host.__setitem__(0, 2), "page 1 is not where its units or its node say"),
            (lambda tier: tier._behind.clear(), "0 host pages are counted behind others, 2 are"),
            (lambda tier: setattr(tier._pages[1], "restores", 2), "counts 2 restores, 0 queued"),
            (lambda tier: tier._in.pop(), "counts 1 restores, 0 queued"),
            (lambda tier: tier._reclaimable.popitem(), "to be evicted"),
            (lambda tier: tier._out.update({1: ids(1)}), "is dirty; to be evicted"),
            (lambda tier: tier._out.update({4: ids(1)}), r"\[4\] are queued and do not exist"),
            (lambda tier: setattr(tier, "_reclaimable_units", 3), "3 host units are counted"),
            (lambda tier: tier._arriving.add(2), "wait for a restore"),
        ],
        ids=[
            "lost-unit", "unit-twice", "other-page", "behind", "restores", "lost-restore", "lost-order",
            "dirty-in-order", "foreign-page", "count", "arriving",
        ],
    )  # fmt: skip
    def test_check_finds(self, break_it, message):
        kv, tier = pool_of(8), tier_of(4)
        stored(tier, kv, 1, 2)
        restore(tier, 2, ids(7))
        check(tier)
        break_it(tier)
        with pytest.raises(AssertionError, match=message):
            check(tier)
