"""A layer's graph with its Linear layers as ``octavo::product``, which may choose how it multiplies, and adds the
residual or gates on the way (``kernels/products/product.py``)."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from octavo.core.execution.graph_nodes import kind, replace
from octavo.core.execution.graph_writes import written_between
from octavo.kernels.products.product import product  # noqa: F401, which makes the op


def with_products(module: GraphModule) -> GraphModule:
    """``module`` itself, in which every Linear layer of a weight of its own and without a bias is a product. What such
    a layer is added to, if to nothing but one thing of its own shape, the product adds; and where gate and up are one
    Linear layer, by the model or by ``joined_linears.py``, it gates."""
    graph = module.graph
    for node in list(graph.nodes):
        if not _is_linear(node):
            continue
        x, weight = node.args[:2]
        gate = _gate(node)
        if gate is not None:
            activation, halves, last = gate
            replace(last, torch.ops.octavo.gated_product, (x, weight, activation))
            for unused in (*halves, node):
                graph.erase_node(unused)
            continue
        residual, total = _residual(node)
        last = node if total is None else total
        replace(last, torch.ops.octavo.product, (x, weight, residual))
        if total is not None:
            graph.erase_node(node)
    module.recompile()
    return module


def _is_linear(node: Node) -> bool:
    if node.target is not torch._C._nn.linear or node.kwargs:
        return False
    weight, biased = node.args[1], len(node.args) > 2 and node.args[2] is not None
    # A weight that the graph computes may still be under way when a product begins to read it.
    if biased or not isinstance(weight, Node) or weight.op not in ("placeholder", "get_attr"):
        return False
    example = weight.meta.get("example_value")
    return example is None or example.ndim == 2


def _residual(node: Node) -> tuple[Node | None, Node | None]:
    """What a product is added to, and the addition, if nobody else wants the product."""
    if len(node.users) != 1:
        return None, None
    (total,) = node.users
    if total.target is not operator.add:
        return None, None
    others: list[Any] = [arg for arg in total.args if arg is not node]
    if len(others) != 1 or not isinstance(others[0], Node) or kind(others[0]) != kind(node):
        return None, None
    if written_between(node, total):  # to what is multiplied, maybe, or to the product
        return None, None
    return others[0], total


def _gate(node: Node) -> tuple[str, list[Node], Node] | None:
    """Of a product whose first half, through an activation, is multiplied by its second half, and nothing else: which
    activation, the nodes in between, users first, and the multiplication."""
    halves = _halves(node)
    if halves is None or any(len(half.users) != 1 for half in halves[:2]):
        return None
    gates, passed, *taken_from = halves
    (opened,), (last,) = gates.users, passed.users
    activation = _activation(opened)
    if activation is None or list(opened.users) != [last] or last.target is not operator.mul:
        return None
    if set(last.args) != {opened, passed} or written_between(node, last):
        return None
    return activation, [opened, gates, passed, *taken_from], last


def _halves(node: Node) -> list[Node] | None:
    """The two halves of the outputs of a product that is wanted for nothing else, and what they are taken from if that
    is not the product: one Linear layer in the model has ``chunk``, joined ones are taken apart by their widths."""
    example = node.meta.get("example_value")
    width = None if example is None else example.shape[-1]
    if not isinstance(width, int) or width % 2:
        return None
    users, taken_from = list(node.users), []
    wanted: list[Any] = [(..., slice(0, width // 2, None)), (..., slice(width // 2, width, None))]
    if len(users) == 1 and _is_chunk(users[0]):
        taken_from, wanted = users, [0, 1]
        users = list(users[0].users)
    found = [user for part in wanted for user in users if user.target is operator.getitem and user.args[1] == part]
    return [*found, *taken_from] if len(users) == 2 and [half.args[1] for half in found] == wanted else None


def _is_chunk(node: Node) -> bool:
    """In two, along the last axis."""
    return node.target == "chunk" and (*node.args[1:], *node.kwargs.values()) == (2, -1)


def _activation(node: Node) -> str | None:
    """Its name among those that a product has (``ACTIVATIONS``)."""
    if len(node.args) != 1:
        return None
    given = {name: value for name, value in node.kwargs.items() if value is not False}  # as "inplace"
    if node.target is F.silu and not given:
        return "silu"
    return "gelu_tanh" if node.target is F.gelu and given == {"approximate": "tanh"} else None
