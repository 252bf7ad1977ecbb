"""A layer's graph with its Linear layers as ``octavo::product``: for steps of few rows, in which that may choose how it
multiplies, and adds the residual on the way (``kernels/products/product.py``)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.core.execution.graph_writes import written_between
from octavo.kernels.products.product import product  # noqa: F401, which makes the op


def with_products(module: GraphModule) -> GraphModule:
    """``module`` itself, in which every Linear layer of a weight of its own and without a bias is a product. What such
    a layer is added to, if to nothing but one thing of its own shape, the product adds."""
    graph = module.graph
    for node in list(graph.nodes):
        if not _is_linear(node):
            continue
        x, weight = node.args[:2]
        residual, total = _residual(node)
        last = node if total is None else total
        with graph.inserting_before(last):
            made = graph.call_function(torch.ops.octavo.product, (x, weight, residual))
            made.meta.update(last.meta)
        last.replace_all_uses_with(made)
        graph.erase_node(last)
        if total is not None:
            graph.erase_node(node)
    module.recompile()
    return module


def _is_linear(node: Node) -> bool:
    if node.target is not torch._C._nn.linear or node.kwargs:
        return False
    weight, biased = node.args[1], len(node.args) > 2 and node.args[2] is not None
    # A weight that the graph computes may still be under way when a product begins to read it.
    return isinstance(weight, Node) and weight.op in ("placeholder", "get_attr") and not biased


def _residual(node: Node) -> tuple[Node | None, Node | None]:
    """What a product is added to, and the addition, if nobody else wants the product."""
    if len(node.users) != 1:
        return None, None
    (total,) = node.users
    if total.target is not operator.add:
        return None, None
    others: list[Any] = [arg for arg in total.args if arg is not node]
    if len(others) != 1 or not isinstance(others[0], Node) or _kind(others[0]) != _kind(node):
        return None, None
    if written_between(node, total):  # to what is multiplied, maybe, or to the product
        return None, None
    return others[0], total


def _kind(node: Node) -> Any:
    example = node.meta.get("example_value")
    return node if example is None else (example.dtype, tuple(example.shape))
