"""What those who write a traced graph anew share: a node in place of another, and what a node is known to give."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node


def replace(node: Node, op: Any, args: tuple[Any, ...]) -> None:
    """Let an op give what ``node`` gave, which goes."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(op, args)
        made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def kind(node: Node) -> Any:
    """The dtype and shape that two nodes have in common if they give the like; of a node of which nothing is known,
    that is itself alone."""
    example = node.meta.get("example_value")
    return (example.dtype, tuple(example.shape)) if isinstance(example, Tensor) else node
