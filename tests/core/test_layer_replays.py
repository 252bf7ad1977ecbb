"""Compiled layers called again without guards: only where all is as it was, and never with weights of before."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from octavo.core.errors import UnsupportedModelError
from octavo.core.execution.compiled import CompiledLayers
from octavo.core.execution.layer_replays import MOST_TOKENS, LayerReplays, Parts
from octavo.kernels.cpu.linear import PackedLinears


class Layer:
    """A forward whose compiled code takes a weight, the tokens, x and a factor, in that order."""

    def __init__(self):
        self.calls, self.guarded, self.weight = [], 0, torch.ones(1)

    def code(self, weight, tokens, x, factor):
        assert x.shape[1] == tokens
        return (x * weight * factor,)

    def forward(self, x, factors=(), **_):
        self.guarded += 1
        inputs = self.weight, x.shape[1], x, factors[0]
        self.calls.append((self.code, inputs))
        return self.code(*inputs)[0]


@pytest.fixture
def layer():
    return Layer()


@pytest.fixture
def replays(layer):
    return LayerReplays(layer.forward, layer.calls)


def x(tokens=3, value=1.0):
    return torch.full((1, tokens, 2), value)


def test_a_pass_as_before_is_replayed_with_its_own_numbers(layer, replays):
    for value in (2.0, 3.0, 4.0):
        factor = torch.tensor([value])
        assert torch.equal(replays(x(value=value), factors=(factor, factor)), x(value=value * value))
    assert layer.guarded == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda f: ((x(4),), {"factors": (f,)}),
        lambda f: ((x(),), {"factors": (f.double(),)}),
        lambda f: ((x(),), {"factors": (f.expand(2),)}),
        lambda f: ((x(),), {"factors": (f,), "mask": None}),
        lambda f: ((x(),), {"factors": (f, f)}),
        lambda f: ((x(),), {"factors": (f,), "mask": f}),
    ],
    ids=["tokens", "dtype", "shape", "more", "longer", "mask"],
)
def test_another_kind_of_call_is_guarded(layer, replays, other):
    factor = torch.ones(1)
    replays(x(), factors=(factor,))
    args, named = other(factor)
    replays(*args, **named)
    assert layer.guarded == 2


def test_a_layer_is_lent_what_it_was_compiled_with_unless_it_is_replayed(layer):
    lent = Counter()

    @contextmanager
    def lend():
        lent["in"] += 1
        yield
        lent["out"] += 1

    replays = LayerReplays(layer.forward, layer.calls, lend)
    for _ in range(3):
        replays(x(), factors=(torch.ones(1),))
    assert lent == {"in": 1, "out": 1}


def test_one_tensor_given_twice_is_not_two(layer, replays):
    factor = torch.ones(1)
    replays(x(), factors=(factor, factor))
    replays(x(), factors=(factor, factor.clone()))
    assert layer.guarded == 2


def test_a_value_that_changes_is_guarded(layer, replays):
    factor = torch.ones(1)
    for cache in ("none", "some", "some"):
        replays(x(), factors=(factor,), cache=cache)
    assert layer.guarded == 3  # the first kind of so many tokens stays the one that is noted
    replays(x(), factors=(factor,), cache="none")
    assert layer.guarded == 3


def test_an_object_is_not_taken_for_one_that_is_gone(layer, replays):
    factor = torch.ones(1)
    for _ in range(20):  # each at the place of the last one, if nobody keeps that
        replays(x(), factors=(factor,), cache=[])
    assert layer.guarded == 20


def test_other_weights_are_seen(layer, replays):
    factor = torch.ones(1)
    replays(x(), factors=(factor,))
    layer.weight = torch.full((1,), 5.0)
    replays.forget()
    assert torch.equal(replays(x(), factors=(factor,)), x(value=5.0))


def test_long_passes_are_guarded_and_nothing_is_kept_of_them(layer, replays):
    for _ in range(2):
        replays(x(MOST_TOKENS + 1), factors=(torch.ones(1),))
    assert layer.guarded == 2 and not layer.calls


def test_a_layer_of_several_codes_is_guarded(layer):
    named = {"factors": (torch.ones(1),)}
    split = LayerReplays(lambda x, **named: layer.forward(layer.forward(x, **named), **named), layer.calls)
    for _ in range(2):
        split(x(), **named)
    assert layer.guarded == 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act, self.steps = nn.LayerNorm(2), nn.SiLU(), nn.Buffer(torch.ones(2))
        self.up = nn.Linear(2, 2, bias=False)


def wrapped(layer):
    layer.up = nn.Sequential(layer.up)


CHANGES = {
    "nothing": (lambda layer: None, False),
    "written": (lambda layer: layer.norm.weight.data.mul_(3), False),  # which is where the code reads it
    "weight": (lambda layer: setattr(layer.norm, "weight", nn.Parameter(torch.ones(2))), True),
    "bias": (lambda layer: setattr(layer.up, "bias", nn.Parameter(torch.ones(2))), True),
    "no weight": (lambda layer: setattr(layer.norm, "weight", None), True),
    "buffer": (lambda layer: setattr(layer, "steps", torch.ones(2)), True),
    "module": (lambda layer: setattr(layer, "norm", nn.LayerNorm(2)), True),
    "without weights": (lambda layer: setattr(layer, "act", nn.Tanh()), True),
    "wrapped": (wrapped, True),
}


@pytest.mark.parametrize(("change", "seen"), CHANGES.values(), ids=CHANGES)
def test_other_parts_are_seen(change, seen):
    layers = [Block(), Block()]
    parts = Parts(layers)
    assert parts.have_changed() and not parts.have_changed()
    change(layers[1])
    assert parts.have_changed() == seen and not parts.have_changed()


def test_layers_of_other_parts_are_not_replayed():
    """Whatever holds them: only Linear layers of some types count what was laid out for them."""
    layer = Block()
    compiled = CompiledLayers([layer], "a model", linears=PackedLinears(layer))
    (replays,) = compiled._replays
    replays._noted = {3: None}
    for noted in ({}, {3: None}):
        with compiled.used(None, 0):
            assert replays._noted == noted
        replays._noted = {3: None}
    layer.norm.weight = nn.Parameter(torch.ones(2))
    with compiled.used(None, 0):
        assert not replays._noted


def test_a_layer_with_a_forward_of_its_own_is_refused():
    layers = [Block(), Block()]
    compiled = CompiledLayers(layers, "a model", linears=PackedLinears(layers[0]))
    layers[1].forward = lambda x: x
    with pytest.raises(UnsupportedModelError, match="a forward of its own"), compiled.used(None, 0):
        pytest.fail("it would be passed over")
    with pytest.raises(UnsupportedModelError, match="execution='graph'"):
        CompiledLayers(layers, "a model")


def test_beside_the_layers_a_forward_of_ones_own_is_run():
    norm, head = nn.LayerNorm(2), nn.Linear(2, 2, bias=False)
    compiled = CompiledLayers([Block()], "a model", beside=[norm], head=head)
    norm.forward, head.forward = own = (lambda x: x), (lambda x: x + 1)
    with compiled.used(None, 0):
        assert (norm.forward, head.forward) == own
    assert (norm.forward, head.forward) == own
    del norm.forward
    with compiled.used(None, 0):
        assert "forward" in norm.__dict__
