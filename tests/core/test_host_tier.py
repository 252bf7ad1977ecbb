"""The host tier: states, order of eviction, and contents bit for bit. BR numbers are those of public bug reports."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.memory import host_tier
from octavo.core.memory.host_tier import HostTier, PageEntry
from octavo.core.prefix_cache import page_key, root_key
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


def tier_of(units, kv=None, backend="cpu"):
    tier = HostTier(units, pool_of(8) if kv is None else kv, backend, LowestFirst(units))
    tier.kv.fill_(torch.nan)
    return tier


def entry(name, parent=ROOT):
    """The page of one token, ``name`` or the code of that letter, on a node of the same number."""
    number = ord(name) if isinstance(name, str) else name
    tokens = ids(number)
    return PageEntry(page_key(ROOT, tokens), number, parent, tokens, "")


def find(tier, name, parent=ROOT):
    wanted = entry(name, parent)
    return tier.find(wanted.key, parent, wanted.tokens, "")


def kept(tier, *names):
    """Which of some names can be found."""
    return [name for name in names if find(tier, name) is not None]


def stored(tier, kv, *names, units=(1,)):
    """Store pages and carry it out."""
    for name in names:
        assert tier.store(ids(*units), entry(name))
    tier.flush(kv)


def observed(tier):
    """Everything that can be seen of a tier."""
    pages = sorted(tier._pages)
    return (
        [(page, tier.state(page), tier.page_units(page), tier.node(page)) for page in pages],
        (tier.units_total, tier.units_free, tier.units_held, len(tier), tier.pending),
        (tier.stored, tier.restored, tier.evicted, tier.bytes_out, tier.bytes_in),
        tier._allocator.check().tolist(),
    )


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
        assert find(tier, 7) is None and not tier.pending
        assert tier.store(ids(5, 3), entry(7))
        page = find(tier, 7)
        assert page == 1 and page in tier and len(tier) == 1 and tier.pending
        assert (tier.state(page), tier.page_units(page), tier.node(page)) == ("dirty", 2, 7)
        assert tier.kv.isnan().all() and (tier.units_total, tier.units_free, tier.units_held) == (4, 2, 2)
        tier.check()

        tier.flush(kv)
        assert tier.state(page) == "reclaimable" and not tier.pending
        assert torch.equal(tier.kv[1:3], before[[5, 3]]) and tier.kv[[0, 3, 4]].isnan().all()
        tier.check()

        tier.restore(page, ids(2, 8))
        assert tier.state(page) == "clean" and tier.pending and torch.equal(kv, before)
        tier.check()

        tier.flush(kv)
        assert tier.state(page) == "reclaimable"
        before[[2, 8]] = before[[5, 3]]
        assert torch.equal(kv, before)
        assert (tier.stored, tier.restored, tier.evicted) == (1, 1, 0)
        assert (tier.bytes_out, tier.bytes_in) == (2 * UNIT_BYTES, 2 * UNIT_BYTES)
        tier.check()

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
        tier.restore(find(tier, 4), ids(1, 2, 3))
        tier.flush(kv)
        assert torch.equal(kv[1:4], before[5:8])
        tier.check()

    def test_two_restores_of_one_page_at_once(self):
        kv, tier = pool_of(8), tier_of(1)
        stored(tier, kv, 1)
        tier.restore(1, ids(4))
        tier.restore(1, ids(6))
        tier.check()
        tier.flush(kv)
        assert tier.state(1) == "reclaimable" and torch.equal(kv[[4, 6]], kv[[1, 1]]) and tier.restored == 2
        tier.check()

    def test_clear_and_forget(self):
        kv, tier = pool_of(8), tier_of(4)
        stored(tier, kv, 1, 2)
        tier.store(ids(3, 4), entry(3))
        tier.forget(find(tier, 3))  # with its copy out
        assert not tier.pending and tier.units_free == 2 and kept(tier, 1, 2, 3) == [1, 2]
        tier.store(ids(3), entry(3))
        tier.clear()
        assert (len(tier), tier.units_free, tier.pending, kept(tier, 1, 2, 3)) == (0, 4, False, [])
        assert not tier._by_key
        tier.check()
        tier.flush(kv)
        assert (tier.stored, tier.evicted) == (2, 0)


class TestOrderOfCopies:
    def test_one_launch_each_way_out_before_in(self, spied):
        tier, spy = spied
        kv = pool_of(8)
        stored(tier, kv, 1, 2)
        tier.restore(1, ids(8))
        tier.store(ids(3, 4), entry(3))
        tier.restore(2, ids(7))
        spy.calls.clear()
        tier.flush(kv)
        assert spy.calls == [("out", [[3, 3], [4, 4]]), ("in", [[2, 7], [1, 8]])]
        tier.flush(kv)
        assert len(spy.calls) == 2

    def test_a_unit_given_up_in_this_step_is_the_target_of_a_restore(self):
        kv, tier = pool_of(8), tier_of(4)
        stored(tier, kv, 1, units=(1, 2))
        before = kv.clone()
        tier.store(ids(5, 6), entry(2))
        tier.restore(find(tier, 1), ids(6, 5))
        tier.flush(kv)
        assert torch.equal(kv[[6, 5]], before[[1, 2]])
        assert torch.equal(tier.kv[[3, 4]], before[[5, 6]])

    def test_a_page_stored_in_this_step_is_restored_in_it(self):
        kv, tier = pool_of(8), tier_of(2)
        before = kv.clone()
        tier.store(ids(5, 6), entry(1))
        page = find(tier, 1)
        tier.restore(page, ids(1, 2))
        assert tier.state(page) == "dirty"
        tier.check()
        tier.flush(kv)
        assert torch.equal(kv[1:3], before[5:7]) and tier.state(page) == "reclaimable"
        tier.check()

    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_of_two_restores_into_a_unit_the_later_holds(self, backend):
        """Whoever was to read the first gave its units up again."""
        kv, tier = pool_of(8), tier_of(4, backend=backend)
        stored(tier, kv, 1, units=(1, 2))
        stored(tier, kv, 2, units=(3,))
        tier.restore(find(tier, 1), ids(7, 8))
        tier.restore(find(tier, 2), ids(7))
        tier.check()
        before = kv.clone()
        tier.flush(kv)
        assert torch.equal(kv[[7, 8]], before[[3, 2]]) and tier.bytes_in == 2 * UNIT_BYTES
        tier.check()

    @pytest.mark.parametrize(("fails", "left"), [("out", ["out", "in"]), ("in", ["in"])])
    def test_what_a_failing_transfer_did_not_carry_out_stays_queued(self, spied, fails, left):
        tier, spy = spied
        kv = pool_of(8)
        stored(tier, kv, 1, 2)
        tier.store(ids(5), entry(3))
        tier.store(ids(6), entry(4))
        tier.restore(1, ids(5))
        tier.restore(3, ids(7))
        before, seen = kv.clone(), observed(tier)
        spy.fail = fails
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the bus is gone"):
                tier.flush(kv)
            assert torch.equal(kv, before) and tier.pending and tier.restored == 0
            tier.check()
        if fails == "out":
            assert observed(tier) == seen and tier.kv[[3, 4]].isnan().all()
        else:
            assert tier.stored == 4 and [tier.state(page) for page in (1, 2, 3, 4)] == [
                "clean", "reclaimable", "clean", "reclaimable",
            ]  # fmt: skip
        spy.fail = None
        spy.calls.clear()
        tier.flush(kv)
        assert [way for way, _ in spy.calls] == left
        assert torch.equal(tier.kv[1:], before[[1, 1, 5, 6]]) and torch.equal(kv[[5, 7]], before[[1, 5]])
        assert (tier.stored, tier.restored, tier.pending) == (4, 2, False)
        tier.check()


class TestFinding:
    def test_a_hit_is_verified(self):
        tier = tier_of(4)
        tier.store(ids(1), entry(7, parent=3))
        wanted = entry(7)
        assert tier.find(wanted.key, 3, wanted.tokens, "") == 1
        assert tier.find(wanted.key, 4, wanted.tokens, "") is None
        assert tier.find(wanted.key, ROOT, wanted.tokens, "") is None
        assert tier.find(wanted.key, 3, ids(8), "") is None
        assert tier.find(wanted.key, 3, wanted.tokens, "quest") is None

    def test_pages_whose_keys_collide_are_both_found(self):
        kv, tier = pool_of(8), tier_of(4)
        key, other = page_key(ROOT, ids(1)), ids(2)
        tier.store(ids(1), PageEntry(key, 11, ROOT, ids(1), ""))
        tier.store(ids(2), PageEntry(key, 12, ROOT, other, ""))
        tier.flush(kv)
        assert (tier.find(key, ROOT, ids(1), ""), tier.find(key, ROOT, other, "")) == (1, 2)
        tier.check()
        tier.forget(1)
        assert (tier.find(key, ROOT, ids(1), ""), tier.find(key, ROOT, other, "")) == (None, 2)
        tier.check()

    def test_what_is_here_already_is_not_copied_again(self):
        kv, tier = pool_of(8), tier_of(4)
        stored(tier, kv, 1, 1)
        stored(tier, kv, 1, units=(5,))
        assert (tier.stored, tier.bytes_out, len(tier)) == (1, UNIT_BYTES, 1) and torch.equal(tier.kv[1], kv[1])

    def test_arrays_of_the_caller_may_change_later(self):
        kv, tier = pool_of(8), tier_of(4)
        one, units = entry(1), ids(5, 6)
        tier.store(units, one)
        one.tokens[:], units[:] = 9, 1
        tier.flush(kv)
        assert find(tier, 1) == 1 and torch.equal(tier.kv[1:3], kv[5:7])
        before, units = kv.clone(), ids(1, 2)
        tier.restore(1, units)
        units[:] = 4
        tier.flush(kv)
        assert torch.equal(kv[1:3], before[5:7]) and torch.equal(kv[3:], before[3:])


class TestEviction:
    def test_br58_the_victim_is_the_least_recently_used(self):
        kv, tier = pool_of(8), tier_of(3)
        stored(tier, kv, "A")
        stored(tier, kv, "B")
        tier.restore(find(tier, "A"), ids(4))
        tier.flush(kv)
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
            tier.restore(find(tier, name), ids(unit))
        tier.flush(kv)
        for name, left in zip("xyz", ("abx", "axy", "xyz"), strict=True):
            stored(tier, kv, name)
            assert kept(tier, *"abcxyz") == list(left)

    def test_as_many_pages_as_are_needed(self):
        kv, tier = pool_of(8), tier_of(6)
        for name, units in zip("ABC", ((1,), (2, 3), (4, 5, 6)), strict=True):
            stored(tier, kv, name, units=units)
        stored(tier, kv, "D", units=(7, 8))  # A has one unit, B two
        assert kept(tier, *"ABCD") == ["C", "D"] and (tier.evicted, tier.units_free) == (2, 1)
        stored(tier, kv, "E", units=(1,))
        assert kept(tier, *"CDE") == ["C", "D", "E"] and tier.evicted == 2
        tier.check()

    @pytest.mark.parametrize("units", [ids(7, 8), ids(4, 5, 6, 7, 8)], ids=len)
    def test_no_room_changes_nothing(self, units):
        """A is reclaimable, B is being restored, C is dirty; the second page is larger than the whole tier."""
        kv, tier = pool_of(8), tier_of(4)
        stored(tier, kv, "A")
        stored(tier, kv, "B", units=(2, 3))
        tier.restore(find(tier, "B"), ids(1, 2))
        tier.store(ids(3), entry("C"))
        before = observed(tier)
        assert not tier.store(units, entry("D"))
        assert observed(tier) == before and kept(tier, *"ABCD") == ["A", "B", "C"]
        tier.check()
        assert tier.store(ids(7), entry("E")) and kept(tier, *"ABCE") == ["B", "C", "E"]


class TestRefusals:
    @pytest.mark.parametrize("units", [0, -3])
    def test_no_units(self, units):
        with pytest.raises(ValueError, match=f"{units} units .* at least 1"):
            HostTier(units, pool_of(1), "cpu", LowestFirst(1))

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
            (lambda tier: tier.store(ids(7), entry(9)), "waits for its restore"),
            (lambda tier: tier.forget(1), "page 1 is being restored"),
            (lambda tier: tier.clear(), "1 restores are queued"),
            (lambda tier: tier.restore(1, ids(4)), "a page of 2 units does not fit 1"),
            (lambda tier: tier.restore(1, ids(4, 4)), "distinct"),
            (lambda tier: tier.flush(pool_of(8).half()), "units of another shape"),
        ],
        ids=["store-unwritten", "forget-pinned", "clear-pinned", "too-few-units", "unit-twice", "other-pool"],
    )
    def test_mistakes_of_a_caller(self, mistake, message):
        kv, tier = pool_of(8), tier_of(4)
        stored(tier, kv, 1, units=(1, 2))
        tier.restore(1, ids(6, 7))
        before = observed(tier)
        with pytest.raises(AssertionError, match=message):
            mistake(tier)
        assert observed(tier) == before
        tier.check()

    def test_the_allocator_deals_in_the_tier_alone(self):
        with pytest.raises(AssertionError):
            HostTier(4, pool_of(1), "cpu", LowestFirst(5))

    @pytest.mark.parametrize(
        ("break_it", "message"),
        [
            (lambda tier: tier._allocator.allocate(1), "do not partition"),
            (lambda tier: tier._allocator.free(ids(1)), "do not partition"),
            (lambda tier: tier._by_key.popitem(), "differ from host pages"),
            (lambda tier: setattr(tier._pages[1], "restores", 2), "counts 2 restores, 0 queued"),
            (lambda tier: tier._in.pop(), "counts 1 restores, 0 queued"),
            (lambda tier: tier._reclaimable.popitem(), "to be evicted"),
            (lambda tier: tier._out.update({1: ids(1)}), "is dirty; to be evicted"),
            (lambda tier: tier._out.update({4: ids(1)}), r"\[4\] are queued and do not exist"),
            (lambda tier: setattr(tier, "_reclaimable_units", 3), "3 host units are counted"),
            (lambda tier: tier._arriving.add(2), "wait for a restore"),
        ],
        ids=[
            "lost-unit", "unit-twice", "lost-key", "restores", "lost-restore", "lost-order", "dirty-in-order",
            "foreign-page", "count", "arriving",
        ],
    )  # fmt: skip
    def test_check_finds(self, break_it, message):
        kv, tier = pool_of(8), tier_of(4)
        stored(tier, kv, 1, 2)
        tier.restore(2, ids(7))
        tier.check()
        break_it(tier)
        with pytest.raises(AssertionError, match=message):
            tier.check()


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
        kept = self.tier.store(units, entry(name))
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
            assert self.tier.page_units(page) == self.size(name) and self.tier.node(page) == name
            self.tier.restore(page, units)
            self.arriving[name] = units
            self.restores.append(name)
            if name in self.order:
                self.order.remove(name)
                self.states[name] = "clean"

    @rule(number=st.integers(0, 9))
    def receiver_vanishes(self, number):
        for waiting in (self.arriving, self.computing):
            if (name := self.pick(number, waiting)) is not None:
                self.free = sorted(self.free + waiting.pop(name).tolist())

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
    def flush(self, fails):
        with pytest.MonkeyPatch.context() as patch:
            spy = Spy(self.tier, patch)
            spy.fail = fails
            if (fails == "out" and self.dirty) or (fails == "in" and self.restores):
                with pytest.raises(RuntimeError):
                    self.tier.flush(self.kv)
                if fails == "in":
                    self.outs_done()
                return  # the step did not run
            self.tier.flush(self.kv)
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
        for position in reversed(range(len(self.restores))):
            name = self.restores[position]
            if name not in self.restores[:position]:
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
        tier.check()
        for name in range(self.NAMES):
            page = find(tier, name)
            assert (page is None) == (name not in self.states)
            if page is not None:
                assert tier.state(page) == self.states[name]
                if self.states[name] != "dirty":
                    host = tier.kv.view(torch.int32)[torch.from_numpy(tier._pages[page].units).long()]
                    assert torch.equal(host, self.content(name))
        assert tier.units_held == sum(map(self.size, self.states)) and len(tier) == len(self.states)
        assert tier.pending == bool(self.dirty or self.restores)
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
        machine.flush(random.choice([None, None, None, None, "out", "in"]))
        machine.agrees()
    assert min(machine.carried_out) > 100
