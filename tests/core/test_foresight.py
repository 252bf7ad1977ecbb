"""The next layer's queries, foretold: exactly those that it asks where the layer in between adds nothing."""

from types import SimpleNamespace

import pytest
import torch

from octavo.core.execution.foresight import Foresight, _narrowed
from octavo.core.hf_model import HFModel

from .architectures import MODELS, build, refusal

KINDS = ["sliding_attention", "full_attention"]
OVERRIDES = {"smollm3": {"no_rope_layers": [1, 0, 1, 0]}}


class Watch:
    """Serves a pass and writes down what each layer asks, and what was foretold then. One group of rows looks ahead."""

    def __init__(self, start, stop, layers=range(4)):
        away = SimpleNamespace(framed=list(layers))
        self.decodes = [SimpleNamespace(foresees=True, start=start, stop=stop, pages=SimpleNamespace(away=away))]
        self.foretold = None
        self.asked, self.told = {}, {}

    def attend(self, layer, q, k, v, traits):
        self.asked[layer], self.told[layer] = (q, traits), self.foretold
        return torch.ones_like(q) * (layer + 1)


def passed(model, foresight, watch, skipped=None):
    """One pass over four tokens at some positions; the layer ``skipped`` hands on what it is given."""
    ids, positions = torch.tensor([5, 9, 3, 77]), torch.tensor([30, 2, 11, 2])
    layers = foresight._layers
    with pytest.MonkeyPatch.context() as patch, foresight.used(watch):
        if skipped is not None:
            given = layers[skipped].forward
            is_tuple = []

            def forward(hidden, *args, **kwargs):
                is_tuple.append(isinstance(given(hidden, *args, **kwargs), tuple))
                return (hidden,) if is_tuple[-1] else hidden

            patch.setattr(layers[skipped], "forward", forward)
        model.forward(ids, positions, None, watch)
    assert watch.foretold is None and not any(layer._forward_pre_hooks for layer in layers)
    return watch


def served(name, kinds=None):
    if refusal(name):
        pytest.skip(refusal(name))
    model = HFModel(
        build(name, num_hidden_layers=4, **OVERRIDES.get(name, {}), **({"layer_types": kinds} if kinds else {}))
    )
    return model, model.foresight()


ALIKE = [name for name in MODELS if "layer_types" not in MODELS[name][1]]


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.parity) for n in ALIKE if n != "llama")])
def test_queries_of_the_next_layer(name):
    model, foresight = served(name)
    watch = passed(model, foresight, Watch(0, 4), skipped=1)
    told, (q, traits) = watch.told[1], watch.asked[2]
    assert (told.layer, told.start, told.traits) == (2, 0, traits)
    assert torch.equal(told.q, q)
    assert not torch.allclose(watch.told[0].q, watch.asked[1][0]), "layer 0 adds something"
    assert watch.told[3] is None, "no layer comes behind it"


@pytest.mark.parametrize("name", ["gemma3", pytest.param("cohere2", marks=pytest.mark.parity),
                                  pytest.param("gpt_oss", marks=pytest.mark.parity)])  # fmt: skip
def test_layers_of_two_kinds(name):
    """A layer is asked with the arguments of its own kind, once they are known."""
    model, foresight = served(name, KINDS * 2)
    assert [bool(window) for window in model.spec.windows] == [True, False] * 2
    watch = passed(model, foresight, Watch(0, 4, layers=[1, 3]), skipped=2)
    assert [told is not None and told.layer for told in watch.told.values()] == [False, False, 3, False]
    q, traits = watch.asked[3]
    assert torch.equal(watch.told[2].q, q) and watch.told[2].traits == traits


def test_some_rows_alone():
    model, foresight = served("llama")
    watch = passed(model, foresight, Watch(1, 3), skipped=0)
    assert watch.told[0].start == 1 and watch.told[0].q.shape == (2, 4, 16)
    torch.testing.assert_close(watch.told[0].q, watch.asked[1][0][1:3])


def test_what_a_layer_is_called_with_is_narrowed():
    rows, other = torch.arange(12).view(1, 6, 2), torch.arange(6)
    given = {"args": [rows, None], "kwargs": {"position_embeddings": (rows, rows), "cache_position": other, "n": 3}}
    narrowed = _narrowed(given, 6, 2, 4)
    assert (
        narrowed["kwargs"]["cache_position"] is other and narrowed["kwargs"]["n"] == 3 and narrowed["args"][1] is None
    )
    for tensor in (narrowed["args"][0], *narrowed["kwargs"]["position_embeddings"]):
        assert tensor.tolist() == [[[4, 5], [6, 7]]]
    assert _narrowed(rows, 6, 0, 6) is rows


def test_layers_that_do_not_attend_are_an_error(t_model):
    model = HFModel(t_model)
    foresight = Foresight([torch.nn.Identity(), _Deaf()], (0, 0))
    watch = Watch(0, 4)
    with foresight.used(watch), pytest.raises(AssertionError, match="layer 1 does not attend"):
        foresight._layers[0](torch.zeros(1, 4, 8))
    assert model.foresight() is model.foresight()


def test_other_lists_of_as_many_are_no_layers(make_llama):
    model = make_llama()
    tower = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    model._modules = {"tower": tower, **model._modules}
    assert HFModel(model).layers("") == list(model.model.layers)


class _Deaf(torch.nn.Module):
    def forward(self, hidden, octavo_step):
        return hidden
