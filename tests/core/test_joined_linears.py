"""Linear layers that multiply together, and by a backend's own op: the same numbers, and the model as it was."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from octavo.core import hf_model
from octavo.core.execution.joined_linears import JoinedLinears
from octavo.kernels import ops


class Block(nn.Module):
    """Two layers of one input, one of another, and what is no plain layer."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(24, 40), nn.Linear(24, 16)
        self.down = nn.Linear(56, 24, bias=False)
        self.other = nn.modules.linear.NonDynamicallyQuantizableLinear(24, 24)

    def forward(self, x):
        return self.other(self.down(torch.cat([self.gate(x), self.up(x)], -1)))


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block().eval()


@pytest.fixture
def called(monkeypatch):
    """Shapes of the weights that ``ops.linear`` is called with."""
    shapes = []
    linear = ops.linear

    def noted(x, weight, bias, backend):
        shapes.append((*weight.shape, bias is not None, backend))
        return linear(x, weight, bias, backend)

    monkeypatch.setattr(ops, "linear", noted)
    return shapes


def joined(block, backend, join=True):
    x = torch.randn(1, 3, 24)
    return JoinedLinears(block, (lambda: block(x)) if join else (lambda: None), backend)


JOINED, ALONE = (56, 24, True, "reference"), (24, 56, False, "reference")


@pytest.mark.parametrize(
    ("backend", "join", "expected"),
    [
        (None, True, []),
        ("reference", True, [JOINED, ALONE]),
        ("reference", False, [(40, 24, True, "reference"), (16, 24, True, "reference"), ALONE]),
    ],
)
@torch.inference_mode()
def test_who_multiplies_what(block, called, backend, join, expected):
    x = torch.randn(1, 5, 24)
    want = block(x)
    linears = joined(block, backend, join)
    with linears.used():
        torch.testing.assert_close(block(x), want)
    assert called == expected and len(linears) == join
    torch.testing.assert_close(block(x), want)
    assert called == expected, "outside used() the model multiplies by itself"


def test_the_model_is_left_as_it_was(block):
    with pytest.raises(RuntimeError, match="boom"), joined(block, "reference").used():
        raise RuntimeError("boom")
    assert not any("forward" in module.__dict__ for module in block.modules())


def test_a_forward_of_somebody_else_is_kept(block):
    def own(x):
        return x[..., :24] * 0

    block.down.forward = own
    with joined(block, "reference").used():
        pass
    assert block.down.forward is own


@pytest.mark.parametrize("backend", [None, "reference"])
def test_one_compilation_serves_all_layers_and_batches(monkeypatch, t_model, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    model = hf_model.HFModel(copy.deepcopy(t_model))

    def logits(tokens):
        return model.forward(torch.arange(tokens), torch.arange(tokens), None, hf_model._Probe())

    want = {tokens: logits(tokens) for tokens in (5, 6, 70)}
    # On a CPU, prepare has torch multiply.
    monkeypatch.setattr(hf_model, "JoinedLinears", lambda model, run, _: JoinedLinears(model, run, backend))
    model.prepare("compiled", True, "reference")
    for tokens, expected in want.items():
        torch.testing.assert_close(logits(tokens), expected)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("join", [True, False])
def test_gpu_layers_multiply_by_the_triton_op(block, called, join):
    block = block.to("cuda", torch.bfloat16)
    x = torch.randn(1, 5, 24, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        want = block(x)
        linears = JoinedLinears(block, (lambda: block(x)) if join else (lambda: None), "triton")
        with linears.used():
            torch.testing.assert_close(block(x), want, rtol=2e-2, atol=2e-2)
    assert {backend for *_, backend in called} == {"triton"} and len(called) == (2 if join else 3)
