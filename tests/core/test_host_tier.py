"""The host tier: states, order of eviction, and contents bit for bit. BR numbers are those of public bug reports."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.memory import host_tier
from octavo.core.memory.host_tier import HostTier
from octavo.core.memory.prefix_cache import PrefixCache, page_key, root_key
from octavo.kernels import ops

SHAPE = (2, 2, 1, 2, 3)  # layers, K and V, kv_heads, unit_tokens, head_dim
UNIT_BYTES = 2 * 2 * 1 * 2 * 3 * 4
ROOT = root_key()


class LowestFirst:
    """The smallest allocator there is: the lowest free units, wherever they lie."""

    def __init__(self, units):
        self.total_units = units
        self._free = list(range(1, units + 1))

    @property
    def free_units(self):
        return len(self._free)

    def allocate(self, units, near=None):
        assert units <= self.free_units
        taken, self._free = self._free[:units], self._free[units:]
        return np.array(taken, np.int32)

    def free(self, units):
        assert not set(units.tolist()) & set(self._free)
        self._free = sorted(self._free + units.tolist())

    def check(self):
        return np.array(self._free, np.int32)


def ids(*units):
    return np.array(units, np.int32)


def pool_of(units):
    """A device pool in which every unit holds its own number, with a different fraction in every place."""
    count = torch.Size(SHAPE).numel()
    return torch.arange(units + 1.0)[:, None].add(torch.arange(count) / count).view(units + 1, *SHAPE)


def tier_of(units, kv=None, backend="cpu", groups=1):
    tier = HostTier(units, pool_of(8) if kv is None else kv, backend, LowestFirst(units), PrefixCache(groups))
    tier.kv.fill_(torch.nan)
    return tier


def key_of(name, parent=ROOT):
    """Key and tokens of a page of one token: a number, or the code of a letter."""
    page = ids(ord(name) if isinstance(name, str) else name)
    return page_key(ROOT if parent == ROOT else parent.key, page), page


def node_of(tier, name, parent=ROOT):
    """The node of a name, made if it is new."""
    key, page = key_of(name, parent)
    return tier._index.enter(key, parent, page, "")


def store(tier, units, name, parent=ROOT):
    node = node_of(tier, name, parent)
    try:
        return tier.store(units, node)
    finally:
        tier._index.prune(node)


def find(tier, name):
    """The host page of a name; None if there is none."""
    key, page = key_of(name)
    node = tier._index.find(key, ROOT, page, "")
    return node.host[0] or None if node else None


def kept(tier, *names):
    """Which of some names can be found."""
    return [name for name in names if find(tier, name) is not None]


def stored(tier, kv, *names, units=(1,)):
    """Store pages and carry it out."""
    for name in names:
        assert store(tier, ids(*units), name)
    tier.copy_out(kv)


def restore(tier, page, units):
    tier.hold(page)
    tier.restore(page, units)


def carry_out(tier, kv):
    tier.copy_out(kv)
    tier.copy_in(kv)


def observed(tier):
    """Everything that can be seen of a tier."""
    pages = sorted(tier._pages)
    return (
        [(page, tier.state(page), tier.page_units(page), tier._pages[page].node.id) for page in pages],
        (tier.units_total, tier.units_free, tier.units_held, len(tier), len(tier._out), len(tier._in)),
        (tier.stored, tier.restored, tier.evicted, tier.bytes_out, tier.bytes_in),
        tier._allocator.check().tolist(),
    )


def check(tier):
    tier.check()
    tier._index.check()


class Spy:
    """The transfers of a tier, as (direction, pairs); ``fail`` names a direction that raises."""

    def __init__(self, tier, monkeypatch):
        self.calls, self.fail = [], None
        transfer = ops.transfer

        def spy(source, target, pairs, backend):
            way = "out" if target is tier.kv else "in"
            if way == self.fail:
                raise RuntimeError("the bus is gone")
            self.calls.append((way, pairs.tolist()))
            transfer(source, target, pairs, backend)

        monkeypatch.setattr(host_tier.ops, "transfer", spy)


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


class Tier(RuleBasedStateMachine):
    """A tier between a device of 10 units and a host of 7, against plain dicts.

    The machine plays the engine: pages are computed after a flush, given up, found, restored into whatever device units
    are free (units given up in the same step too), and the receivers of a restore may vanish before it is carried out.
    """

    NAMES, DEVICE, HOST = 8, 10, 7

    @initialize(backend=st.sampled_from(["cpu", "reference"]))
    def start(self, backend):
        self.kv = torch.full((self.DEVICE + 1, *SHAPE), torch.nan)
        self.tier = tier_of(self.HOST, self.kv, backend)
        self.free = list(range(1, self.DEVICE + 1))
        self.device = {}  # name -> device units that hold it
        self.computing = {}  # name -> device units that hold it after the next flush
        self.arriving = {}  # name -> device units that a restore fills at the next flush
        self.states = {}  # name -> state of its host page
        self.restores = []  # names of queued restores, in order
        self.order = []  # names in the host, least recently used first; those not complete have no place in it
        self.dirty = []  # names to be copied out, in order of use
        self.carried_out = [0, 0, 0]  # stored, restored, evicted

    @staticmethod
    def size(name):
        return 1 + name % 3

    def content(self, name):
        values = torch.randn(self.size(name), *SHAPE, generator=torch.Generator().manual_seed(name))
        return values.view(torch.int32)

    def take(self, name):
        """Device units for a page, every other free one if there are enough; None if there are too few."""
        k = self.size(name)
        taken = (self.free[::2] + self.free[1::2])[:k]
        if len(taken) < k:
            return None
        self.free = sorted(set(self.free) - set(taken))
        return ids(*taken)

    def pick(self, number, names):
        """One of some names; None if there is none."""
        names = sorted(names)
        return names[number % len(names)] if names else None

    @property
    def on_device(self):
        return self.device.keys() | self.computing.keys() | self.arriving.keys()

    @rule(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def compute(self, numbers):
        for number in numbers:
            name = self.pick(number, set(range(self.NAMES)) - self.on_device)
            if name is not None and (units := self.take(name)) is not None:
                self.computing[name] = units

    @rule(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def give_up(self, numbers):
        for number in numbers:
            name = self.pick(number, self.device)
            if name is not None:
                self.store(name)

    def store(self, name):
        units = self.device.pop(name)
        self.free = sorted(self.free + units.tolist())
        kept = store(self.tier, units, name)
        if name in self.states:
            for queue in (self.dirty, self.order):
                if name in queue:
                    queue.append(queue.pop(queue.index(name)))
            assert kept
            return
        room = self.HOST - sum(map(self.size, self.states))
        assert kept == (self.size(name) <= room + sum(map(self.size, self.order)))
        if kept:
            while room < self.size(name):
                victim = self.order.pop(0)
                del self.states[victim]
                room += self.size(victim)
                self.carried_out[2] += 1
            self.states[name] = "dirty"
            self.dirty.append(name)

    @rule(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=2))
    def restore(self, numbers):
        for number in numbers:
            name = self.pick(number, self.states.keys() - self.on_device)
            if name is None or (units := self.take(name)) is None:
                continue
            page = find(self.tier, name)
            assert self.tier.page_units(page) == self.size(name)
            restore(self.tier, page, units)
            self.arriving[name] = units
            self.restores.append(name)
            if name in self.order:
                self.order.remove(name)
                self.states[name] = "clean"

    @rule(number=st.integers(0, 9))
    def receiver_vanishes(self, number):
        """A page that was to be computed has nothing to give up; one that was to come is here already."""
        if (name := self.pick(number, self.computing)) is not None:
            self.free = sorted(self.free + self.computing.pop(name).tolist())
        if (name := self.pick(number, self.arriving)) is not None:
            units = self.arriving.pop(name)
            self.free = sorted(self.free + units.tolist())
            assert store(self.tier, units, name)
            self.restores.remove(name)
            if name in self.dirty:
                self.dirty.append(self.dirty.pop(self.dirty.index(name)))
            else:
                self.complete(name, "reclaimable")

    @rule(number=st.integers(0, 9))
    def forget(self, number):
        if (name := self.pick(number, self.states.keys() - set(self.restores))) is not None:
            self.tier.forget(find(self.tier, name))
            del self.states[name]
            for queue in (self.dirty, self.order):
                if name in queue:
                    queue.remove(name)

    @precondition(lambda self: not self.restores)
    @rule(often=st.integers(0, 9))
    def clear(self, often):
        if often == 0:
            self.tier.clear()
            self.states, self.order, self.dirty = {}, [], []

    @rule(fails=st.sampled_from([None, None, None, None, "out", "in"]))
    def carry_out(self, fails):
        with pytest.MonkeyPatch.context() as patch:
            spy = Spy(self.tier, patch)
            spy.fail = fails
            if (fails == "out" and self.dirty) or (fails == "in" and self.restores):
                with pytest.raises(RuntimeError):
                    carry_out(self.tier, self.kv)
                if fails == "in":
                    self.outs_done()
                return  # the step did not run
            carry_out(self.tier, self.kv)
        self.outs_done()
        self.ins_done()
        for name, units in self.computing.items():
            self.kv.view(torch.int32)[torch.from_numpy(units).long()] = self.content(name)
        self.device |= self.computing
        self.computing = {}
        for name, units in self.device.items():
            assert torch.equal(self.kv.view(torch.int32)[torch.from_numpy(units).long()], self.content(name))

    def outs_done(self):
        self.carried_out[0] += len(self.dirty)
        for name in self.dirty:
            self.complete(name, "clean" if name in self.restores else "reclaimable")
        self.dirty = []

    def ins_done(self):
        self.carried_out[1] += len(self.restores)
        for name in reversed(self.restores):
            self.complete(name, "reclaimable")
        self.restores = []
        self.device |= self.arriving
        self.arriving = {}

    def complete(self, name, state):
        self.states[name] = state
        if state == "reclaimable":
            self.order.append(name)

    @invariant()
    def agrees(self):
        if not hasattr(self, "tier"):
            return
        tier = self.tier
        check(tier)
        for name in range(self.NAMES):
            page = find(tier, name)
            assert (page is None) == (name not in self.states)
            if page is not None:
                assert tier.state(page) == self.states[name]
                if self.states[name] != "dirty":
                    host = tier.kv.view(torch.int32)[torch.from_numpy(tier._pages[page].units).long()]
                    assert torch.equal(host, self.content(name))
        assert tier.units_held == sum(map(self.size, self.states)) and len(tier) == len(self.states)
        assert (len(tier._out), len(tier._in)) == (len(self.dirty), len(self.restores))
        assert [tier.stored, tier.restored, tier.evicted] == self.carried_out


TestTier = Tier.TestCase
TestTier.settings = settings(max_examples=80, stateful_step_count=40)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_soak(backend):
    """The same machine under steady traffic, which hypothesis rarely keeps up: the tier is full most of the time."""
    random = Random(0)
    machine = Tier()
    machine.start(backend)
    for _ in range(400):
        machine.compute(random.choices(range(10), k=3))
        machine.give_up(random.choices(range(10), k=2))
        machine.restore(random.choices(range(10), k=2))
        machine.agrees()
        if random.random() < 0.2:
            machine.receiver_vanishes(random.randrange(10))
        if random.random() < 0.05:
            machine.forget(random.randrange(10))
        machine.carry_out(random.choice([None, None, None, None, "out", "in"]))
        machine.agrees()
    assert min(machine.carried_out) > 100
