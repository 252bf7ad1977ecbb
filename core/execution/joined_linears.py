"""Linear layers that multiply the same input, as one product: Q, K and V, or gate and up, of whatever model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kernels.lending import lent


class JoinedLinears:
    """Sets of sibling layers that were seen to multiply one and the same tensor.

    ::

        q.weight  [ a, K ]                  joined [ a + b + c, K ]
        k.weight  [ b, K ]      ->            q.weight, k.weight, v.weight are views of its rows
        v.weight  [ c, K ]

    The layers' weights move into one piece of memory for good, with their values as they are; the product itself is
    joined inside ``used()`` only. The first layer of a set to be called multiplies by all rows, the others take their
    part of the result. A set of few rows is latency: three small products cost nearly three times as long as one.

    Args:
        run: runs the model once, so that it can be seen who multiplies what.
    """

    packings = 0
    """The joined weights are the layers' own for good."""

    def __init__(self, model: nn.Module, run: Callable[[], object]) -> None:
        self._sets = [_Joined(layers) for layers in _siblings(model, run)]

    def __len__(self) -> int:
        return len(self._sets)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the layers of each set multiply together."""
        try:
            with lent(forward for joined in self._sets for forward in joined.forwards):
                yield
        finally:
            for joined in self._sets:
                joined.let_go()


class _Joined:
    """One set. Between calls of the model it holds no input, so that compiled code always finds it alike."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._bounds = [0]
        for layer in layers:
            self._bounds.append(self._bounds[-1] + layer.out_features)
            layer.weight.data = self._weight[self._bounds[-2] : self._bounds[-1]]
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self.forwards = [(layer, self._part(number)) for number, layer in enumerate(layers)]

    def let_go(self) -> None:
        """Hold no input: a pass may have ended in the middle of the set."""
        self._input = self._output = None

    def _part(self, number: int) -> Callable[[Tensor], Tensor]:
        first, last = self._bounds[number], self._bounds[number + 1]
        ends = last == self._bounds[-1]

        def forward(x: Tensor) -> Tensor:
            if self._input is not x or self._output is None:
                self._input, self._output = x, F.linear(x, self._weight, self._bias)
            part = self._output[..., first:last]
            if ends:
                self._input = self._output = None
            return part

        return forward


def _siblings(model: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """Plain Linear layers of one parent that were given the same tensor, in the order of their calls."""
    calls: list[tuple[Tensor, nn.Linear]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: calls.append((args[0], layer)))
        for layer in model.modules()
        if _joinable(layer)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    parent = {child: module for module in model.modules() for child in module.children()}
    called = Counter(layer for _, layer in calls)
    sets: dict[tuple[object, ...], list[nn.Linear]] = {}
    for x, layer in calls:
        if called[layer] == 1:
            key = id(x), parent[layer], layer.weight.dtype, layer.weight.device, layer.bias is None
            sets.setdefault(key, []).append(layer)
    return [layers for layers in sets.values() if len(layers) > 1]


def _joinable(layer: nn.Module) -> bool:
    """A Linear layer as torch made it: no subclass, no hook, nobody's own forward, a weight that may move."""
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        and not layer.weight.is_inference()
    )
