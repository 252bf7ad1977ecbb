"""How the Linear layers of a model are multiplied: those of one input as one product (Q, K and V, or gate and up, of
whatever model), and all of them by a backend's own op, where there is one to be preferred."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kernels import ops

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""As ``F.linear``."""


class JoinedLinears:
    """Sets of sibling layers that were seen to multiply one and the same tensor, and the layers that are alone.

    ::

        q.weight  [ a, K ]                  joined [ a + b + c, K ]
        k.weight  [ b, K ]      ->            q.weight, k.weight, v.weight are views of its rows
        v.weight  [ c, K ]

    The layers' weights move into one piece of memory for good, with their values as they are; the product itself is
    joined inside ``used()`` only. The first layer of a set to be called multiplies by all rows, the others take their
    part of the result. A set of few rows is latency: three small products cost nearly three times as long as one.

    Args:
        run: runs the model once, so that it can be seen who multiplies what.
        backend: whose ``ops.linear`` multiplies, inside ``used()``, for all plain Linear layers; None: torch does.
    """

    def __init__(self, model: nn.Module, run: Callable[[], object], backend: str | None = None) -> None:
        siblings = _siblings(model, run)
        joined = {layer for layers in siblings for layer in layers}
        product = F.linear if backend is None else _product_by(backend)
        self._sets = [_Joined(layers, product) for layers in siblings]
        self._lent: list[_Joined | _Alone] = list(self._sets)
        if backend is not None:
            others = (layer for layer in model.modules() if _plain(layer) and layer not in joined)
            self._lent += [_Alone(layer, product) for layer in others]

    def __len__(self) -> int:
        return len(self._sets)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the layers of each set multiply together, and all by the backend's op."""
        try:
            for layers in self._lent:
                layers.lend()
            yield
        finally:
            for layers in self._lent:
                layers.take_back()


def _product_by(backend: str) -> Product:
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = ops.linear(x, weight, bias, backend)
        return result

    return product


class _Alone:
    """A layer that is in no set."""

    def __init__(self, layer: nn.Module, product: Product) -> None:
        def forward(layer: nn.Linear, x: Tensor) -> Tensor:
            return product(x, layer.weight, layer.bias)

        self._layer = layer
        self._forward = forward

    def lend(self) -> None:
        self._layer.forward = MethodType(self._forward, self._layer)

    def take_back(self) -> None:
        self._layer.__dict__.pop("forward", None)


class _Joined:
    """One set. Between calls of the model it holds no input, so that compiled code always finds it alike."""

    def __init__(self, layers: list[nn.Linear], product: Product) -> None:
        self._layers = layers
        self._product = product
        self._weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._bounds = [0]
        for layer in layers:
            self._bounds.append(self._bounds[-1] + layer.out_features)
            layer.weight.data = self._weight[self._bounds[-2] : self._bounds[-1]]
        self._input: Tensor | None = None
        self._output: Tensor | None = None

    def lend(self) -> None:
        self._input = self._output = None
        for number, layer in enumerate(self._layers):
            layer.forward = self._part(number)  # type: ignore[method-assign, assignment]

    def take_back(self) -> None:
        self._input = self._output = None
        for layer in self._layers:
            layer.__dict__.pop("forward", None)

    def _part(self, number: int) -> Callable[[Tensor], Tensor]:
        first, last = self._bounds[number], self._bounds[number + 1]
        ends = number == len(self._layers) - 1

        def forward(x: Tensor) -> Tensor:
            if self._input is not x or self._output is None:
                self._input, self._output = x, self._product(x, self._weight, self._bias)
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
    called = [layer for _, layer in calls]
    sets: dict[tuple[object, ...], list[nn.Linear]] = {}
    for x, layer in calls:
        if called.count(layer) == 1:
            key = id(x), parent[layer], layer.weight.dtype, layer.weight.device, layer.bias is None
            sets.setdefault(key, []).append(layer)
    return [layers for layers in sets.values() if len(layers) > 1]


def _joinable(layer: nn.Module) -> bool:
    """A plain layer that nobody watches, with a weight that may move."""
    return (
        _plain(layer) and not layer._forward_hooks and not layer._forward_pre_hooks and not layer.weight.is_inference()
    )


def _plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """A Linear layer as torch made it: no subclass, nobody's own forward."""
    return type(layer) is nn.Linear and "forward" not in layer.__dict__
