"""Restore or recompute: the closed forms by hand, and where they cross."""

from dataclasses import replace

import pytest
import torch

from octavo.core.interfaces import ModelSpec
from octavo.core.memory.transfer_costs import TransferCosts, measure_bytes_per_s
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
