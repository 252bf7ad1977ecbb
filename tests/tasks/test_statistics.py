import numpy as np
import pytest

from octavo.scripts.tasks import statistics
from octavo.scripts.tasks.statistics import Estimate, McNemar, bootstrap_mean, mcnemar_exact, paired_bootstrap


def test_constant_scores_have_no_width():
    assert bootstrap_mean([40.0] * 5) == Estimate(mean=40, low=40, high=40, n=5, level=0.95)
    assert bootstrap_mean([7.0]) == Estimate(mean=7, low=7, high=7, n=1, level=0.95)


def test_the_seed_decides():
    scores = [0.0, 10.0, 30.0, 90.0]
    assert bootstrap_mean(scores, seed=3, resamples=99) == bootstrap_mean(scores, seed=3, resamples=99)
    assert bootstrap_mean(scores, seed=3, resamples=99) != bootstrap_mean(scores, seed=4, resamples=99)


def test_two_items_give_the_binomial_quantiles():
    # Means of resamples of {0, 100}: 0, 50, 100 with 1/4, 1/2, 1/4.
    assert bootstrap_mean([0.0, 100.0], level=0.4) == Estimate(mean=50, low=50, high=50, n=2, level=0.4)
    assert bootstrap_mean([0.0, 100.0], level=0.6) == Estimate(mean=50, low=0, high=100, n=2, level=0.6)


def test_large_lists_are_drawn_in_pieces(monkeypatch):
    drawn = []
    monkeypatch.setattr(statistics, "_CHUNK", 8)
    monkeypatch.setattr(np.random, "default_rng", lambda seed: Spy(drawn))
    bootstrap_mean([1.0, 2.0, 3.0], resamples=5)
    assert drawn == [(2, 3), (2, 3), (1, 3)]


class Spy:
    def __init__(self, drawn):
        self.drawn = drawn

    def integers(self, high, size):
        self.drawn.append(size)
        return np.zeros(size, dtype=np.int64)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        estimate = bootstrap_mean(rng.normal(50, 20, size=30), resamples=400, seed=trial)
        covered += estimate.low <= 50 <= estimate.high
    assert 0.90 <= covered / 300 <= 0.98


def test_pairing_cancels_the_spread_between_items():
    baseline = np.array([0.0, 20.0, 50.0, 80.0, 100.0])
    paired = paired_bootstrap(baseline - 2, baseline)
    assert (paired.mean, paired.low, paired.high) == (-2, -2, -2)
    assert bootstrap_mean(baseline).high - bootstrap_mean(baseline).low > 50


@pytest.mark.parametrize(
    ("method", "baseline", "result"),
    [
        ([1, 0, 1], [1, 0, 1], McNemar(0, 0, 1.0)),
        ([100, 0], [0, 100], McNemar(1, 1, 1.0)),  # 2 * (1 + 2) / 4, capped
        ([0] * 5, [100] * 5, McNemar(0, 5, 2 / 32)),
        ([100] + [0] * 5, [0] + [100] * 5, McNemar(1, 5, 2 * (1 + 6) / 64)),
    ],
)
def test_mcnemar_is_twice_the_smaller_tail(method, baseline, result):
    assert mcnemar_exact(method, baseline) == result


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda: bootstrap_mean([]), r"scores: a flat, non-empty list is needed, not shape \(0,\)"),
        (lambda: bootstrap_mean([[1.0]]), r"not shape \(1, 1\)"),
        (lambda: bootstrap_mean([1.0, float("nan")]), "scores: item 1 is nan"),
        (lambda: bootstrap_mean([1.0], level=95), r"level=95 is outside \(0, 1\)"),
        (lambda: bootstrap_mean([1.0], resamples=0), "resamples=0: at least 1"),
        (lambda: paired_bootstrap([1.0], [1.0, 2.0]), "method has 1 items and baseline 2"),
        (lambda: mcnemar_exact([1.0, 0.0], [1.0]), "method has 2 items and baseline 1"),
        (lambda: mcnemar_exact([1.0], [float("inf")]), "baseline: item 0 is inf"),
    ],
)
def test_bad_scores_are_refused(call, fault):
    with pytest.raises(ValueError, match=fault):
        call()
