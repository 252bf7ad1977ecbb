"""Scorers of kvpress's form as methods here. The presses below are stand-ins: kvpress is not needed."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.costs import predict_decode
from octavo.scripts.build import method
from octavo.sparse.budgets import Uniform
from octavo.sparse.keep import Keep
from octavo.sparse.press_adapter import PressScores, adapted

from .method_cases import PROMPT, View, make

YAML = """
_target_: octavo.sparse.press_adapter.adapted
press: {_target_: %s.SmallKeys, compression_ratio: 0.5}
budget: {_target_: octavo.sparse.budgets.Uniform, tokens: 1024}
keep: {_target_: octavo.sparse.keep.Keep, sink_tokens: 16}
"""


@dataclass
class SmallKeys:
    """Token by token: the smaller a key, the better."""

    compression_ratio: float = 0.0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


class LargeValues:
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert values.shape[1] * module.num_key_value_groups == module.config.num_attention_heads
        return values.norm(dim=-1)


class FarFromMean:
    """Looks at all tokens of the sequence."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return (keys - keys.mean(2, keepdim=True)).norm(dim=-1) + module.layer_idx


class Latest:
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return torch.arange(keys.shape[2], dtype=torch.float32).expand(keys.shape[:3]).to(keys.dtype)


class NeedsHidden:
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return hidden_states.norm(dim=-1)


class WrongShape:
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys.norm(dim=-1)[:, :1]


def built(press, tokens=20):
    return adapted(press, Uniform(tokens), Keep(sink_tokens=4, recent_tokens=4), dense_layers=[0])


@pytest.mark.parametrize("press", [SmallKeys(), LargeValues(), FarFromMean(), Latest()], ids=lambda p: type(p).__name__)
def test_a_page_is_worth_the_mean_of_its_tokens(press):
    view = View(2)
    scores = PressScores(press).score(view.q, view)
    keys, values = view.contents()
    for b, (tokens, pages) in enumerate(((34, 9), (23, 6))):
        module = SimpleNamespace(layer_idx=1, num_key_value_groups=2, config=SimpleNamespace(num_attention_heads=4))
        own = press.score(module, None, keys[b : b + 1, :, :tokens], values[b : b + 1, :, :tokens], None, {})
        for page in range(pages):
            torch.testing.assert_close(scores[b, :, page], own[0, :, 4 * page : 4 * page + 4].mean(1))


def test_an_adapted_window_is_streaming(make_llama, engine_for, drain):
    """The same pages by another way: the same tokens and bytes of K and V, and all of both read to choose."""
    model, params = make_llama(num_hidden_layers=3), SamplingParams(max_tokens=12, ignore_eos=True)
    samples = []
    for chosen in (make("streaming"), built(Latest())):
        engine = engine_for(model)
        engine.submit(PROMPT, params, method=chosen, request_id="a")
        samples.append(drain(engine).completions["a"].samples[0])
        cost = predict_decode(
            engine.spec, chosen, prompt_tokens=len(PROMPT), new_tokens=12, page_tokens=4, unit_tokens=4, itemsize=4
        )
        assert (samples[-1].kv_bytes_read, samples[-1].digest_bytes_read) == (cost.kv_bytes, cost.digest_bytes)
    assert samples[0].token_ids == samples[1].token_ids and samples[0].kv_bytes_read == samples[1].kv_bytes_read
    assert samples[1].digest_bytes_read == 2 * sum(2 * n * 16 * 2 * 4 for n in range(46, 57))  # K and V, two layers


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_batches_and_replays_change_nothing(backend, make_llama, engine_for, drain):
    """Steps under an adapter are not replayed, whatever the execution, and sequences of several lengths share one."""
    model, params = make_llama(num_hidden_layers=3), SamplingParams(max_tokens=8, ignore_eos=True)
    got = []
    for execution in ("eager", "graph"):
        engine = engine_for(model, backend=backend, execution=execution)
        for number, count in enumerate((45, 30, 9)):
            engine.submit(PROMPT[:count], params, method=built(FarFromMean()), request_id=f"{number}")
        completions = drain(engine).completions
        got.append([completions[f"{number}"].samples[0].token_ids for number in range(3)])
        if execution == "graph":
            assert not engine._runner._program.state._known  # the program has decoded nothing
    assert got[0] == got[1]
    for number, count in enumerate((45, 30, 9)):
        engine = engine_for(model, backend=backend)
        engine.submit(PROMPT[:count], params, method=built(FarFromMean()), request_id="a")
        assert drain(engine).completions["a"].samples[0].token_ids == got[0][number]


def test_it_says_that_it_is_an_adapter():
    assert built(SmallKeys()).name == "SmallKeys (through an adapter)"
    assert "SmallKeys(compression_ratio=0.0)" in built(SmallKeys()).provenance


def test_a_press_from_yaml(tmp_path, monkeypatch):
    (tmp_path / "presses.py").write_text(
        "class SmallKeys:\n"
        "    def __init__(self, compression_ratio):\n        self.compression_ratio = compression_ratio\n"
        "    def score(self, module, hidden_states, keys, values, attentions, kwargs):\n"
        "        return -keys.norm(dim=-1)\n"
    )
    (tmp_path / "small.yaml").write_text(YAML % "presses")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = method(str(tmp_path / "small.yaml"), budget_tokens=64)
    assert made.name == "SmallKeys (through an adapter)" and made.budget.tokens == 64 and made.keep.sink_tokens == 16


@pytest.mark.parametrize(
    ("press", "message"),
    [
        (object(), "press=object has no method score"),
        (NeedsHidden(), "NeedsHidden cannot be used through an adapter: .* raised AttributeError"),
        (WrongShape(), r"WrongShape: score\(\) gave \(1, 1, 8\) for keys of \(1, 2, 8, 4\)"),
    ],
    ids=["no_score", "needs_hidden_states", "wrong_shape"],
)
def test_what_cannot_be_adapted_is_refused(press, message):
    with pytest.raises(ValueError, match=message):
        adapted(press, Uniform(64))
