"""A model's Linear layers on a CPU, with weights in the layout that they are multiplied fastest in.

torch lays an ordinary weight out anew on every call. Where the processor has AVX512-BF16 and there is a C compiler,
bf16 weights are laid out for ``linear.c``; its sums are rounded once, as torch's are, and go in another order. All
others are laid out for oneDNN: 1.3 to 1.8 times as fast in bf16 at up to 32 rows, with the same bits, and twice as fast
in fp32, with another rounding. The copies take as much memory as the weights.

torch's compiler takes oneDNN's layout only as constants, and one compiled layer serves all layers of a model, so it
holds no weight. It calls the op ``octavo::packed_linear``, which is given a layer's weight as it is and finds the
packed one in what ``PackedLinears.used`` has laid out. The layout of ``linear.c`` is a tensor as any other.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter, contains, is_
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from octavo.kernels.cpu import blocks

PACKED_DTYPES = (torch.bfloat16, torch.float32)
MEMORY_SHARE = 0.25
"""Packed copies that would take more than this share of the free memory are not made."""

Place = tuple[int, torch.Size, tuple[int, ...]]
"""A weight's address, shape and strides: what is tied may be a part of another weight, or lie across it."""

_serving: dict[Place, Tensor] = {}
"""By the place of a weight, what oneDNN multiplies by: of the model whose forward pass is running."""


class PackedLinears:
    """The plain ``nn.Linear`` layers of a model on a CPU; none where oneDNN is missing or memory is short.

    ``packings`` counts how often it has been found out what they multiply by.

    The model is not changed: the layers use their packed weights inside ``used()`` only. A weight that has been
    replaced or written to since is packed again, as far as torch can tell: a write through ``weight.data`` leaves no
    trace.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for layer in model.modules() if _packable(layer)]
        size = sum(layer.weight.nbytes for layer in layers)
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        wanted = platform.machine() == "x86_64" and torch.backends.mkldnn.is_available() and size <= MEMORY_SHARE * free
        self._layers = layers if wanted else []
        self._packed: dict[nn.Linear, _Packed] = {}
        self._serving: dict[nn.Linear, _Packed] = {}
        self._by_place: dict[Place, Tensor] = {}
        self._dicts = [layer.__dict__ for layer in self._layers]
        self._seen: list[object] = []
        self._inside = _Inside([])
        self.packings = 0

    @contextmanager
    def used(self, only: Iterable[nn.Linear] | None = None) -> Iterator[None]:
        """Let the layers multiply by their packed weights, or ``only`` those of them: the others do within ``lent``.
        Those that have become something else are left alone."""
        if not _are(self._outside(), self._seen) or self._inside.have_changed():
            self._lay_out()
        _serving.update(self._by_place)
        try:
            with self.lent(self._layers if only is None else only):
                yield
        finally:
            _serving.clear()

    @contextmanager
    def lent(self, layers: Iterable[nn.Linear]) -> Iterator[None]:
        """Within ``used``: some more of the layers do. To put up all of a model takes as long as half of its layers'
        Python, so those that nobody is going to call are left out."""
        serving = [self._serving[layer] for layer in layers if layer in self._serving]
        try:
            for packed in serving:
                packed.own |= packed.lends
            yield
        finally:
            for packed in serving:
                for name in packed.lends:
                    packed.own.pop(name, None)

    def _lay_out(self) -> None:
        """Find out what each layer multiplies by, and note what shows that this has changed."""
        self._seen = []  # whatever happens, until all is laid out
        self._serving = {}
        for layer in filter(_packable, self._layers):
            packed = self._packed.get(layer)
            if packed is None or not packed.is_up_to_date():
                packed = self._packed[layer] = _Packed(layer)
            self._serving[layer] = packed
        self._by_place = {packed.place: packed.weight for packed in self._serving.values() if not packed.in_blocks}
        self._inside = _Inside([tensor for packed in self._serving.values() for tensor in packed.inside.tensors])
        self._seen = self._outside()  # which keeps the parameters, so that none comes in their place
        self.packings += 1

    def _outside(self) -> list[object]:
        """What the layers are, without a look at their parameters, which may be anything. A step asks it of hundreds of
        layers, so it goes past ``nn.Module.__getattr__``, which is slow."""
        parameters = map(dict.__getitem__, self._dicts, repeat("_parameters"))
        forwards = map(contains, self._dicts, repeat("forward"))
        return [*map(type, self._layers), *forwards, *chain.from_iterable(map(dict.values, parameters))]


def linear_layers(module: nn.Module) -> list[nn.Linear]:
    """A module's Linear layers."""
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


class _Packed:
    """What one layer multiplies by, and what it was made from: its parameters, where their data lay, their versions."""

    def __init__(self, layer: nn.Linear) -> None:
        weight, bias = layer.weight, layer.bias
        self.inside = _Inside([weight] if bias is None else [weight, bias])
        self.place = _place(weight)
        self.in_blocks = blocks.serves(weight)
        if self.in_blocks:
            self.weight = blocks.pack(weight.detach(), None if bias is None else bias.detach())
            self.lends = {"forward": MethodType(_multiply_blocks, layer), BLOCKS: self.weight}
        else:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
            self.lends = {"forward": MethodType(_forward, layer)}
        self.own = layer.__dict__

    def is_up_to_date(self) -> bool:
        layer = self.lends["forward"].__self__
        now = [tensor for tensor in (layer.weight, layer.bias) if tensor is not None]
        return _are(now, self.inside.tensors) and not self.inside.have_changed()


class _Inside:
    """Some parameters, where their data lie, and their versions; those of inference mode have none."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._versioned = [tensor for tensor in tensors if not tensor.is_inference()]
        self._states = self._now()

    def have_changed(self) -> bool:
        return self._now() != self._states

    def _now(self) -> list[object]:
        return [*map(Tensor.data_ptr, self.tensors), *map(attrgetter("_version"), self._versioned)]


def _are(some: list[Any], others: list[Any]) -> bool:
    """Whether they are the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


BLOCKS = "_octavo_blocks"
"""The attribute of a layer that holds its weight in blocks while it is used."""


def _place(weight: Tensor) -> Place:
    return weight.data_ptr(), weight.shape, weight.stride()


def _packable(layer: nn.Module) -> bool:
    """A Linear layer as torch made it: no subclass, nobody has put a forward of his own on it, and its weight and bias
    are parameters, not what a hook makes of others before each call, as pruning does."""
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and layer._parameters.get("weight") is not None
        and "bias" in layer._parameters
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype in PACKED_DTYPES
    )


def _multiply_blocks(layer: nn.Linear, x: Tensor) -> Tensor:
    return blocks.multiply(x.contiguous(), layer._octavo_blocks, layer.out_features)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.octavo.packed_linear(x, layer.weight, layer.bias)  # type: ignore[no-any-return]
    return _multiply(x, layer.weight, layer.bias)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    packed = _serving[_place(weight)]
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


_library: Any = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", _multiply, "CPU")
torch.library.register_fake(
    "octavo::packed_linear", lambda x, weight, _: x.new_empty((*x.shape[:-1], weight.shape[0])), lib=_library
)
