"""Layers that multiply one input do so as one product: the same values, the model as it was outside of it."""

import pytest
import torch
from torch import nn

from octavo.core.execution.joined_linears import JoinedLinears


class Block(nn.Module):
    """``first`` and ``second`` multiply the same tensor, ``third`` another, ``twice`` the same one two times."""

    def __init__(self, bias=False):
        super().__init__()
        self.first, self.second = nn.Linear(8, 6, bias=bias), nn.Linear(8, 4, bias=bias)
        self.third, self.twice = nn.Linear(10, 8, bias=bias), nn.Linear(8, 3, bias=bias)

    def forward(self, x):
        joined = torch.cat([self.first(x), self.second(x)], -1)
        return self.third(joined), self.twice(x) + self.twice(x)


@pytest.fixture(params=[False, True], ids=["plain", "bias"])
def block(request):
    torch.manual_seed(0)
    return Block(request.param).eval()


def joined_of(model, x):
    return JoinedLinears(model, lambda: model(x))


def test_siblings_of_one_input_are_joined_and_no_others(block):
    x = torch.randn(5, 8)
    before = {name: value.clone() for name, value in block.state_dict().items()}
    with torch.inference_mode():
        expected = block(x)
        linears = joined_of(block, x)
        calls = []
        hook = torch.nn.functional.linear

        def counted(x, weight, bias=None):
            calls.append(len(weight))
            return hook(x, weight, bias)

        with pytest.MonkeyPatch.context() as patch, linears.used():
            patch.setattr(torch.nn.functional, "linear", counted)
            got = block(x)
    assert len(linears) == 1 and calls == [10, 8, 3, 3]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert all(torch.equal(block.state_dict()[name], value) for name, value in before.items())


def test_weights_are_views_of_one_piece_of_memory(block):
    joined_of(block, torch.randn(2, 8))
    assert block.second.weight.data_ptr() == block.first.weight.data_ptr() + 6 * 8 * 4
    assert block.third.weight._base is None or block.third.weight._base is not block.first.weight._base


def test_the_model_is_its_own_outside(block):
    x = torch.randn(5, 8)
    linears = joined_of(block, x)
    with pytest.raises(RuntimeError, match="on purpose"), linears.used():
        assert "forward" in block.first.__dict__
        raise RuntimeError("on purpose")
    assert not any("forward" in layer.__dict__ for layer in block.modules())
    assert not block.first._forward_pre_hooks
    torch.testing.assert_close(
        block.first(x), x @ block.first.weight.T + (block.first.bias if block.first.bias is not None else 0)
    )


def test_another_input_is_multiplied_anew(block):
    x, y = torch.randn(5, 8), torch.randn(3, 8)
    linears = joined_of(block, x)
    with torch.inference_mode(), linears.used():
        block.first(x)
        second = block.second(y)  # the other input came in between
        first = block.first(y)
    torch.testing.assert_close(second, block.second(y))
    torch.testing.assert_close(first, block.first(y))


@pytest.mark.parametrize("spoil", ["subclass", "hook", "own_forward", "dtype", "bias"])
def test_what_is_no_plain_layer_is_left_alone(spoil):
    block, x = Block().eval(), torch.randn(2, 8)
    if spoil == "subclass":
        block.second = type("Special", (nn.Linear,), {})(8, 4, bias=False)
    elif spoil == "hook":
        block.second.register_forward_hook(lambda *_: None)
    elif spoil == "own_forward":
        block.second.forward = lambda x: x[..., :4]
    elif spoil == "dtype":
        block.second = nn.Linear(8, 4, bias=False, dtype=torch.float64)
        block.forward = lambda x: (block.first(x), block.second(x.double()))
    else:
        block.second = nn.Linear(8, 4, bias=True)
    assert len(joined_of(block, x)) == 0
