"""A layer's graph on a CPU with fewer products: those that ``kernels/cpu/linear.c`` computes together, or with what is
done to them, become one op. Each op is a parallel region, and what is around it costs a few rows as much as it does::

    linear(x, a), linear(x, b), linear(x, c)    ->  linear_blocks_3(x, a, b, c)      queries, keys and values
    silu(linear(x, gate)) * linear(x, up)       ->  linear_blocks_gated(x, gate, up)
    linear(x, w) + residual                     ->  linear_blocks_added(x, w, residual)

This is looked for in the graph, whatever the model. A sum is rounded once, and what is let through after gate and up
have been, where a layer that is run line by line rounds after every line.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn.functional import silu

from octavo.core.execution.graph_nodes import kind, replace
from octavo.core.execution.graph_writes import writes
from octavo.kernels.cpu import blocks  # noqa: F401, which makes the ops

_ops = torch.ops.octavo


def with_block_products(module: GraphModule) -> GraphModule:
    """``module`` itself, in which such products are one op; as it is where something is written in place."""
    graph = module.graph
    if any(map(writes, graph.nodes)):
        return module
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is operator.mul:
            _gate(node)
        elif node.op == "call_function" and node.target is operator.add:
            _add(graph, node)
    _join(graph)
    graph.eliminate_dead_code()
    module.recompile()
    return module


def _gate(product: Any) -> None:
    """Let ``product`` be one op, if it is of a gate and what goes through."""
    for activated, up in (product.args, reversed(product.args)):
        gate = _activated(activated)
        if gate is None or not _is_product(up) or not _alone(activated, gate, up):
            continue
        if _source(gate) is _source(up) and gate.args[2] == up.args[2]:
            replace(product, _ops.linear_blocks_gated, (up.args[0], gate.args[1], up.args[1], up.args[2]))
            return


def _add(graph: Graph, total: Any) -> None:
    """Let ``total`` be one op, if it is a product and something else of its shape."""
    for product, added in (total.args, reversed(total.args)):
        if not _is_product(product) or not _alone(product) or added is product:
            continue
        if isinstance(added, Node) and kind(added) == kind(product):
            with graph.inserting_before(total):
                added = graph.call_method("contiguous", (added,))
            replace(total, _ops.linear_blocks_added, (*product.args, added))
            return


def _join(graph: Graph) -> None:
    """Let every three products of one input be one op."""
    by_input: dict[Any, list[Any]] = {}
    for node in graph.nodes:
        if _is_product(node):
            by_input.setdefault(_source(node), []).append(node)
    for products in by_input.values():
        first = products[0]
        weights = [product.args[1] for product in products]
        if len(products) != 3 or any(weight.op != "placeholder" for weight in weights):  # known only behind the first
            continue
        given = [part for product in products for part in product.args[1:]]
        with graph.inserting_before(first):
            joined = graph.call_function(_ops.linear_blocks_3, (first.args[0], *given))
            for number, product in enumerate(products):
                part = graph.call_function(operator.getitem, (joined, number))
                part.meta.update(product.meta)
                product.replace_all_uses_with(part)


def _is_product(node: Any) -> bool:
    return isinstance(node, Node) and node.target is _ops.linear_blocks


def _activated(node: Any) -> Any:
    """The product that a node applies SiLU to; None of any other node."""
    if isinstance(node, Node) and node.target in (silu, torch._C._nn.silu) and _is_product(node.args[0]):
        return node.args[0]
    return None


def _source(product: Any) -> Any:
    """What a product multiplies, past what lays it out side by side."""
    x = product.args[0]
    return x.args[0] if x.target == "contiguous" and len(x.args) == 1 and not x.kwargs else x


def _alone(*nodes: Any) -> bool:
    """Whether nobody else wants any of them."""
    return all(len(node.users) == 1 for node in nodes)
