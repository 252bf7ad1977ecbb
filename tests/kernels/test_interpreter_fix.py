"""The interpreter's repairs: each still works, and each is still needed."""

import interpreter_fix
import numpy as np
import pytest
import torch
import triton.language as tl
from interpreter_fix import probe_call, probe_cast, probe_dot, probe_loop
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")

VALUES = torch.tensor([1.0, 1.00390625, 1.01171875, -3.14159, 1e-3, 255.9, 0.0, torch.inf])


def loop():
    out = torch.zeros(1, dtype=torch.int32)
    probe_loop[(1,)](out, 5)
    return out.tolist() == [10]


def cast():
    out = torch.zeros(8, dtype=torch.bfloat16)
    probe_cast[(1,)](VALUES, out, 8)
    return torch.equal(out, VALUES.bfloat16())


def dot():
    a, b = torch.randn(2, 16, 16).bfloat16()
    out = torch.zeros(16, 16)
    probe_dot[(1,)](a, b, out, 16)
    return torch.allclose(out, a.float() @ b.float(), atol=1e-4)


def call():
    """A launch that calls two device functions changes the language once; what it computes is right in any case."""
    changes, patch = [], interpreter._patch_builtin
    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_patch_builtin", lambda *args: changes.append(args[0]) or patch(*args))
        out = torch.zeros(8)
        probe_call[(1,)](VALUES, out, 8)
    assert torch.equal(out, 4 * VALUES)
    return len(changes) == len(set(changes))


@pytest.fixture
def as_shipped():
    interpreter_fix.uninstall()
    yield
    interpreter_fix.install()


@pytest.mark.parametrize("probe", [loop, cast, dot, call])
def test_repaired(probe):
    assert probe()


@pytest.mark.parametrize("probe", [cast, dot, call])
def test_still_needed(probe, as_shipped):
    assert not probe(), f"Triton's interpreter now gets {probe.__name__} right: drop that repair"


@pytest.mark.skipif(interpreter_fix.INDEX_BROKEN, reason="an older Triton, which is repaired")
def test_loop_bounds_need_no_repair(as_shipped):
    assert loop(), "loop bounds broke again: widen INDEX_BROKEN"


def test_rounding_matches_torch_bit_for_bit():
    x = torch.randn(100_000) * torch.logspace(-38, 38, 100_000)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.4e38, 1e-45])
    x = torch.cat([x, special])
    got = torch.from_numpy(interpreter_fix.narrow(x.numpy()).view(np.int16).copy()).view(torch.bfloat16)
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got.nan_to_num(7.0).view(torch.int16), x.bfloat16().nan_to_num(7.0).view(torch.int16))


@pytest.mark.parametrize("dtype", [tl.int1, tl.int64, tl.float16, tl.bfloat16, tl.pointer_type(tl.float32)], ids=str)
def test_dtypes_are_those_of_the_interpreter(dtype, as_shipped):
    for one in (dtype, tl.block_type(dtype, [4, 2])):
        assert interpreter_fix._np_dtype_once(one) == interpreter._get_np_dtype(one)
