"""Products of up to 256 rows on Hopper, in tiles: what ``product_tiles.cu`` is launched with, and in which ways."""

from __future__ import annotations

from ctypes import c_int, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.kernels.hopper import gates
from octavo.kernels.hopper.compiler import BLOCK_BYTES, Kernel, clusters, compiled, tensor_map, usable
from octavo.kernels.hopper.wgmma import multiplication

MOST_ROWS = 256

_MOST_OUTPUTS = {1: 256, 2: 256, 3: 224, 4: 160}
"""Of a tile, by groups of 64 rows: sums are held in registers."""
_ENTRY_SUMS = {3: 88, 4: 56}
"""Of so many groups a thread begins with 128 or 96 registers, which bounds the sums of one instruction."""


@dataclass(frozen=True)
class Tiling:
    """How a product is shared out: tiles of up to ``64 * groups`` rows (0: of all), each to a cluster of ``split``
    blocks, in steps of ``64 * wide`` inputs. Inputs are asked for ``ahead`` steps before they are multiplied, weights
    for ``burst`` steps together."""

    groups: int
    split: int
    wide: int
    ahead: int
    burst: int

    def __str__(self) -> str:
        rows = f"tiles of {64 * self.groups} rows" if self.groups else "tiles"
        return f"{rows} split by {self.split}, {64 * self.wide} inputs, {self.ahead} ahead, bursts of {self.burst}"


TILINGS = (
    Tiling(0, 1, 1, 4, 1),
    Tiling(0, 1, 1, 4, 2),
    Tiling(0, 1, 2, 3, 1),
    Tiling(0, 2, 1, 4, 1),
    Tiling(0, 2, 1, 6, 1),
    Tiling(0, 2, 2, 4, 1),
    Tiling(2, 2, 1, 4, 1),
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
    if not usable(device) or not 0 < rows <= MOST_ROWS or outputs % 8 or inputs % 8:
        return []
    found = []
    for tiling in TILINGS:
        if tiling.groups < -(-rows // 64):
            layout = _layout(device, rows, outputs, tiling, gate)
            if _memory(layout.groups, layout.outputs, tiling):
                found.append(tiling)
    return found


def prepare(tiling: Tiling, gate: str, x: Tensor, weight: Tensor) -> None:
    """Compile what ``run`` will launch, if nobody has."""
    layout = _layout(x.device, x.shape[:-1].numel(), len(weight), tiling, gate)
    _code(x.dtype == torch.bfloat16, layout.groups, layout.outputs, tiling, gate)


def run(tiling: Tiling, gate: str, x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """``out [..., N] = x [..., K] @ weight [N, K].T (+ residual [..., N])``; with a ``gate``, of outputs in two
    halves A and B, ``out [..., N / 2] = act(A) * B``. All contiguous and of one 16-bit type."""
    outputs, inputs = weight.shape
    x = x.view(-1, inputs)
    layout = _layout(x.device, len(x), outputs, tiling, gate)
    kernel = _kernel(x.device.index, x.dtype == torch.bfloat16, layout.groups, layout.outputs, tiling, gate)
    box = -(-len(x) // layout.tiles_of_rows)
    boxes = ((weight, layout.outputs // 2 if gate else layout.outputs), (x, box))
    maps = [tensor_map(t, (inputs, len(t)), (2 * inputs,), (64, rows)) for t, rows in boxes]
    places = [c_void_p(0 if residual is None else residual.data_ptr()), c_void_p(out.data_ptr())]
    numbers = map(c_int, (len(x), box, outputs, -(-inputs // (64 * tiling.wide))))
    kernel.launch((-(-outputs // layout.outputs) * layout.tiles_of_rows * tiling.split, 1), (*maps, *places, *numbers))


@dataclass(frozen=True)
class _Layout:
    """Tiles of ``64 * groups`` rows and so many ``outputs``."""

    groups: int
    outputs: int
    tiles_of_rows: int


@cache
def _layout(device: torch.device, rows: int, outputs: int, tiling: Tiling, gate: str) -> _Layout:
    groups = tiling.groups or -(-rows // 64)
    tiles_of_rows = -(-rows // (64 * groups))
    at_once = clusters(device, tiling.split) // tiles_of_rows
    return _Layout(groups, _tile(outputs, at_once, groups, gate), tiles_of_rows)


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
        "GATE": gates.number(gate),
        "BF16": bf16,
    }
    return compiled("product_tiles", macros, multiplication(tile // halves, bf16))
