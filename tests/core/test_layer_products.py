"""Linear layers of a graph as products: which of them add what is behind them."""

import operator

import pytest
import torch
import torch.nn.functional as F

from octavo.core.execution.graph_writes import writes
from octavo.core.execution.layer_products import with_products


def graph_of(build):
    """A graph from ``build(linear, add, x, weight, other)``, traced and rewritten, and how often it calls what."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "weight", "other")]
    for node, shape in zip(nodes, ((1, 3, 4), (4, 4), (1, 3, 4)), strict=True):
        node.meta["example_value"] = torch.empty(shape)

    def linear(*args, **named):
        node = graph.call_function(torch._C._nn.linear, args, named)
        node.meta["example_value"] = torch.empty(1, 3, 4)
        return node

    def add(*args):
        node = graph.call_function(operator.add, args)
        node.meta["example_value"] = torch.empty(1, 3, 4)
        return node

    graph.output(build(linear, add, *nodes))
    module = with_products(torch.fx.GraphModule({}, graph))
    module.graph.lint()
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return module, targets


def write(node):
    return node.graph.call_method("zero_", (node,))


WRITES = [
    ((operator.setitem, (0, 1)), True), ((operator.iadd, (1,)), True), (("mul_", (2,)), True),
    ((torch.relu_, ()), True), ((torch.neg, (), {"out": 1}), True), ((F.silu, (), {"inplace": True}), True),
    ((F.silu, (), {"inplace": False}), False), ((operator.add, (1,)), False), ((operator.index, ()), False),
    (("mul", (2,)), False), (("__add__", (2,)), False),
]  # fmt: skip
WRITE_IDS = [f"{getattr(target, '__name__', target)}{''.join(map(str, named.items()))}"
             for (target, _, *rest), _ in WRITES for named in [rest[0] if rest else {}]]  # fmt: skip


@pytest.mark.parametrize(("call", "expected"), WRITES, ids=WRITE_IDS)
def test_what_writes_in_place(call, expected):
    graph = torch.fx.Graph()
    target, args, *named = call
    op = "call_method" if isinstance(target, str) else "call_function"
    assert writes(graph.create_node(op, target, (graph.placeholder("x"), *args), *named)) == expected


PRODUCT, LINEAR, ADD = torch.ops.octavo.product, torch._C._nn.linear, operator.add


@pytest.mark.parametrize(
    ("build", "calls"),
    [
        (lambda linear, add, x, w, o: linear(x, w), [PRODUCT]),
        (lambda linear, add, x, w, o: linear(x, w, None), [PRODUCT]),
        (lambda linear, add, x, w, o: add(o, linear(x, w)), [PRODUCT]),
        (lambda linear, add, x, w, o: add(linear(x, w), o), [PRODUCT]),
        (lambda linear, add, x, w, o: linear(x, w, o), [LINEAR]),
        (lambda linear, add, x, w, o: linear(x, w, bias=o), [LINEAR]),
        (lambda linear, add, x, w, o: add(linear(x, w), 1.0), [PRODUCT, ADD]),
        (lambda linear, add, x, w, o: (lambda y: add(y, y))(linear(x, w)), [PRODUCT, ADD]),
        (lambda linear, add, x, w, o: (lambda y: (y, add(y, o)))(linear(x, w)), [PRODUCT, ADD]),
        (lambda linear, add, x, w, o: add(linear(x, w), w), [PRODUCT, ADD]),
        (lambda linear, add, x, w, o: add(linear(x, w), linear(o, w)), [PRODUCT, PRODUCT]),
        (lambda linear, add, x, w, o: (lambda y: (write(x), add(y, o))[1])(linear(x, w)), [PRODUCT, ADD]),
        (lambda linear, add, x, w, o: (lambda y: (write(o), add(y, x))[1])(linear(x, w)), [PRODUCT, ADD]),
        (lambda linear, add, x, w, o: (write(x), add(linear(x, w), o))[1], [PRODUCT]),
        (lambda linear, add, x, w, o: add(o, linear(add(o, linear(x, w)), w)), [PRODUCT, PRODUCT]),
        (lambda linear, add, x, w, o: linear(x, add(w, w)), [ADD, LINEAR]),
    ],
    ids=["alone", "no bias", "residual", "residual behind", "bias", "bias by name", "a number", "itself",
         "wanted twice", "another shape", "two", "x written", "other written", "written before", "chain",
         "a computed weight"],
)  # fmt: skip
def test_what_becomes_a_product(build, calls):
    _, targets = graph_of(build)
    assert targets == calls


def test_it_computes_the_same():
    module, _ = graph_of(lambda linear, add, x, w, o: add(o, linear(add(o, linear(x, w)), w)))
    x, w, o = torch.randn(1, 3, 4), torch.randn(4, 4), torch.randn(1, 3, 4)
    assert torch.equal(module(x, w, o), o + (o + x @ w.T) @ w.T)


def test_a_weight_of_one_axis_is_left():
    """Its product has an axis less."""

    def with_axes(*sizes):
        graph = torch.fx.Graph()
        x, weight = graph.placeholder("x"), graph.placeholder("weight")
        weight.meta["example_value"] = torch.empty(sizes)
        graph.output(graph.call_function(torch._C._nn.linear, (x, weight, None)))
        module = with_products(torch.fx.GraphModule({}, graph))
        return [node.target for node in module.graph.nodes if node.op == "call_function"]

    assert with_axes(4) == [torch._C._nn.linear]
    assert with_axes(4, 4) == [torch.ops.octavo.product]


def gate_graph(change=lambda graph, parts: parts, act=F.silu, width=8, **given):
    """Gate and up as one Linear layer of ``width`` outputs, the activation of its first half times the second;
    ``change`` does something to (both, gates, opened, passed, product)."""
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    both = graph.call_function(torch._C._nn.linear, (x, weight, None))
    both.meta["example_value"] = torch.empty(1, 3, width)
    gates = graph.call_function(operator.getitem, (both, (..., slice(0, width // 2, None))))
    opened = graph.call_function(act, (gates,), given)
    passed = graph.call_function(operator.getitem, (both, (..., slice(width // 2, width, None))))
    made = graph.call_function(operator.mul, (opened, passed))
    graph.output(change(graph, (both, gates, opened, passed, made))[-1])
    module = with_products(torch.fx.GraphModule({}, graph))
    module.graph.lint()
    return module, [node.target for node in module.graph.nodes if node.op == "call_function"]


GATED, TANH = torch.ops.octavo.gated_product, {"approximate": "tanh"}


@pytest.mark.parametrize(
    ("act", "given"), [(F.silu, {}), (F.silu, {"inplace": False}), (F.gelu, TANH)], ids=["silu", "not in place", "tanh"]
)
def test_a_gated_product(act, given):
    module, targets = gate_graph(act=act, **given)
    assert targets == [GATED]
    x, weight = torch.randn(1, 3, 4), torch.randn(8, 4)
    gates, passed = F.linear(x, weight).chunk(2, -1)
    assert torch.equal(module(x, weight), act(gates, **given) * passed)


def swapped(graph, parts):
    parts[-1].args = parts[-1].args[::-1]
    return parts


def test_factors_may_stand_the_other_way_round():
    assert gate_graph(swapped)[1] == [GATED]


def chunked(chunks=2, **given):
    """As models have it whose gate and up are one layer."""

    def change(graph, parts):
        both, gates, _, passed, _ = parts
        with graph.inserting_before(gates):
            halves = graph.call_method("chunk", (both, chunks), given)
        gates.args, passed.args = (halves, 0), (halves, 1)
        return parts

    return change


def test_halves_may_be_chunks():
    module, targets = gate_graph(chunked(dim=-1))
    x, weight = torch.randn(1, 3, 4), torch.randn(8, 4)
    gates, passed = F.linear(x, weight).chunk(2, -1)
    assert targets == [GATED] and torch.equal(module(x, weight), F.silu(gates) * passed)


def other_half(graph, parts):
    parts[1].args, parts[3].args = parts[3].args, parts[1].args
    return parts


def other_part(graph, parts):
    parts[1].args = (parts[0], (..., slice(0, 3, None)))
    return parts


def same_part(of):
    def change(graph, parts):
        for part in (parts[1], parts[3]):
            part.args = parts[of].args
        return parts

    return change


def same_chunk(graph, parts):
    return same_part(1)(graph, chunked(dim=-1)(graph, parts))


def whole(graph, parts):
    for part in (parts[1], parts[3]):
        part.args = (parts[0], None)
    return parts


def wanted_twice(number):
    def change(graph, parts):
        return (*parts, graph.call_function(operator.add, (parts[number], parts[-1])))

    return change


def written(graph, parts):
    with graph.inserting_after(parts[2]):
        graph.call_method("zero_", (parts[0],))
    return parts


def itself(graph, parts):
    parts[-1].args = (parts[2], parts[2])
    return parts


@pytest.mark.parametrize(
    ("change", "named"),
    [(other_half, {}), (other_part, {}), (wanted_twice(0), {}), (wanted_twice(1), {}), (wanted_twice(2), {}),
     (wanted_twice(3), {}), (written, {}), (itself, {}), (lambda g, p: p, {"act": torch.sigmoid}),
     (chunked(dim=0), {}), (chunked(3, dim=-1), {}), (chunked(), {}), (lambda g, p: p, {"act": F.gelu}),
     (lambda g, p: p, {"inplace": True}), (lambda g, p: p, {"width": 7}),
     (whole, {"width": 7}), (same_part(1), {}), (same_part(3), {}), (same_chunk, {})],
    ids=["second half", "other part", "both", "gates", "opened", "passed", "written", "itself", "sigmoid",
         "rows", "thirds", "rows by default", "erf", "in place", "odd", "odd, with an axis more",
         "first half twice", "second half twice", "chunk twice"],
)  # fmt: skip
def test_what_is_no_gated_product(change, named):
    assert GATED not in gate_graph(change, **named)[1]
