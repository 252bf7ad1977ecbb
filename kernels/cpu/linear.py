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
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from octavo.kernels.cpu import blocks
from octavo.kernels.lending import lent

PACKED_DTYPES = (torch.bfloat16, torch.float32)
MEMORY_SHARE = 0.25
"""Packed copies that would take more than this share of the free memory are not made."""

_serving: dict[int, Tensor] = {}
"""By the address of a weight, what oneDNN multiplies by: of the model whose forward pass is running."""


class PackedLinears:
    """The plain ``nn.Linear`` layers of a model on a CPU; none where oneDNN is missing or memory is short.

    ``packings`` counts how often a weight has been laid out.

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
        self.packings = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the layers multiply by their packed weights. Those that have become something else are left alone."""
        serving = [packed for packed in map(self._lay_out, self._layers) if packed is not None]
        try:
            for packed in serving:
                packed.serve()
            with lent([packed.lends for packed in serving]):
                yield
        finally:
            for packed in serving:
                packed.layer.__dict__.pop(BLOCKS, None)
            _serving.clear()

    def _lay_out(self, layer: nn.Linear) -> _Packed | None:
        """What a layer multiplies by; None if it has become something else."""
        packed = self._packed.get(layer)
        if packed is None or not packed.is_up_to_date():
            if not _packable(layer):
                return None
            packed = self._packed[layer] = _Packed(layer)
            self.packings += 1
        return packed


class _Packed:
    """What one layer multiplies by, and what it was made from: its parameters, where their data lay, their versions."""

    def __init__(self, layer: nn.Linear) -> None:
        weight, bias = layer.weight, layer.bias
        self.layer = layer
        self._made_from = weight, bias
        self._address, self._version = weight.data_ptr(), _version(weight)
        self._bias_version = None if bias is None else _version(bias)
        self._in_blocks = blocks.serves(weight)
        if self._in_blocks:
            self._weight = blocks.pack(weight.detach(), None if bias is None else bias.detach())
        else:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.lends = layer, MethodType(_multiply_blocks if self._in_blocks else _forward, layer)

    def is_up_to_date(self) -> bool:
        """Asked of hundreds of layers every step, so it goes past ``nn.Module.__getattr__``, which is slow."""
        layer = self.layer
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        return (
            weight is self._made_from[0]
            and bias is self._made_from[1]
            and weight.data_ptr() == self._address
            and _version(weight) == self._version
            and (bias is None or _version(bias) == self._bias_version)
            and type(layer) is nn.Linear
            and "forward" not in layer.__dict__
        )

    def serve(self) -> None:
        if self._in_blocks:
            self.layer.__dict__[BLOCKS] = self._weight
        else:
            _serving[self._address] = self._weight


BLOCKS = "_octavo_blocks"
"""The attribute of a layer that holds its weight in blocks while it is used."""


def _version(parameter: Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version


def _packable(layer: nn.Module) -> bool:
    """A Linear layer as torch made it: no subclass, and nobody has put a forward of his own on it."""
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
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
    packed = _serving[weight.data_ptr()]
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


_library: Any = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", _multiply, "CPU")
torch.library.register_fake(
    "octavo::packed_linear", lambda x, weight, _: x.new_empty((*x.shape[:-1], weight.shape[0])), lib=_library
)
