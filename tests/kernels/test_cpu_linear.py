"""Packed Linear layers: the same products, and the model as it was."""

import pytest
import torch
from torch import nn

from octavo.kernels.cpu import linear
from octavo.kernels.cpu.linear import PackedLinears


def make(dtype=torch.bfloat16, bias=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40, bias=bias), nn.SiLU(), nn.Linear(40, 8, bias=bias)).to(dtype)


def outputs(model, packed, rows=5):
    x = torch.randn(1, rows, 24, generator=torch.Generator().manual_seed(1)).to(model[0].weight.dtype)
    with torch.inference_mode():
        plain = model(x)
        with packed.used():
            return plain, model(x)


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_the_same_bits_in_bf16(rows):
    model = make()
    plain, fast = outputs(model, PackedLinears(model), rows)
    assert torch.equal(plain, fast)


@pytest.mark.parametrize("bias", [False, True])
def test_close_in_fp32(bias):
    model = make(torch.float32, bias)
    plain, fast = outputs(model, PackedLinears(model))
    torch.testing.assert_close(plain, fast)


def test_compiled_layers_use_the_packed_weights():
    """One compiled code for layers of other weights, which are packed and are not in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24, bias=False)).to(torch.bfloat16)
    compiled = torch.compile(lambda layer, x: layer(x).abs(), backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.randn(1, 5, 24).to(torch.bfloat16)
    packed = PackedLinears(model)
    with torch.inference_mode():
        plain = [layer(x).abs() for layer in model]
        with packed.used():
            fast = [compiled(layer, x) for layer in model]
            kept = dict(linear._serving)
        assert all(torch.equal(a, b) for a, b in zip(plain, fast, strict=True))
        assert set(kept) == {layer.weight.data_ptr() for layer in model} and not linear._serving


def write(model):
    with torch.no_grad():
        model[0].weight.mul_(3)


def replace(model):
    model[0].weight = nn.Parameter(torch.randn(40, 24))


def replace_twice(model):
    replace(model)
    model[2].weight = nn.Parameter(torch.randn(8, 40))


def new_bias(model):
    model[0].bias = nn.Parameter(torch.ones(40))


def assign(model):
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [write, replace, replace_twice, new_bias, assign])
def test_changed_weights_are_seen(change):
    model = make(torch.float32, bias=True)
    packed = PackedLinears(model)
    outputs(model, packed)
    change(model)
    torch.testing.assert_close(*outputs(model, packed))
    change(model)
    torch.testing.assert_close(*outputs(model, packed))


def test_other_types_are_left_alone():
    model = make(torch.float32)
    packed = PackedLinears(model)
    model.double()
    assert torch.equal(*outputs(model, packed))


def test_the_model_is_left_as_it_was():
    model = make()
    packed = PackedLinears(model)

    def own(x):
        return nn.functional.linear(x, model[0].weight)

    model[0].forward = own
    outputs(model, packed)
    assert model[0].forward is own and "forward" not in model[2].__dict__
    with pytest.raises(RuntimeError, match="boom"), packed.used():
        raise RuntimeError("boom")
    assert "forward" not in model[2].__dict__
