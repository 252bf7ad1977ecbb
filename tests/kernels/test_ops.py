"""The registration with torch: schemas, shapes without data, one compilation for all batch sizes."""

import json

import pytest
import torch
from kernel_cases import Case, build
from torch._dynamo.testing import CompileCounterWithBackend

from octavo.kernels import ops
from octavo.kernels.layout import TRITON_DTYPES, TRITON_HEAD_DIM, pool_shape
from octavo.kernels.triton import settings

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
BACKENDS = ["reference", "cpu", pytest.param("triton", marks=interpreted)]


def clean(case):
    """A case's inputs with numbers for NaN: opcheck compares the whole pool."""
    inputs = build(case, torch.float32)
    inputs.pool.nan_to_num_(0.5)
    return inputs.args()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["append", "copy_units", "decode", "decode-mass", "prefill"])
def test_opcheck(op, backend):
    pool = torch.randn(pool_shape(4, 2, 2, 8, 16))
    k, v = torch.randn(2, 3, 2, 16)
    args = {
        "append": lambda: (k, v, pool, 1, torch.tensor([9, 20, 31])),
        "copy_units": lambda: (pool, torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)),
        "decode": lambda: clean(Case("opcheck", (3, 20), head_dim=16)),
        "decode-mass": lambda: clean(Case("opcheck", (3, 20), head_dim=16, sinks=True, stored=True, mass=True)),
        "prefill": lambda: clean(Case("opcheck", (3, 20), (3, 5), head_dim=16, sinks=True, stored=True)),
    }[op]()
    torch.library.opcheck(getattr(torch.ops.octavo, op.split("-")[0]).default, (*args, backend))


@pytest.mark.parametrize("kernel", ["decode", "shared", "prefill", "prefill_short", "page_score"])
def test_what_triton_serves_has_launch_settings_and_nothing_else_has(kernel):
    keys = {key.removesuffix(" many") for key in json.loads((settings.FOLDER / "default.json").read_text())[kernel]}
    padded = [16 << i for i in range((TRITON_HEAD_DIM // 16).bit_length())]
    assert keys == {f"{dim}x{dtype.itemsize}" for dim in padded for dtype in TRITON_DTYPES}


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_compilation_serves_every_batch(backend):
    """A step of append and decode in one graph without a break; no batch has the size of another axis, which torch
    would take for the same number."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k, v, pool, slots, table, lengths, q_pos):
        ops.append(k * 1.0, v * 1.0, pool, 1, slots, backend)
        out, lse, _ = ops.decode(q, pool, 1, table, lengths, q_pos, None, None, 0.25, 0, 0.0, False, True, backend)
        return out + 1.0, lse

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for batch in (5, 6, 7, 11):
        pool = torch.randn(pool_shape(24, 2, 2, 8, 16))
        q, k, v = torch.randn(batch, 4, 16), torch.randn(batch, 2, 16), torch.randn(batch, 2, 16)
        table = ((torch.arange(batch * 2, dtype=torch.int32) + 1) << 9 | 8).view(1, batch, 1, 2)
        lengths = torch.full((1, batch, 1), 9, dtype=torch.int32)
        slots = (torch.arange(batch) * 2 + 2) * 8
        q_pos = torch.full((batch,), 8, dtype=torch.int32)
        eager_pool = pool.clone()
        got = compiled(q, k, v, pool, slots, table, lengths, q_pos)
        want = step(q, k, v, eager_pool, slots, table, lengths, q_pos)
        assert torch.equal(pool, eager_pool)
        torch.testing.assert_close(got, want)
    assert counter.frame_count == 1
