"""Append and copy: they write what they should, bit by bit, and nothing else."""

import pytest
import torch

from octavo.kernels import ops
from octavo.kernels.layout import pool_shape
from octavo.kernels.reference import backend as reference

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
TARGETS = [
    ("reference", "cpu"),
    ("cpu", "cpu"),
    pytest.param(("triton", "cpu"), marks=interpreted),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
]
LAYERS = 3


def bits(x):
    return x.cpu().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def random_pool(dtype, device, kv_heads=2, unit=8, head_dim=64):
    pool = torch.randn(pool_shape(7, LAYERS, kv_heads, unit, head_dim), dtype=torch.float32)
    pool[2] = torch.nan  # a NaN must move like any other value
    return pool.to(device, dtype)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "unit", "head_dim"),
    [(0, 8, 64), (1, 8, 64), (17, 8, 64), (40, 16, 80), (5, 1, 96), (9, 64, 256), (6, 4, 16)],
)
def test_append(target, dtype, tokens, unit, head_dim):
    backend, device = target
    pool = random_pool(dtype, device, unit=unit, head_dim=head_dim)
    slots = torch.randperm(7 * unit)[:tokens] + unit  # any unit but scratch
    qkv = torch.randn(tokens, 6, head_dim).to(device, dtype)
    k, v = qkv[:, 2:4], qkv[:, 4:]  # slices of a fused projection
    want = bits(pool).clone()
    for t, slot in enumerate(slots.tolist()):
        want[slot // unit, 1, 0, :, slot % unit] = bits(k[t])
        want[slot // unit, 1, 1, :, slot % unit] = bits(v[t])
    ops.append(k, v, pool, 1, slots.to(device), backend)
    assert torch.equal(bits(pool), want)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_padding_rows_may_share_the_scratch_unit(target):
    backend, device = target
    pool = random_pool(torch.float32, device)
    want = bits(pool).clone()
    k = torch.ones(5, 2, 64, device=device)
    ops.append(k, k, pool, 0, torch.zeros(5, dtype=torch.int64, device=device), backend)
    assert torch.equal(bits(pool)[1:], want[1:])


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pairs", [[], [(1, 4)], [(2, 5), (1, 3), (1, 7), (0, 0)]], ids=len)
def test_copy_units(target, dtype, pairs):
    backend, device = target
    pool = random_pool(dtype, device, head_dim=80)
    want = bits(pool).clone()
    for source, destination in pairs:
        want[destination] = want[source]
    ops.copy_units(pool, torch.tensor(pairs, dtype=torch.int32, device=device).view(-1, 2), backend)
    assert torch.equal(bits(pool), want)


def test_reference_append_agrees_with_its_layout():
    """Slot = unit * u + offset, one run a (unit, layer, K or V, head)."""
    pool = torch.zeros(pool_shape(2, 1, 2, 4, 2))
    k = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    reference.append(k, -k, pool, 0, torch.tensor([2 * 4 + 3]))
    assert pool[2, 0, 0, :, 3].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert pool[2, 0, 1, :, 3].tolist() == [[-1.0, -2.0], [-3.0, -4.0]]
    assert pool.count_nonzero() == 8
