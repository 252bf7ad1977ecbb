"""A layer's graph without its rotary embedding, for steps that turn queries and keys themselves.

What a compiled layer hands to attention has gone through a kernel that turns it and does nothing else. A step whose own
kernels read every query and key anyway (``ops.append_decode``) turns them on the way, so the graph is written anew::

    x * cos + cat(-x[..., h:], x[..., :h]) * sin   -> attend(q, k, v)           x -> attend(q, k, v, cos, sin)

This is looked for in the graph and not in a model's code, so it serves whoever computes "rotate half" over whole heads,
be there norms before it; a graph that computes anything else stays as it is, and so does one that writes in place to
what may be turned.
"""

from __future__ import annotations

import copy
import operator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from octavo.core.execution.graph_writes import writes, written_between


def without_turn(module: GraphModule, attend: Any, attend_turning: Any) -> GraphModule | None:
    """A copy of ``module`` in which each call of ``attend(q, k, v, *rest)``, whose q and k are turned by the same cos
    and sin, is one of ``attend_turning(q, k, v, cos, sin, *rest)``; None if not all are, or there is none."""
    graph = copy.deepcopy(module.graph)
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is attend]
    for call in calls:
        q, k, v, *rest = call.args
        turned = _turned_heads(q), _turned_heads(k)
        if turned[0] is None or turned[1] is None or turned[0][1:] != turned[1][1:]:
            return None
        if any(written_between(x, call) for x in (turned[0].x, turned[1].x)):
            return None
        with graph.inserting_before(call):
            rows = [graph.call_function(operator.getitem, (x, 0)) for x in (turned[0].x, turned[1].x)]
            heads = [graph.call_method("transpose", (row, 0, 1)) for row in rows]
            angles = [graph.call_function(operator.getitem, (x, 0)) for x in (turned[0].cos, turned[0].sin)]
            call.replace_all_uses_with(graph.call_function(attend_turning, (*heads, v, *angles, *rest)))
        graph.erase_node(call)
    if not calls:
        return None
    graph.eliminate_dead_code(lambda node: node.is_impure() or writes(node))
    return GraphModule(module, graph)


class _Turned(NamedTuple):
    """``x [1, H, T, D]`` that is turned by ``cos, sin [1, T, D]``."""

    x: Node
    cos: Node
    sin: Node


def _turned_heads(node: Any) -> _Turned | None:
    """What is turned on the way to ``node [T, H, D]``, which is all heads side by side."""
    row = _call_of(node, "transpose", 0, 1)
    total = row and _call_of(row, operator.getitem, 0)
    if isinstance(total, Node) and total.target == "to" and len(total.args) == 2:  # back to the type of what was turned
        total, dtype = total.args
    else:
        dtype = None
    if total is None or not _is(total, operator.add):
        return None
    straight, crossed = total.args
    if not (_is(straight, operator.mul) and _is(crossed, operator.mul)):
        return None
    (x, cos), (half, sin) = straight.args, crossed.args
    angles = _call_of(cos, "unsqueeze", 1), _call_of(sin, "unsqueeze", 1)
    if angles[0] is None or angles[1] is None or not _is_half_turn(half, x):
        return None
    shape = _shape(x)
    if len(shape) != 4 or any(_shape(angle) != (1, *shape[2:]) for angle in angles):
        return None
    if dtype is None:
        dtype = torch.promote_types(_dtype(x), torch.promote_types(*map(_dtype, angles)))
    return _Turned(x, *angles) if dtype == _dtype(x) else None


def _is_half_turn(node: Any, x: Any) -> bool:
    """Whether a node is ``cat(-x[..., h:], x[..., :h])`` of a last axis of 2 h."""
    if not _is(node, torch.cat) or node.kwargs != {"dim": -1} or len(node.args) != 1 or len(node.args[0]) != 2:
        return False
    negated, first = node.args[0]
    width = _shape(x)[-1] if _shape(x) else 0
    half = width // 2 if isinstance(width, int) else 0
    return (
        2 * half == width > 0
        and _is(negated, operator.neg)
        and _call_of(first, operator.getitem, (Ellipsis, slice(None, half, None))) is x
        and _call_of(negated.args[0], operator.getitem, (Ellipsis, slice(half, None, None))) is x
    )


def _is(node: Any, function: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target is function


def _call_of(node: Any, target: Any, *rest: Any) -> Any:
    """The first argument of a node that calls ``target`` with ``rest`` behind it; None of any other."""
    if isinstance(node, Node) and node.target == target and node.args[1:] == rest and not node.kwargs:
        return node.args[0]
    return None


def _dtype(node: Any) -> Any:
    example = _example(node)
    return None if example is None else example.dtype


def _shape(node: Any) -> tuple[Any, ...]:
    example = _example(node)
    return () if example is None else tuple(example.shape)


def _example(node: Any) -> Any:
    """A tensor as the compiler saw it; None where it has not said."""
    return node.meta.get("example_value") if isinstance(node, Node) else None
