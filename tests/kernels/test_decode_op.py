"""The op of compiled layers: C serves a told step as the calls from Python do, and leaves the rest to them."""

from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from kernel_cases import Case, build
from test_decode_calls import last_slots, projections

from octavo.core.execution.compiled import _serving
from octavo.kernels.cpu import decode_op
from octavo.kernels.cpu.decode_calls import DecodeCalls

pytestmark = pytest.mark.skipif(decode_op.served() is None, reason="there is no C compiler")

PLACES = np.array([[1, 0], [0, 0]])  # the first layer of the model is the second of a unit
CASES = {
    "plain": Case("plain", (20, 37, 300)),
    "window": Case("window", (20, 37), window=16),
    "soft cap": Case("soft cap", (20,), softcap=5.0),
}


class Step:
    """A plain step, told to C, that notes what comes to Python."""

    def __init__(self, inputs):
        self.calls = DecodeCalls(
            inputs.pool, inputs.table[:, :, 0], last_slots(inputs), inputs.lengths[0, :, 0], inputs.q_pos
        )
        self.told, self.windows = self.calls.told(PLACES, inputs.q.shape[1])
        self.asked = []

    @contextmanager
    def in_c(self):
        decode_op.begin(self.told)
        yield

    def attend(self, layer, q, k, v, traits):
        self.asked.append(layer)
        return self.calls.attend(
            int(PLACES[0, layer]), 0, q, k, v, traits.sinks, traits.scale, traits.window, traits.softcap
        )


def outputs(step, given, case, sinks=(None, None)):
    with _serving(step, on_cpu=True):
        return [
            torch.ops.octavo.attend_in_step(*given, sink, case.head_dim**-0.5, case.window, case.softcap)
            for sink in sinks
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_c_computes_what_python_calls_for(case, dtype):
    inputs = build(case, dtype)
    given, step = projections(inputs, dtype), Step(inputs)
    got = outputs(step, given, case)
    assert not step.asked and step.windows.tolist() == [case.window] * 2
    pool = inputs.pool.clone()
    step.in_c = nullcontext
    want = outputs(step, given, case)
    assert step.asked == [0, 1] and all(map(torch.equal, got, want))
    assert torch.equal(pool.nan_to_num(), inputs.pool.nan_to_num())


def test_what_is_not_plain_is_left_to_python():
    inputs = build(CASES["plain"], torch.float32)
    given, step = projections(inputs, torch.float32), Step(inputs)
    sinks = torch.zeros(inputs.q.shape[1])
    outputs(step, given, CASES["plain"], (sinks, None))
    assert step.asked == [0] and step.windows.tolist() == [-1, 0]
    outputs(step, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given], CASES["plain"])
    assert step.asked == [0, 0, 1]  # the last axis does not lie side by side
    outputs(step, given, CASES["plain"], (None,) * 2)
    assert step.asked == [0, 0, 1]


def test_what_lies_outside_is_refused():
    inputs = build(CASES["plain"], torch.float32)
    step = Step(inputs)
    step.calls._lengths.add_(1000)
    with pytest.raises(RuntimeError, match="attention of a layer"):
        outputs(step, projections(inputs, torch.float32), CASES["plain"])
    assert step.asked == [0]
