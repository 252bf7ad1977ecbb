"""Products of many rows on Hopper, in waves of tiles: what ``product_waves.cu`` is launched with."""

from __future__ import annotations

from ctypes import c_int, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.kernels.hopper import gates
from octavo.kernels.hopper.compiler import BLOCK_BYTES, Kernel, clusters, compiled, tensor_map, usable
from octavo.kernels.hopper.wgmma import multiplication

LEAST_ROWS = 129
"""Fewer are one box, and a cluster takes two."""

_TOKENS = 128  # of a block's tile
_MOST_OUTPUTS = 256
_BAND = 8  # pairs of boxes
_MOST_STAGES = 8
_THREADS = 384
_BEGINNING = 16  # outputs that a tile could have in the time which it takes to begin one and to write it


def serves(device: torch.device, rows: int, outputs: int, inputs: int, gate: str = "") -> bool:
    """Whether ``run`` multiplies ``rows`` rows on a device."""
    whole = outputs % (16 if gate else 8) == inputs % 8 == 0 and min(outputs, inputs) > 0
    return rows >= LEAST_ROWS and whole and usable(device)


def prepare(gate: str, x: Tensor, weight: Tensor) -> None:
    """Compile what ``run`` will launch, if nobody has."""
    layout = _layout(x.device, x.shape[:-1].numel(), len(weight), gate)
    _code(x.dtype == torch.bfloat16, layout.outputs, gate)


def run(gate: str, x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """``out [..., N] = x [..., K] @ weight [N, K].T (+ residual [..., N])``; with a ``gate``, of outputs in two
    halves A and B, ``out [..., N / 2] = act(A) * B``. All contiguous and of one 16-bit type."""
    outputs, inputs = weight.shape
    x = x.view(-1, inputs)
    layout = _layout(x.device, len(x), outputs, gate)
    kernel = _kernel(x.device.index, x.dtype == torch.bfloat16, layout.outputs, gate)
    halves = 2 if gate else 1
    width = outputs // halves
    # Eight outputs at a time, of both halves in turn: [width / 8][halves][8][inputs].
    sizes, strides = (inputs, 8, halves, width // 8), (2 * inputs, 2 * inputs * width, 16 * inputs)
    weights = tensor_map(weight, sizes, strides, (64, 8, halves, layout.outputs // (16 * halves)))
    tokens = tensor_map(x, (inputs, len(x)), (2 * inputs,), (64, layout.box))
    places = [c_void_p(0 if residual is None else residual.data_ptr()), c_void_p(out.data_ptr())]
    numbers = map(c_int, (len(x), layout.box, width, -(-inputs // 64)))
    kernel.launch((2 * layout.clusters, 1), (weights, tokens, *places, *numbers))


@dataclass(frozen=True)
class _Layout:
    """Tiles of so many ``outputs`` and twice a ``box`` of rows, by so many ``clusters`` at a time."""

    outputs: int
    box: int
    clusters: int


@cache
def _layout(device: torch.device, rows: int, outputs: int, gate: str) -> _Layout:
    at_once, grain = clusters(device, 2), 32 if gate else 16
    pairs = -(-rows // (2 * _TOKENS))

    def tiles(of: int) -> int:
        return pairs * -(-outputs // of)

    def seconds(of: int) -> int:  # of some unit
        return -(-tiles(of) // at_once) * (of + _BEGINNING)

    best = min(range(_MOST_OUTPUTS, 0, -grain), key=seconds)
    return _Layout(best, -(-rows // (2 * pairs)), min(at_once, tiles(best)))


def _written_bytes(outputs: int, gate: str) -> int:
    """Of tiles on their way out."""
    given = outputs // 2 if gate else outputs
    return _TOKENS * (2 * given // -(-given // 128) + 16)


def _stages(outputs: int, gate: str) -> int:
    return min(_MOST_STAGES, (BLOCK_BYTES - _written_bytes(outputs, gate)) // _stage_bytes(outputs))


def _stage_bytes(outputs: int) -> int:
    return 128 * (_TOKENS + outputs) + 16


@cache
def _kernel(device: int, bf16: bool, outputs: int, gate: str) -> Kernel:
    shared_bytes = _stages(outputs, gate) * _stage_bytes(outputs) + _written_bytes(outputs, gate)
    with torch.cuda.device(device):
        return Kernel("product_waves", _code(bf16, outputs, gate), _THREADS, shared_bytes, 2)


def _code(bf16: bool, outputs: int, gate: str) -> bytes:
    macros = {
        "OUTPUTS": outputs,
        "STAGES": _stages(outputs, gate),
        "BAND": _BAND,
        "GATE": gates.number(gate),
        "BF16": bf16,
    }
    return compiled("product_waves", macros, multiplication(outputs, bf16))
