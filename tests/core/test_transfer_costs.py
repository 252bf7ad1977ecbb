"""Restore or recompute: the closed forms by hand, and where they cross."""

from dataclasses import replace

import pytest
import torch

from octavo.core.interfaces import ModelSpec
from octavo.core.memory import transfer_costs
from octavo.core.memory.transfer_costs import (
    NOMINAL_FLOPS_PER_S,
    TIMED_TOKENS,
    PageCosts,
    TransferCosts,
    measure_bytes_per_s,
)
from octavo.kernels.layout import pool_shape

SPEC = ModelSpec("tiny", 3, 4, 2, 8, torch.float32, 128, 1 << 20, (0, 0, 0))
COSTS = TransferCosts(bytes_per_s=1e6, seconds_per_copy=0.25, flops_per_s=1e9)


def test_restore():
    assert COSTS.restore_seconds(500_000) == 0.75
    assert COSTS.restore_seconds(0) == 0.25


@pytest.mark.parametrize(("tokens", "position"), [(1, 0), (16, 0), (16, 100), (48, 4096)])
def test_recompute(tokens, position):
    """Every parameter twice a token; every (query, key) pair 4 * head_dim a head and layer."""
    flops = 2 * 1000 * tokens + 4 * 3 * 4 * 8 * tokens * (position + tokens / 2)
    assert COSTS.recompute_seconds(tokens, position, 1000, SPEC) == flops / 1e9


def test_the_closed_form_counts_the_pairs_of_causal_attention():
    """Query i of a page at position p sees p + i + 1 keys: half a key a query more than the formula says."""
    tokens, position = 16, 48
    pairs = sum(position + i + 1 for i in range(tokens))
    flops = COSTS.recompute_seconds(tokens, position, 0, SPEC) * 1e9
    assert flops == pytest.approx(4 * 3 * 4 * 8 * (pairs - tokens / 2))


def test_a_window_bounds_the_keys_of_its_layers():
    spec = replace(SPEC, windows=(0, 64, 0))
    assert COSTS.recompute_seconds(16, 32, 1000, spec) == COSTS.recompute_seconds(16, 32, 1000, SPEC)
    full, windowed = 16 * (1000 + 8), 16 * 64
    flops = 2 * 1000 * 16 + 4 * 4 * 8 * (2 * full + windowed)
    assert COSTS.recompute_seconds(16, 1000, 1000, spec) == flops / 1e9


def test_late_pages_are_worth_bringing_back_and_early_ones_are_not():
    nbytes, parameters = 50_000, 9_000_000  # 0.3 s to restore; 16 tokens at 0 take 0.288 s
    choices = [COSTS.restore_is_cheaper(nbytes, 16, position, parameters, SPEC) for position in range(0, 16000, 100)]
    assert choices == sorted(choices) and choices[0] is False and choices[-1] is True
    crossing = (0.3e9 - 2 * parameters * 16) / (4 * 3 * 4 * 8 * 16) - 8
    assert choices.index(True) == -(-crossing // 100)


def test_restoring_wins_a_tie():
    costs = TransferCosts(bytes_per_s=1.0, seconds_per_copy=0.0, flops_per_s=1.0)
    assert costs.restore_is_cheaper(32_000, 16, 0, 1000, replace(SPEC, windows=()))


@pytest.mark.parametrize(
    ("field", "value"),
    [("bytes_per_s", 0.0), ("bytes_per_s", -1.0), ("flops_per_s", 0.0), ("seconds_per_copy", -0.1)],
)
def test_impossible_rates_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value} must be"):
        replace(COSTS, **{field: value})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nbytes", [1, 1 << 20])
def test_measured_rate_is_plausible_and_touches_nothing(dtype, nbytes):
    kv = torch.full(pool_shape(3, 2, 2, 8, 16), torch.nan, dtype=dtype)
    assert 1e6 < measure_bytes_per_s(kv, "cpu", nbytes) < 1e13
    assert kv.isnan().all()


class TestPageCosts:
    """What an engine asks: the same closed forms, for its model and the rates of its machine."""

    def costs(self, **rates):
        return PageCosts(replace(COSTS, **rates), 1000, SPEC)

    def test_closed_forms(self):
        costs = self.costs()
        for tokens, position in ((1, 0), (16, 48)):
            assert costs.recompute_seconds(tokens, position) == COSTS.recompute_seconds(tokens, position, 1000, SPEC)
        choices = [costs.restore_is_cheaper(0, 16, position) for position in range(0, 100_000, 1000)]
        assert choices == [
            COSTS.restore_is_cheaper(0, 16, position, 1000, SPEC) for position in range(0, 100_000, 1000)
        ]
        assert choices[0] is False and choices[-1] is True

    def test_a_model_counts_what_multiplies_a_token(self, t_model, monkeypatch):
        """All but the embedding that is looked up: here 64 x 128, beside an output layer of its own."""
        monkeypatch.setattr(transfer_costs, "measure_bytes_per_s", lambda *_: 123.0)
        kv = torch.zeros(pool_shape(3, 2, 2, 8, 16))
        parameters = sum(p.numel() for p in t_model.parameters()) - 128 * 64
        for host, bytes_per_s in ((True, 123.0), (False, 1e10)):
            costs = PageCosts.of(t_model, SPEC, kv, "cpu", host)
            assert costs.rates == TransferCosts(bytes_per_s, 0.0, NOMINAL_FLOPS_PER_S["cpu"])
            wanted = costs.rates.recompute_seconds(16, 32, parameters, SPEC)
            assert costs.recompute_seconds(16, 32) == wanted

    def test_the_fastest_long_step_says_what_the_device_reaches(self):
        costs = self.costs()
        work = sum(COSTS.recompute_seconds(*chunk, 1000, SPEC) for chunk in ((TIMED_TOKENS - 1, 0), (1, 500))) * 1e9
        reached = []
        for chunks, seconds in (
            ([(TIMED_TOKENS - 1, 0)], 1e-9),  # too short to say anything
            ([(TIMED_TOKENS - 1, 0), (1, 500)], 2.0),  # the first counts, though it is below what was taken for granted
            ([(TIMED_TOKENS - 1, 0), (1, 500)], 4.0),
            (iter([(TIMED_TOKENS - 1, 0), (1, 500)]), 1.0),
        ):
            costs.observe(chunks, seconds)
            reached.append(costs.rates.flops_per_s)
        assert reached == [1e9, *map(pytest.approx, (work / 2, work / 2, work))]
        assert (costs.rates.bytes_per_s, costs.rates.seconds_per_copy) == (COSTS.bytes_per_s, COSTS.seconds_per_copy)

    def test_a_faster_device_recomputes_what_a_slower_one_brings_back(self):
        assert self.costs().restore_is_cheaper(0, 16, 500_000)
        assert not self.costs(flops_per_s=1e12).restore_is_cheaper(0, 16, 500_000)

    def test_an_engine_times_its_prefill(self, t_model, engine_for):
        engine = engine_for(t_model)
        engine.generate([[5] * (TIMED_TOKENS - 1)])
        assert engine.costs.rates.flops_per_s == NOMINAL_FLOPS_PER_S["cpu"]
        engine.generate([[6] * TIMED_TOKENS])
        assert 1e5 < engine.costs.rates.flops_per_s < 1e15
        assert engine.costs.rates.flops_per_s != NOMINAL_FLOPS_PER_S["cpu"]
