"""Sequences that are counted on together: each as far as it would be if it were counted alone, and nobody else."""

import random
import weakref

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from octavo.core import SamplingParams
from octavo.core.execution.decode_batch import DecodeBatch
from octavo.core.execution.pace import STANDING, Pace, Paced

from .mixed_requests import tokens
from .test_looking_ahead import broken_copy, broken_forward
from .test_state_machine import DRAFTING, Traffic, fixtures_of


@pytest.mark.parametrize("seed", range(30))
def test_batches_that_share_members_count_each_as_if_alone(seed):
    draw = random.Random(seed)
    members = [Paced() for _ in range(6)]
    want = dict.fromkeys(members, 0)
    batches = [(Pace(), draw.sample(members, draw.randint(1, 6))) for _ in range(4)]
    for _ in range(200):
        pace, own = draw.choice(batches)
        kind = draw.random()
        if kind < 0.7:
            for _ in range(draw.choice([1, 1, 5])):
                pace.advance(own)
                want |= {member: want[member] + 1 for member in own}
        elif kind < 0.85:
            member = draw.choice(members)
            member.computed = want[member] = draw.randint(0, 9)
        else:
            batches[draw.randrange(4)] = Pace(), draw.sample(members, draw.randint(1, 6))
        assert [member.computed for member in members] == list(want.values())
    assert STANDING.steps == 0


def test_a_step_of_who_stays_together_touches_nobody():
    pace, members = Pace(), [Paced() for _ in range(3)]
    for _ in range(2):
        pace.advance(members)
    pace.advance(())
    assert [member.computed for member in members] == [3, 3, 3]


@pytest.fixture
def counted(monkeypatch):
    """Every sequence that there is, in whatever engine, stands where it stood when a batch has settled, or one token
    further if it is in it and no draft was computed. Gives the numbers of members of the batches that have."""
    living, seen = weakref.WeakSet(), []
    begin, settle = Paced.__init__, DecodeBatch.settle

    def begun(self):
        begin(self)
        living.add(self)

    def settled(batch):
        want = {sequence: sequence.computed for sequence in living}
        for sequence, draft in zip(batch.sequences, batch.drafting.tolist(), strict=True):
            want[sequence] += not draft
        settle(batch)
        assert want == {sequence: sequence.computed for sequence in living}
        seen.append(len(batch))

    monkeypatch.setattr(Paced, "__init__", begun)
    monkeypatch.setattr(DecodeBatch, "settle", settled)
    return seen


@pytest.mark.parametrize(
    "name, fields",
    [
        ("t_model", {"pool_tokens": 60, "step_tokens": 9, "max_seqs": 4}),
        ("t_model", {"pool_tokens": 48, "step_tokens": 9, "max_seqs": 5, "method": DRAFTING}),
        ("g_model", {"pool_tokens": 48, "step_tokens": 11, "max_seqs": 4}),
    ],
    ids=["dense", "drafts", "layer_groups"],
)
def test_traffic_is_counted_right(name, fields, request, counted, engine_for, assert_idle, as_if_beside):
    """Aborts, preemptions, forks, sessions, drafts, and passes that fail."""
    model = request.getfixturevalue(name)
    machine = type("Traffic", (Traffic,), {})
    machine.fixtures = fixtures_of(
        engine_for(model, prefix_cache=False), totals={"preemptions": 0, "copies": 0}, assert_idle=assert_idle,
        tight=lambda: engine_for(model, execution="graph", **fields),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=settings(max_examples=8, stateful_step_count=40))
    assert len(counted) > 20 and max(counted) > 1


@pytest.mark.parametrize("damage", [broken_forward, broken_copy])
def test_engines_count_their_own(damage, t_model, engine_for, counted, assert_idle, monkeypatch):
    """Two engines in turns, one of which fails once: in a launch, or on reading it."""
    engines = [engine_for(t_model, execution="graph", max_seqs=4) for _ in range(2)]
    for number in range(6):
        params = SamplingParams(max_tokens=12 + 2 * number, ignore_eos=True)
        engines[number % 2].submit(tokens(3 + number, number), params)
    damage(engines[0], 6, monkeypatch)
    failures = 0
    while any(engine.has_work() for engine in engines):
        for engine in engines:
            try:
                engine.step()
            except MemoryError:
                failures += 1
            engine.check()
    assert failures == 1 and len(counted) > 20
    for engine in engines:
        assert_idle(engine)
