"""Compiled layers without their rotary embedding, and steps that turn queries and keys instead: the same tokens."""

import operator

import pytest
import torch

from octavo.core import Engine, EngineConfig, SamplingParams
from octavo.core.execution import compiled
from octavo.core.execution.attention import PagedStep
from octavo.core.execution.turning import without_turn
from octavo.core.hf_model import HFModel

from .architectures import build, refusal

WHOLE_HEADS = {"llama": True, "qwen3": True, "gemma3": True, "olmo2": True, "smollm3": True}
OTHERS = {"glm": False, "gpt_neox": False, "cohere2": False, "opt": False}  # parts of heads, pairs side by side, none


@pytest.fixture
def versions(monkeypatch):
    """How many calls went to which version of the code. It is run as it was traced, for speed."""
    calls = {"turned": 0, "unturned": 0}

    def traced(graph, examples, options=None):
        kind = "unturned" if "attend_turning_in_step" in graph.code else "turned"

        def run(*inputs):
            calls[kind] += 1
            return graph(*inputs)

        return run

    monkeypatch.setattr(torch._inductor, "compile", traced)
    monkeypatch.setattr(compiled, "noting", lambda calls, options: compiled.versions)
    return calls


def tokens_of(model, execution, backend="reference", **fields):
    torch._dynamo.reset()
    engine = Engine(
        model, None,
        EngineConfig(page_tokens=4, pool_tokens=256, max_seqs=4, execution=execution, backend=backend, **fields),
    )  # fmt: skip
    prompts = [[(5 * i + 3 * at) % 128 for at in range(3 + 4 * i)] for i in range(3)]
    found = engine.generate(prompts, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.check()
    return [completion.samples[0].token_ids for completion in found]


@pytest.mark.parametrize("name", [name for name in (*WHOLE_HEADS, *OTHERS) if name != "smollm3"])
def test_same_tokens(name, versions):
    """On a CPU, for want of a GPU. There an op in C counts the layers, and it would see half of SmolLM3's: the others
    have no RoPE."""
    if refusal(name):
        pytest.skip(refusal(name))
    model = build(name)
    assert tokens_of(model, "compiled") == tokens_of(model, "eager")
    assert versions["turned"] > 0, "prompts are turned in compiled code"
    assert (versions["unturned"] > 0) == {**WHOLE_HEADS, **OTHERS}[name]


def test_a_step_with_more_than_plain_decodes_turns_nothing(versions):
    model = build("llama")
    fields = {"step_tokens": 5}  # prompts come in chunks beside decodes
    assert tokens_of(model, "compiled", **fields) == tokens_of(model, "eager", **fields)
    assert versions["turned"] > 0 and versions["unturned"] > 0


def test_on_a_cpu_nothing_is_left_to_the_step(versions):
    model = build("llama")
    assert tokens_of(model, "compiled", "cpu") == tokens_of(model, "eager", "cpu")
    assert versions["turned"] > 0 and versions["unturned"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*WHOLE_HEADS, *OTHERS])
def test_same_tokens_on_a_gpu(name, monkeypatch):
    turned = []
    attend = PagedStep.attend_turning
    monkeypatch.setattr(PagedStep, "attend_turning", lambda *args: turned.append(1) or attend(*args))
    want = tokens_of(build(name), "eager")
    assert tokens_of(build(name).cuda(), "compiled", "triton") == want
    assert bool(turned) == {**WHOLE_HEADS, **OTHERS}[name]


def attend(q, k, v, rest):
    return q, k, v, rest


def attend_turning(q, k, v, cos, sin, rest):
    return q, k, v, cos, sin, rest


class TestTheGraph:
    @staticmethod
    def rewritten(half, x=(1, 2, 3, 8), cos=(1, 3, 8), dim=1, other_cos=False, angles=torch.float32, written=None):
        """The graph of a layer whose rotation is cut at ``half``, rewritten; None where it still turns.
        ``written``: what is doubled in place before attention."""
        graph = torch.fx.Graph()
        q, k, v, first, second = (graph.placeholder(name) for name in ("q", "k", "v", "cos", "sin"))
        for node, shape in ((q, x), (k, x), (v, x), (first, cos), (second, cos)):
            node.meta["example_value"] = torch.empty(shape, dtype=angles if shape is cos else torch.float32)
        function = graph.call_function
        turned = []
        for node in (q, k):
            c, s = graph.call_method("unsqueeze", (first, dim)), graph.call_method("unsqueeze", (second, dim))
            if other_cos and node is k:
                c = s
            low = function(operator.getitem, (node, (Ellipsis, slice(None, half, None))))
            high = function(operator.getitem, (node, (Ellipsis, slice(half, None, None))))
            cat = function(torch.cat, ((function(operator.neg, (high,)), low),), {"dim": -1})
            total = function(operator.add, (function(operator.mul, (node, c)), function(operator.mul, (cat, s))))
            turned.append(total)
            if written is not None:
                graph.call_method("mul_", ({"x": node, "angles": c, "half": cat, "turned": total}[written], 2))
        heads = [graph.call_method("transpose", (function(operator.getitem, (node, 0)), 0, 1)) for node in (*turned, v)]
        out = function(attend, (*heads, 7))
        graph.call_method("mul_", (v, 2))
        graph.output(out)
        return without_turn(torch.fx.GraphModule({}, graph), attend, attend_turning)

    def test_hands_over_what_was_to_be_turned(self):
        q, k, v = torch.randn(3, 1, 2, 3, 8)
        cos, sin = torch.randn(2, 1, 3, 8)
        before = v.clone()
        found = self.rewritten(half=4)(q, k, v, cos, sin)
        assert torch.equal(v, 2 * before), "what is called for its effect alone stays"
        assert all(torch.equal(a, b[0].transpose(0, 1)) for a, b in zip(found[:3], (q, k, v), strict=True))
        assert torch.equal(found[3], cos[0]) and torch.equal(found[4], sin[0]) and found[5] == 7

    @pytest.mark.parametrize(
        "other",
        [{"half": 3}, {"half": 4, "cos": (1, 3, 4)}, {"half": 4, "dim": 2}, {"half": 4, "other_cos": True},
         {"half": 3, "x": (1, 2, 3, 7), "cos": (1, 3, 7)}, {"half": 4, "cos": (1, 1, 8)},
         {"half": 4, "x": (1, 2, 1, 8), "cos": (1, 3, 8)}, {"half": 4, "angles": torch.float64},
         *({"half": 4, "written": what} for what in ("x", "angles", "half", "turned"))],
        ids=["not in the middle", "part of a head", "an angle a head", "other angles for keys", "odd heads",
             "one angle for all", "one token at all angles", "another type", "written", "angles written",
             "half written", "turned and written"],
    )  # fmt: skip
    def test_stays_as_it_is_where_something_else_is_computed(self, other):
        assert self.rewritten(**other) is None

    def test_there_is_no_copy_where_nothing_attends(self):
        graph = torch.fx.Graph()
        graph.output(graph.placeholder("x"))
        assert without_turn(torch.fx.GraphModule({}, graph), attend, attend_turning) is None


@pytest.mark.parametrize(
    ("name", "beside"),
    [("llama", {"norm", "rotary_emb"}), ("gemma3", {"norm", "rotary_emb"}), ("opt", {"final_layer_norm"})],
)
def test_what_stands_beside_the_layers_is_compiled_too(name, beside):
    model = HFModel(build(name))
    found = model._beside(model.layers("none"))
    assert {key.split(".")[-1] for key, module in model.model.named_modules() if module in found} == beside
