"""A model's Linear layers on a CPU, with weights in the layout that oneDNN multiplies fastest.

torch lays an ordinary weight out anew on every call; a packed one saves that: 1.3 to 1.8 times as fast in bf16 at up to
32 rows, with the same bits, and twice as fast in fp32, with another rounding. The packed copies take as much memory as
the weights.

torch's compiler takes packed weights only as constants, and one compiled layer serves all layers of a model, so it
holds no weight. It calls the op ``octavo::packed_linear``, which is given a layer's weight as it is and finds the
packed one in what ``PackedLinears.used`` has laid out.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from octavo.kernels.lending import lent

PACKED_DTYPES = (torch.bfloat16, torch.float32)
MEMORY_SHARE = 0.25
"""Packed copies that would take more than this share of the free memory are not made."""

_serving: dict[int, Tensor] = {}
"""By the address of a weight, its packed copy: of the model whose forward pass is running."""


class PackedLinears:
    """The plain ``nn.Linear`` layers of a model on a CPU; none where oneDNN is missing or memory is short.

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
        self._packed: dict[nn.Linear, tuple[Identity, Tensor]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the layers multiply by their packed weights. Those that have become something else are left alone."""
        try:
            with lent((layer, MethodType(_forward, layer)) for layer in self._layers if self._lay_out(layer)):
                yield
        finally:
            _serving.clear()

    def _lay_out(self, layer: nn.Linear) -> bool:
        """Have a layer's packed weight ready to serve; False if it has become something else."""
        if not _packable(layer):
            return False
        packed = self._packed.get(layer)
        if packed is None or not _same(packed[0], layer.weight):
            weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
            packed = self._packed[layer] = _identity(layer.weight), weight
        _serving[layer.weight.data_ptr()] = packed[1]
        return True


Identity = tuple[Tensor, int, int]
"""A weight as it was packed: the parameter itself, where its data lay, and its version."""


def _identity(weight: Tensor) -> Identity:
    return weight, weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _same(known: Identity, weight: Tensor) -> bool:
    return known[0] is weight and known[1:] == _identity(weight)[1:]


def _packable(layer: nn.Module) -> bool:
    """A Linear layer as torch made it: no subclass, and nobody has put a forward of his own on it."""
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype in PACKED_DTYPES
    )


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.octavo.packed_linear(x, layer.weight, layer.bias)  # type: ignore[no-any-return]
    return _multiply(x, layer.weight, layer.bias)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    packed = _serving[weight.data_ptr()]
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


_library: Any = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", _multiply, "CPU")
torch.library.register_fake(
    "octavo::packed_linear", lambda x, weight, _: x.new_empty((*x.shape[:-1], weight.shape[0])), lib=_library
)
