"""Races of group decode: n sequences that share the head of their tables, each with tokens of its own.

The floor counts the shared tokens once. "octavo ungrouped" is K1 on the same tables: it asks for the shared units once
a sequence, and the L2 serves what it still holds of them, so it is faster than n times the bytes over the read rate as
long as a layer's shared K and V (4 KB a token) are smaller than the L2. Pages lie in random order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.layout import pack_entries, pool_shape
from octavo.scripts.kernel_races import rivals
from octavo.scripts.kernel_races.checking import relative_error
from octavo.scripts.kernel_races.race import Field, Race, Target, Times

K = 1024
UNIT = 16
COLD_BYTES = 500e6
"""K and V that the calls of a round read at least, over all layers: far more than an L2 holds."""
TOLERANCE = 8e-3
"""Relative error in norm: in bf16 the probabilities are rounded before they meet the values."""


@dataclass(frozen=True)
class Shape:
    """``sequences`` that share their first ``shared`` tokens and have ``own`` more each; bf16 heads of a layer."""

    sequences: int
    shared: int
    own: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        """K and V of a layer, what is shared counted once."""
        return (self.shared + self.sequences * self.own) * 2 * self.kv_heads * self.head_dim * 2

    @property
    def flops(self) -> int:
        """Of both products, for each sequence over all it sees."""
        return 4 * self.sequences * self.heads * self.head_dim * (self.shared + self.own)


SHAPES = {(16, 8 * K, 512): 3, (32, 16 * K, 512): 8, (64, 32 * K, 256): 12}
"""(sequences, shared, own): how many times as fast as K1 it should be."""


def races() -> list[Race]:
    return [_race(Shape(*shape), times) for shape, times in SHAPES.items()]


def _race(shape: Shape, faster: int) -> Race:
    def reached(times: Times) -> bool:
        return times.us["octavo ungrouped"] >= faster * times.us["octavo"]

    name = f"{shape.sequences} x {shape.shared // K}k shared, {shape.own} own"
    target = Target(f"at least {faster} times as fast as own K1", reached)
    return Race("K5 shared", name, shape.kv_bytes, shape.flops, partial(_build, shape), target)


def _build(shape: Shape, device: torch.device) -> Field:
    batch = Batch(shape, device)
    contenders: dict[str, list[Callable[[], object]]] = {
        "octavo": [partial(batch.attend, layer, "triton") for layer in range(batch.layers)],
        "octavo ungrouped": [partial(batch.attend_alone, layer) for layer in range(batch.layers)],
    }
    if rivals.installed("flashinfer"):
        args = (batch.q, batch.pool, batch.table, batch.lengths, batch.shape.shared, batch.scale)
        contenders["flashinfer"] = rivals.lazily(partial(rivals.flashinfer_cascade, *args), batch.layers)
    return Field(contenders, batch.error, TOLERANCE)


class Batch:
    """The tensors of a shape, in as many layers as make them cold; on a CPU fp32 and small."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        dtype = torch.bfloat16
        if device.type == "cpu":  # Triton's interpreter, where a race checks its own code and nothing else
            dtype = torch.float32
            shape = replace(shape, sequences=3, shared=64, own=24, heads=2 * shape.heads // shape.kv_heads, kv_heads=2)
        self.shape = shape
        n, run, own = shape.sequences, shape.shared // UNIT, math.ceil(shape.own / UNIT)
        units = run + n * own
        self.layers = 2 if device.type == "cpu" else max(math.ceil(COLD_BYTES / shape.kv_bytes), 2)
        size = pool_shape(units, self.layers, shape.kv_heads, UNIT, shape.head_dim)
        self.pool = torch.empty(size, device=device, dtype=dtype).normal_()
        order = torch.randperm(units, device=device) + 1
        table = torch.cat([order[:run].expand(n, run), order[run:].view(n, own)], 1)
        self.table = pack_entries(table, UNIT)[None, :, None]
        self.lengths = torch.full((1, n, 1), shape.shared + shape.own, device=device, dtype=torch.int32)
        self.q = torch.randn((n, shape.heads, shape.head_dim), device=device, dtype=dtype)
        self.q_pos = self.lengths.view(-1) - 1
        self.groups = torch.zeros((4, n + 1), device=device, dtype=torch.int32)
        self.groups[0, :n] = torch.arange(n)
        self.groups[1, 1:] = n
        self.groups[2, 0] = self.groups[3, :n] = shape.shared

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    def attend(self, layer: int, backend: str) -> Tensor:
        where = (self.q, self.pool, layer, self.table, self.lengths, self.q_pos)
        return ops.decode_shared(*where, self.groups, None, self.scale, 0.0, backend)  # type: ignore[no-any-return]

    def attend_alone(self, layer: int) -> Tensor:
        where = (self.q, self.pool, layer, self.table, self.lengths, self.q_pos)
        return ops.decode(*where, None, None, self.scale, 0, 0.0, False, False, "triton")[0]  # type: ignore[no-any-return]

    def error(self) -> float:
        last = self.layers - 1
        return relative_error(self.attend(last, "triton"), self.attend(last, "reference"))
