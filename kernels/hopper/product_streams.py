"""Products of few rows on Hopper as streams of weights: what ``product_streams.cu`` is launched with, in which ways."""

from __future__ import annotations

from ctypes import c_int, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.kernels.hopper.compiler import SHARED_BYTES, Kernel, compiled, tensor_map, usable
from octavo.kernels.hopper.wgmma import multiplication

MOST_ROWS = 64
MOST_STAGES = 20  # more than fit
LEAST_STAGES = 3
"""Fewer cannot keep the memory busy."""

_TOKENS = (8, 16, 24, 32, 48, 64)
_OUTPUTS = 64  # that a cluster takes at a time
_THREADS = 160


@dataclass(frozen=True)
class Way:
    """How a product is shared out: 64 outputs at a time to a cluster of ``split`` blocks, in steps of ``64 * wide``
    inputs, with ``blocks`` of them on a multiprocessor."""

    wide: int
    split: int
    blocks: int

    def __str__(self) -> str:
        return f"streams split by {self.split}, {64 * self.wide} inputs, {self.blocks} blocks"


WAYS = (
    Way(4, 2, 1),
    Way(2, 2, 1),
    Way(2, 1, 2),
)
"""Those that were among the fastest for some shape of an 8B model on an H200 (docs/kernels/product.md)."""


def ways(device: torch.device, rows: int, outputs: int, inputs: int) -> list[Way]:
    """Ways of multiplying ``rows`` rows on a device; none where the kernel does not serve."""
    if not usable(device) or rows > MOST_ROWS or outputs % 8 or inputs % 8:
        return []
    return [way for way in WAYS if _stages(_padded(rows), way) >= LEAST_STAGES]


def prepare(way: Way, x: Tensor, weight: Tensor) -> None:
    """Compile what ``run`` will launch, if nobody has."""
    _code(x.dtype == torch.bfloat16, _padded(x.shape[:-1].numel()), way)


def run(way: Way, x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """``out [..., N] = x [..., K] @ weight [N, K].T (+ residual [..., N])``, all contiguous and of one 16-bit type."""
    outputs, inputs = weight.shape
    x = x.view(-1, inputs)
    tokens = _padded(len(x))
    kernel, most = _kernel(x.device.index, x.dtype == torch.bfloat16, tokens, way)
    shares = -(-outputs // _OUTPUTS)
    maps = [tensor_map(t, (inputs, len(t)), (2 * inputs,), (64, box)) for t, box in ((weight, _OUTPUTS), (x, len(x)))]
    places = [c_void_p(0 if residual is None else residual.data_ptr()), c_void_p(out.data_ptr())]
    numbers = map(c_int, (len(x), outputs, -(-inputs // (64 * way.wide)), shares))
    kernel.launch((min(shares, most) * way.split, 1), (*maps, *places, *numbers))


def _padded(rows: int) -> int:
    return next(tokens for tokens in _TOKENS if rows <= tokens)


def _shared_bytes(tokens: int, way: Way, stages: int) -> int:
    stage = 128 * way.wide * (_OUTPUTS + tokens)
    part = 4 * tokens * (_OUTPUTS // way.split + 4)  # sums that a block joins
    return stages * (stage + 16) + (2 * way.split - 1) * part + 16


def _stages(tokens: int, way: Way) -> int:
    room = SHARED_BYTES // way.blocks - 1024
    return max((n for n in range(1, MOST_STAGES + 1) if _shared_bytes(tokens, way, n) <= room), default=0)


@cache
def _kernel(device: int, bf16: bool, tokens: int, way: Way) -> tuple[Kernel, int]:
    """The kernel, and the clusters of it that run at a time."""
    shared_bytes = _shared_bytes(tokens, way, _stages(tokens, way))
    with torch.cuda.device(device):
        kernel = Kernel("product_streams", _code(bf16, tokens, way), _THREADS, shared_bytes, way.split)
        return kernel, kernel.most_clusters


def _code(bf16: bool, tokens: int, way: Way) -> bytes:
    macros = {
        "TOKENS": tokens,
        "WIDE": way.wide,
        "STAGES": _stages(tokens, way),
        "SPLIT": way.split,
        "BF16": bf16,
    }
    return compiled("product_streams", macros, multiplication(tokens, bf16))
