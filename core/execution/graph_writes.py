"""Which nodes of a traced graph write to tensors in place: they stand where they do for a reason that no edge shows.

Who writes a graph anew (``layer_products.py``, ``block_products.py``, ``turning.py``) must not read a tensor behind
such a node that was read in front of it, nor take one whose result nobody uses for dead code.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

_ARITHMETIC = (
    "add",
    "and",
    "floordiv",
    "lshift",
    "matmul",
    "mod",
    "mul",
    "or",
    "pow",
    "rshift",
    "sub",
    "truediv",
    "xor",
)
_WRITING = {operator.setitem, *(getattr(operator, f"i{name}") for name in _ARITHMETIC)}


def writes(node: Node) -> bool:
    """By the name of what it calls: torch's end in "_", or are told to by ``out`` or ``inplace``."""
    if node.op not in ("call_function", "call_method"):
        return False
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or target in _WRITING or node.kwargs.get("out") is not None or bool(node.kwargs.get("inplace"))


def written_between(first: Node, last: Node) -> bool:
    """Whether anything is written behind ``first`` and in front of ``last``, which stands behind it."""
    node = first.next
    while node is not last:
        if writes(node):
            return True
        node = node.next
    return False
