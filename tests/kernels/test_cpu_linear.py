"""Packed Linear layers: the same products, and the model as it was."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from octavo.kernels.cpu import blocks, linear
from octavo.kernels.cpu.linear import PackedLinears

needs_blocks = pytest.mark.skipif(not blocks._registered(), reason="no C compiler, or a processor without AVX512-BF16")


@pytest.fixture
def onednn(monkeypatch):
    """As on a processor that multiplies no bf16."""
    monkeypatch.setattr(blocks, "serves", lambda weight: False)


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
def test_the_same_bits_in_bf16(onednn, rows):
    model = make()
    plain, fast = outputs(model, PackedLinears(model), rows)
    assert torch.equal(plain, fast)


@pytest.mark.parametrize("bias", [False, True])
def test_close_in_fp32(bias):
    model = make(torch.float32, bias)
    plain, fast = outputs(model, PackedLinears(model))
    torch.testing.assert_close(plain, fast)


def test_compiled_layers_use_the_packed_weights(onednn):
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
        assert set(kept) == {linear._place(layer.weight) for layer in model} and not linear._serving


@needs_blocks
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs, inputs", [(32, 2), (40, 24), (31, 130), (96, 64), (1, 6)])
@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 25, 64, 241, 500])
def test_blocks_are_the_product_rounded_once(rows, outputs, inputs, bias):
    torch.manual_seed(0)
    weight, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(2, rows, inputs).bfloat16()
    added = torch.randn(outputs).bfloat16() if bias else None
    got = blocks.multiply(x, blocks.pack(weight, added), outputs)
    want = nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
    assert got.shape == want.shape and got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-4)


OPS = {
    "alone": lambda x, weights, added: [torch.ops.octavo.linear_blocks(x, weights[0], 70)],
    "added": lambda x, weights, added: [torch.ops.octavo.linear_blocks_added(x, weights[0], 70, added)],
    "gated": lambda x, weights, added: [torch.ops.octavo.linear_blocks_gated(x, weights[0], weights[1], 70)],
    "three": lambda x, weights, added: torch.ops.octavo.linear_blocks_3(
        x, *(part for weight, outputs in zip(weights, (70, 70, 33), strict=True) for part in (weight, outputs))
    ),
}
"""By name, of a weight ``[70, 64]``, another one and ``[33, 64]``."""


def given(rows):
    torch.manual_seed(0)
    weights = [torch.randn(outputs, 64).bfloat16() / 8 for outputs in (70, 70, 33)]
    return torch.randn(1, rows, 64).bfloat16(), weights, torch.randn(1, rows, 70).bfloat16()


@needs_blocks
@pytest.mark.parametrize("rows", [1, 12, 13, 64, 241, 500])
@pytest.mark.parametrize("op", OPS)
def test_what_is_done_to_products(op, rows):
    x, weights, added = given(rows)
    got = OPS[op](x, [blocks.pack(weight, None) for weight in weights], added)
    first, second, third = (x.double() @ weight.double().T for weight in weights)
    want = {
        "alone": [first], "added": [first + added.double()], "gated": [nn.functional.silu(first) * second],
        "three": [first, second, third],
    }[op]  # fmt: skip
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and one.dtype == torch.bfloat16
        roundings = 3 if op == "gated" else 1
        torch.testing.assert_close(one.double(), other, rtol=roundings * 2**-8, atol=1e-4 * roundings)


@needs_blocks
@pytest.mark.parametrize("op", OPS)
def test_a_row_does_not_depend_on_the_others(op):
    x, weights, added = given(300)
    packed = [blocks.pack(weight, None) for weight in weights]
    alone = [OPS[op](x[:, r : r + 1], packed, added[:, r : r + 1]) for r in range(300)]
    x[:, ::2] = torch.nan
    together = OPS[op](x, packed, added)
    for number, result in enumerate(together):
        assert torch.equal(result[:, 1::2], torch.cat([one[number] for one in alone[1::2]], 1))
        assert result[:, ::2].isnan().all()


@needs_blocks
@pytest.mark.parametrize("gate", [-300.0, -30.0, 0.0, 30.0, 300.0, float("nan")])
def test_gates_at_their_ends(gate):
    """x / (1 + e^-x) where the power is nothing, or all there is."""
    one = torch.ones(1, 2).bfloat16()
    weight, up = torch.tensor([[gate, 0.0]]).bfloat16(), torch.tensor([[2.0, 0.0]]).bfloat16()
    got = torch.ops.octavo.linear_blocks_gated(one, blocks.pack(weight, None), blocks.pack(up, None), 1)
    want = 2 * nn.functional.silu(weight.float()[:, :1])
    torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=1e-9, equal_nan=True)


@needs_blocks
def test_what_is_added_must_fit():
    packed = blocks.pack(torch.randn(32, 64).bfloat16(), None)
    for added in (torch.randn(3, 31), torch.randn(2, 32), torch.randn(32, 3).T):
        with pytest.raises(RuntimeError, match="what is added"):
            torch.ops.octavo.linear_blocks_added(torch.randn(3, 64).bfloat16(), packed, 32, added.bfloat16())


@needs_blocks
def test_blocks_refuse_what_they_would_misread():
    packed = blocks.pack(torch.randn(32, 64).bfloat16(), None)
    for x in (torch.randn(3, 62).bfloat16(), torch.randn(64, 3).bfloat16().T):
        with pytest.raises(RuntimeError, match="contiguous"):
            blocks.multiply(x, packed, 32)
    x, ops, larger = torch.randn(3, 64).bfloat16(), torch.ops.octavo, blocks.pack(torch.randn(64, 64).bfloat16(), None)
    for call in (
        lambda: blocks.multiply(x, packed, 33),
        lambda: ops.linear_blocks_gated(x, larger, packed, 64),
        lambda: ops.linear_blocks_3(x, packed, 32, packed, 32, larger, 32),
    ):
        with pytest.raises(RuntimeError, match="as many blocks as its outputs"):
            call()


@needs_blocks
def test_compiled_layers_use_blocks():
    """One compiled code for layers of other weights, and none of it is left on them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24)).to(torch.bfloat16)
    codes = []

    def backend(graph, _):
        codes.append(graph)
        return graph

    compiled = torch.compile(lambda layer, x: layer(x).abs(), backend=backend, fullgraph=True, dynamic=True)
    x, packed = torch.randn(1, 5, 24).bfloat16(), PackedLinears(model)
    with torch.inference_mode(), packed.used():
        eager = [layer(x).abs() for layer in model]
        assert all(torch.equal(compiled(layer, x), want) for layer, want in zip(model, eager, strict=True))
    assert len(codes) == 1 and not any(linear.BLOCKS in layer.__dict__ for layer in model)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [write, replace, replace_twice, new_bias, assign])
