"""Tokens that wait in a log: a list is what it would be if they were appended at once, whoever asks and whenever."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from octavo.core import SamplingParams
from octavo.core.execution import token_list
from octavo.core.execution.token_list import NO_LOG, TokenList, TokenLog

from .mixed_requests import tokens
from .test_state_machine import Traffic, fixtures_of


@pytest.mark.parametrize("steps", [1, 3, 64])
@pytest.mark.parametrize("seed", range(10))
def test_logs_that_share_members_give_each_its_own(steps, seed, monkeypatch):
    monkeypatch.setattr(token_list, "STEPS", steps)
    draw = random.Random(seed)
    lists = [TokenList([7] * number, [8]) for number in range(6)]
    want = [[7] * number + [8] for number in range(6)]

    def batch():
        return TokenLog(), draw.sample(range(6), draw.randint(1, 6))

    batches = [batch() for _ in range(3)]
    for _ in range(150):
        log, members = draw.choice(batches)
        number, kind = draw.randrange(6), draw.randrange(10)
        if kind < 5:
            for _ in range(draw.choice([1, 1, 5, 70])):
                drawn = [draw.randrange(1 << 31) for _ in members]
                log.take([lists[member] for member in members], np.array(drawn))
                for member, token in zip(members, drawn, strict=True):
                    want[member].append(token)
        elif kind == 5:
            lists[number].append(3)
            want[number].append(3)
        elif kind == 6:
            lists[number].extend([4, 5])
            want[number] += [4, 5]
        elif kind == 7:
            twin = lists[number].fork()
            twin.append(6)
            assert list(twin) == [*want[number], 6]
        elif kind == 8:
            batches[draw.randrange(3)] = batch()
        else:
            start, stop = sorted(draw.choices(range(len(want[number]) + 1), k=2))
            if draw.random() < 0.5 and start < stop:
                assert lists[number].ids(start, stop).tolist() == np.array(want[number][start:stop], np.int32).tolist()
            assert lists[number][start:stop] == want[number][start:stop] and lists[number][-1] == want[number][-1]
        assert [len(each) for each in lists] == [len(each) for each in want]
    assert [list(each) for each in lists] == want and NO_LOG.count == 0


def test_a_step_of_who_stays_together_touches_few():
    """Each reads its column once in so many steps, and has the same tokens as ever."""
    lists, reads = [TokenList() for _ in range(128)], 0
    log = TokenLog()
    for step in range(1 + 10 * token_list.STEPS):
        before = [len(each._known) for each in lists]
        log.take(lists, np.full(128, step))
        reads += sum(len(each._known) > known for each, known in zip(lists, before, strict=True))
        assert step == 0 or reads <= 128 + 2 * step
    assert all(list(each) == list(range(1 + 10 * token_list.STEPS)) for each in lists)


@pytest.mark.parametrize(
    "name, fields",
    [
        ("t_model", {"pool_tokens": 60, "step_tokens": 9, "max_seqs": 4}),
        ("g_model", {"pool_tokens": 48, "step_tokens": 11, "max_seqs": 4}),
    ],
)
def test_traffic_with_a_log_that_is_soon_full(
    name, fields, request, engine_for, assert_idle, as_if_beside, monkeypatch
):
    monkeypatch.setattr(token_list, "STEPS", 2)
    monkeypatch.setattr(token_list, "LEAST", 1)
    machine = type("Traffic", (Traffic,), {})
    machine.fixtures = fixtures_of(
        engine_for(request.getfixturevalue(name), prefix_cache=False), totals={}, assert_idle=assert_idle,
        tight=lambda: engine_for(request.getfixturevalue(name), execution="graph", **fields),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=settings(max_examples=8, stateful_step_count=40))


def test_an_idle_session_keeps_no_log(t_model, engine_for, monkeypatch):
    monkeypatch.setattr(token_list, "LEAST", 1)
    engine = engine_for(t_model, execution="graph")
    session = engine.session(tokens(5))
    session.submit(SamplingParams(max_tokens=9, ignore_eos=True))
    (sequence,), logged = engine._scheduler.waiting, False
    while engine.has_work():
        logged |= sequence.tokens._log is not NO_LOG
        said = [out.completion.samples[0].token_ids for out in engine.step() if out.completion is not None]
    assert logged and session._parked.tokens._log is NO_LOG and session._parked.tokens[5:] == said[0]
