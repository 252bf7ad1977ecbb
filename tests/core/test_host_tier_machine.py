"""The host tier between a device and its own memory, in random traffic, against plain dicts."""

from random import Random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from .host_tier_cases import (
    SHAPE,
    Spy,
    carry_out,
    check,
    find,
    ids,
    restore,
    store,
    tier_of,
)


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