def test_changed_weights_are_seen(change, dtype):
    model = make(dtype, bias=True)
    packed = PackedLinears(model)
    outputs(model, packed)
    known = packed.packings
    for _ in range(2):
        change(model)
        model.to(dtype)
        torch.testing.assert_close(*outputs(model, packed))
    assert known == 1 and packed.packings > known


def test_other_types_are_left_alone():
    model = make(torch.float32)
    packed = PackedLinears(model)
    model.double()
    assert torch.equal(*outputs(model, packed))


@pytest.mark.parametrize("tied", [lambda weight: weight[:8], lambda weight: weight.t()], ids=["part", "across"])
def test_weights_at_one_address_are_told_apart(tied):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False))
    model[1].weight = nn.Parameter(tied(model[0].weight.detach()))
    packed = PackedLinears(model)
    torch.testing.assert_close(*outputs(model, packed))
    torch.testing.assert_close(*outputs(model[:1], packed))


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("before", [True, False])
def test_what_a_hook_makes_before_each_call_is_left_alone(name, before):
    model = make(torch.float32, bias=True)
    packed = PackedLinears(model)
    if before:
        outputs(model, packed)
    prune.random_unstructured(model[0], name, amount=0.5)
    for _ in range(2):
        torch.testing.assert_close(*outputs(model, packed))


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


def test_some_are_put_up_only_where_they_are_called():
    model = make(bias=True)
    packed, (first, _, last) = PackedLinears(model), model
    with packed.used([first]):
        assert "forward" in first.__dict__ and "forward" not in last.__dict__
        with packed.lent([last]):
            assert "forward" in last.__dict__
        assert "forward" in first.__dict__ and "forward" not in last.__dict__
    assert "forward" not in first.__dict__


def test_a_forward_of_ones_own_is_seen():
    model = make()
    packed = PackedLinears(model)
    outputs(model, packed)
    known = packed.packings
    model[0].forward = lambda x: x @ model[0].weight.T + 1
    assert torch.equal(*outputs(model, packed)) and packed.packings == known + 1
