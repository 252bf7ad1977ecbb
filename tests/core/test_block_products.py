"""A layer's graph on a CPU: which products become one op, and that it computes the same."""

import operator

import pytest
import torch
from torch.nn.functional import silu

from octavo.core.execution.block_products import with_block_products
from octavo.kernels.cpu import blocks

OPS = torch.ops.octavo
ONE, ADDED, GATED, THREE = OPS.linear_blocks, OPS.linear_blocks_added, OPS.linear_blocks_gated, OPS.linear_blocks_3
MUL, ADD, ITEM = operator.mul, operator.add, operator.getitem


class Graph:
    """What ``build`` draws with: ``x`` and ``other`` [1, 3, 8], three weights ``w`` [8, 8] in blocks."""

    def __init__(self, build):
        self.graph = torch.fx.Graph()
        self.x, self.other = (self._tensor(name) for name in ("x", "other"))
        self.w = [self.graph.placeholder(f"w{number}") for number in range(3)]
        self.graph.output(build(self))
        self.module = with_block_products(torch.fx.GraphModule({}, self.graph))
        self.module.graph.lint()

    def _tensor(self, name):
        node = self.graph.placeholder(name)
        node.meta["example_value"] = torch.empty(1, 3, 8, dtype=torch.bfloat16)
        return node

    def call(self, target, *args, **named):
        node = self.graph.call_function(target, args, named)
        node.meta["example_value"] = torch.empty(1, 3, 8, dtype=torch.bfloat16)
        return node

    def linear(self, x, number):
        return self.call(ONE, self.graph.call_method("contiguous", (x,)), self.w[number], 8)

    def write(self, x):
        return self.graph.call_method("zero_", (x,))

    @property
    def targets(self):
        return [node.target for node in self.module.graph.nodes if node.op == "call_function"]


def gated(g, up_first=False, **named):
    gate = g.call(silu, g.linear(g.x, 0), **named)
    up = g.linear(g.x, 1)
    return g.call(MUL, up, gate) if up_first else g.call(MUL, gate, up)


BUILDS = {
    "alone": (lambda g: g.linear(g.x, 0), [ONE]),
    "residual": (lambda g: g.call(ADD, g.other, g.linear(g.x, 0)), [ADDED]),
    "residual behind": (lambda g: g.call(ADD, g.linear(g.x, 0), g.other), [ADDED]),
    "a number": (lambda g: g.call(ADD, g.linear(g.x, 0), 1.0), [ONE, ADD]),
    "itself": (lambda g: (lambda y: g.call(ADD, y, y))(g.linear(g.x, 0)), [ONE, ADD]),
    "wanted twice": (lambda g: (lambda y: (y, g.call(ADD, y, g.other)))(g.linear(g.x, 0)), [ONE, ADD]),
    "another shape": (lambda g: g.call(ADD, g.linear(g.x, 0), g.w[0]), [ONE, ADD]),
    "two residuals": (lambda g: g.call(ADD, g.linear(g.call(ADD, g.other, g.linear(g.x, 0)), 1), g.x), [ADDED, ADDED]),
    "gate": (gated, [GATED]),
    "gate behind": (lambda g: gated(g, up_first=True), [GATED]),
    "gate, not in place": (lambda g: gated(g, inplace=False), [GATED]),
    "another gate": (lambda g: g.call(MUL, g.call(torch.tanh, g.linear(g.x, 0)), g.linear(g.x, 1)),
                     [ONE, torch.tanh, ONE, MUL]),
    "gate of another input": (lambda g: g.call(MUL, g.call(silu, g.linear(g.other, 0)), g.linear(g.x, 1)),
                              [ONE, silu, ONE, MUL]),
    "three": (lambda g: tuple(g.linear(g.x, number) for number in range(3)), [THREE, ITEM, ITEM, ITEM]),
    "two": (lambda g: tuple(g.linear(g.x, number) for number in range(2)), [ONE, ONE]),
    "three of two inputs": (lambda g: (g.linear(g.x, 0), g.linear(g.other, 1), g.linear(g.x, 2)), [ONE, ONE, ONE]),
    "written": (lambda g: (g.linear(g.x, 0), g.write(g.other), g.linear(g.x, 1), g.linear(g.x, 2)), [ONE, ONE, ONE]),
}  # fmt: skip


@pytest.mark.parametrize(("build", "calls"), BUILDS.values(), ids=BUILDS)
def test_what_becomes_one_op(build, calls):
    assert Graph(build).targets == calls


@pytest.mark.skipif(not blocks._registered(), reason="no C compiler, or a processor without AVX512-BF16")
@pytest.mark.parametrize("name", ["residual", "two residuals", "gate", "gate behind", "three"])
def test_it_computes_the_same(name):
    torch.manual_seed(0)
    graph = Graph(BUILDS[name][0])
    x, other = torch.randn(2, 1, 3, 8).bfloat16()
    weights = [torch.randn(8, 8).bfloat16() for _ in range(3)]
    got = graph.module(x, other, *(blocks.pack(weight, None) for weight in weights))
    a, b, c = (weight.double().T for weight in weights)
    want = {
        "residual": other + x.double() @ a,
        "two residuals": (other + x.double() @ a).bfloat16().double() @ b + x,
        "three": torch.stack([x.double() @ weight for weight in (a, b, c)]),
    }.get(name, silu(x.double() @ a) * (x.double() @ b))
    got = torch.stack(got) if isinstance(got, tuple) else got
    torch.testing.assert_close(got.double(), want, rtol=2**-6, atol=2**-6)
