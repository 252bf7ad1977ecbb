"""Products of some dozens to 256 rows on Hopper: what ``product_tiles.cu`` is launched with, and in which ways."""

from __future__ import annotations

from ctypes import c_int, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.kernels.hopper.compiler import BLOCK_BYTES, Kernel, clusters, compiled, tensor_map, usable
from octavo.kernels.hopper.wgmma import multiplication

LEAST_ROWS = 33
"""Of fewer, streams of weights (``product.py``) are faster, as most of 64 rows would be padding."""
MOST_ROWS = 256

GATES = ("silu", "gelu_tanh")
"""Activations, by the numbers that the kernel gives them, from 1 on."""

_MOST_OUTPUTS = {1: 256, 2: 256, 3: 224, 4: 160}
"""Of a tile, by groups of 64 rows: sums are held in registers."""
_ENTRY_SUMS = {3: 88, 4: 56}
"""Of so many groups a thread begins with 128 or 96 registers, which bounds the sums of one instruction."""


@dataclass(frozen=True)
class Tiling:
    """How a product is shared out: each tile to a cluster of ``split`` blocks, in steps of ``64 * wide`` inputs. Inputs
    are asked for ``ahead`` steps before they are multiplied, weights for ``burst`` steps together."""

    split: int
    wide: int
    ahead: int
    burst: int

    def __str__(self) -> str:
        return f"tiles split by {self.split}, {64 * self.wide} inputs, {self.ahead} ahead, bursts of {self.burst}"


TILINGS = (
    Tiling(1, 1, 4, 1),
    Tiling(1, 1, 4, 2),
    Tiling(1, 1, 3, 1),
    Tiling(2, 1, 6, 1),
    Tiling(2, 1, 4, 1),
    Tiling(2, 2, 4, 1),
)
"""Those that were among the fastest for some shape of an 8B model on an H200 (docs/kernels/product.md)."""


@dataclass(frozen=True)
class _Memory:
    """Of a block: stages of weights, bytes of both rings or of the sums that lie there at the end, bytes of all."""

    stages: int
    room: int
    shared: int


def tilings(device: torch.device, rows: int, outputs: int, inputs: int, gate: str = "") -> list[Tiling]:
    """Ways of multiplying ``rows`` rows on a device; none where the kernel does not serve."""
    if not usable(device) or not LEAST_ROWS <= rows <= MOST_ROWS or outputs % 8 or inputs % 8:
        return []
    groups = _groups(rows)
    return [
        tiling for tiling in TILINGS if _memory(groups, _tile(outputs, _at_once(device, tiling), groups, gate), tiling)
    ]


def prepare(tiling: Tiling, gate: str, x: Tensor, weight: Tensor) -> None:
    """Compile what ``run`` will launch, if nobody has."""
    groups = _groups(x.shape[:-1].numel())
    _code(x.dtype == torch.bfloat16, groups, _tile(len(weight), _at_once(x.device, tiling), groups, gate), tiling, gate)


def run(tiling: Tiling, gate: str, x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """``out [..., N] = x [..., K] @ weight [N, K].T (+ residual [..., N])``; with a ``gate``, of outputs in two
    halves A and B, ``out [..., N / 2] = act(A) * B``. All contiguous and of one 16-bit type."""
    outputs, inputs = weight.shape
    x = x.view(-1, inputs)
    groups = _groups(len(x))
    tile = _tile(outputs, _at_once(x.device, tiling), groups, gate)
    kernel = _kernel(x.device.index, x.dtype == torch.bfloat16, groups, tile, tiling, gate)
    boxes = ((weight, tile // 2 if gate else tile), (x, 64 * groups))
    maps = [tensor_map(t, (inputs, len(t)), (2 * inputs,), (64, box)) for t, box in boxes]
    places = [c_void_p(0 if residual is None else residual.data_ptr()), c_void_p(out.data_ptr())]
    numbers = map(c_int, (len(x), outputs, -(-inputs // (64 * tiling.wide))))
    kernel.launch((-(-outputs // tile) * tiling.split, 1), (*maps, *places, *numbers))


def _groups(rows: int) -> int:
    return -(-rows // 64)


def _at_once(device: torch.device, tiling: Tiling) -> int:
    return clusters(device, tiling.split)


def _halves(tile: int, groups: int) -> int:
    """Instructions that the outputs of a tile take."""
    return 2 if tile // 2 > _ENTRY_SUMS.get(groups, 128) else 1


def _tile(outputs: int, at_once: int, groups: int, gate: str) -> int:
    """Outputs of a tile: as many as let ``at_once`` tiles take all of them, or the fewest waves of so many."""
    grain = 16 if gate or groups in _ENTRY_SUMS else 8  # two parts of whole 8 rows
    waves = 1
    while (tile := -(-outputs // (at_once * waves * grain)) * grain) > _MOST_OUTPUTS[groups]:
        waves += 1
    return tile


def _memory(groups: int, tile: int, tiling: Tiling) -> _Memory | None:
    """None where rings do not fit: of weights there must be as many stages as of inputs, and a burst."""
    weights, inputs = 128 * tile * tiling.wide, 128 * 64 * groups * tiling.wide
    barriers = 8 * (2 * tiling.ahead + 2)
    stages = (BLOCK_BYTES - barriers - tiling.ahead * inputs) // (weights + 8)
    pitch = (tile + 23) // 32 * 32 + 8
    sums = 4 * 64 * groups * pitch
    if tiling.split > 1:
        sums += sums * (tiling.split - 1) // tiling.split
    room = max(stages * weights + tiling.ahead * inputs, sums)
    shared = room + 8 * stages + barriers
    if stages < tiling.ahead + tiling.burst - 1 or shared > BLOCK_BYTES:
        return None
    return _Memory(stages, room, shared)


@cache
def _kernel(device: int, bf16: bool, groups: int, tile: int, tiling: Tiling, gate: str) -> Kernel:
    memory = _memory(groups, tile, tiling)
    assert memory is not None, "tilings() offers none that does not fit"
    threads = 128 * groups + (128 if groups > 2 else 32)
    with torch.cuda.device(device):
        return Kernel("product_tiles", _code(bf16, groups, tile, tiling, gate), threads, memory.shared, tiling.split)


def _code(bf16: bool, groups: int, tile: int, tiling: Tiling, gate: str) -> bytes:
    memory, halves = _memory(groups, tile, tiling), _halves(tile, groups)
    assert memory is not None, "tilings() offers none that does not fit"
    macros = {
        "GROUPS": groups,
        "OUTPUTS": tile,
        "WIDE": tiling.wide,
        "W_STAGES": memory.stages,
        "X_STAGES": tiling.ahead,
        "BURST": tiling.burst,
        "SPLIT": tiling.split,
        "HALVES": halves,
        "ROOM": memory.room,
        "GATE": 1 + GATES.index(gate) if gate else 0,
        "BF16": bf16,
    }
    return compiled("product_tiles", macros, multiplication(tile // halves, bf16))
