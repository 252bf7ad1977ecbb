"""Made-up traffic: lengths, arrivals, prefixes and turns are as asked, and the same seed gives the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest

from octavo.core.inspection.trace import Event, Trace
from octavo.scripts.arrivals import Bursty, Lengths, Mixture, Poisson, PrefixTree, Traffic


def drawn(what, count, seed=0):
    return what.draw(np.random.default_rng(seed), count)


def events(trace):
    columns = (trace.step, trace.event, trace.sequence, trace.a)
    return [
        (step, Event(event).name, number, a)
        for step, event, number, a in zip(*(column.tolist() for column in columns), strict=True)
    ]


def test_lengths_have_their_mean_and_bounds() -> None:
    lengths = drawn(Lengths(200, 0.8), 20_000)
    assert lengths.dtype == np.int64 and lengths.mean() == pytest.approx(200, rel=0.03)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.03)
    assert (drawn(Lengths(200, 2.0, most=300), 1000).max(), drawn(Lengths(2, 2.0), 1000).min()) == (300, 1)
    assert drawn(Lengths(7, 0.0), 3).tolist() == [7, 7, 7]


def test_a_mixture_takes_each_kind_equally_often() -> None:
    counts = Counter(drawn(Mixture((Lengths(7, 0.0), Lengths(9, 0.0))), 10_000).tolist())
    assert set(counts) == {7, 9} and counts[7] == pytest.approx(5000, rel=0.05)


def test_poisson_arrivals() -> None:
    gaps = np.diff(drawn(Poisson(4.0), 20_000))
    assert gaps.min() >= 0 and gaps.mean() == pytest.approx(0.25, rel=0.03) == gaps.std()


def test_bursty_arrivals_have_their_rate_and_more_variance_than_poisson() -> None:
    """20 s at 1 and 5 s at 11 a second, in turn: 3 a second on average."""
    times = drawn(Bursty(calm_per_s=1, burst_per_s=11, calm_s=20, burst_s=5), 30_000)
    gaps = np.diff(times)
    assert len(times) == 30_000 and gaps.min() >= 0
    assert len(times) / times[-1] == pytest.approx(3, rel=0.1)
    assert gaps.std() / gaps.mean() > 1.3
    same = np.diff(drawn(Bursty(calm_per_s=3, burst_per_s=3, calm_s=20, burst_s=5), 30_000))
    assert same.std() / same.mean() == pytest.approx(1, rel=0.05)  # two equal states are one Poisson process


def test_a_tree_of_prefixes() -> None:
    prompts = drawn(PrefixTree(depth=2, branches=3, tokens=5), 2000)
    distinct = Counter(map(tuple, prompts))
    assert len(distinct) == 9 and {len(prompt) for prompt in distinct} == {10}
    heads = {prompt[:5] for prompt in distinct}
    assert len(heads) == 3 and all(sum(prompt[:5] == head for prompt in distinct) == 3 for head in heads)
    counts = [count for _, count in distinct.most_common()]
    assert counts[0] / 2000 == pytest.approx(1 / sum(1 / k for k in range(1, 10)), rel=0.1)
    assert drawn(PrefixTree(), 2) == [[], []]


def test_one_request_step_by_step() -> None:
    """A prompt of 10 tokens at 0.3 s, in the first step that begins no earlier; 20 tokens, 8 a step of 0.2 s."""

    class At:
        def draw(self, random, count):
            return np.array([0.3])

    trace = Traffic(1, At(), Lengths(10, 0.0), Lengths(20, 0.0)).trace(seed=0)
    assert events(trace) == [
        (2, "OPEN", 0, 0), (2, "GROW", 0, 10), (3, "GROW", 0, 18), (4, "GROW", 0, 26), (5, "GROW", 0, 30),
        (5, "CLOSE", 0, 0),
    ]  # fmt: skip
    assert trace.time_s.tolist() == pytest.approx([0.4, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert trace.lengths().tolist() == [30]


def test_turns_repeat_what_was_said() -> None:
    traffic = Traffic(
        60, Poisson(1.0), Lengths(6), Lengths(5), PrefixTree(1, 2, 4), turns=3, think_s=2.0, urgent=0.5
    )  # fmt: skip
    trace = traffic.trace(seed=1)
    said = [tuple(tokens.tolist()) for tokens in trace.all_tokens()]
    assert trace.sequences == 60
    following = [later for later in range(60) if any(said[later][: len(s)] == s for s in said[:later])]
    assert 30 < len(following) < 55  # two of three turns are not the first
    assert len({tokens[:4] for tokens in said}) == 2
    assert 0 < trace.priority.sum() < 60 and set(trace.priority.tolist()) == {0, 1}
    assert np.count_nonzero(trace.event == Event.CLOSE) == 60


def test_the_seed_decides() -> None:
    traffic = Traffic(20, Bursty(1, 5, 5, 2), Lengths(20), Lengths(10), PrefixTree(2, 2, 3), turns=2)
    one, again, other = traffic.trace(3), traffic.trace(3), traffic.trace(4)
    assert all(np.array_equal(getattr(one, field.name), getattr(again, field.name)) for field in fields(Trace))
    assert not np.array_equal(one.tokens, other.tokens)
