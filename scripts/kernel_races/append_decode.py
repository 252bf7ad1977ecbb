"""Races of append and decode in one call, queries and keys turned on the way: what a layer of a decode step does.

"octavo apart" does the same one after the other: append that turns keys, queries turned by torch, decode. Heads are 32
and 8 of 128. The floor is the bytes of K and V over the streaming read rate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.layout import entry_units
from octavo.kernels.reference.pages import rotated
from octavo.scripts.kernel_races.checking import relative_error
from octavo.scripts.kernel_races.paged import Paged, Shape
from octavo.scripts.kernel_races.race import Field, Race, Target

K = 1024
TOLERANCE = 8e-3
SHAPES = {
    "1 x 1k": (K,), "32 x 1k": (K,) * 32, "32 x 8k": (8 * K,) * 32, "128 x 1k": (K,) * 128, "256 x 1k": (K,) * 256,
}  # fmt: skip


class Step:
    """A shape's pages, in which the last token of each sequence is new."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.paged = paged = Paged(shape, device)
        shape, batch = paged.shape, len(paged.q)
        last, row = paged.q_pos.long(), torch.arange(batch, device=device)
        unit = entry_units(paged.table[0, row, 0, last // shape.unit]).long()
        self.slots = unit * shape.unit + last % shape.unit
        fused = torch.randn((batch, shape.heads + 2 * shape.kv_heads, shape.head_dim), device=device).to(paged.q.dtype)
        self.q, self.k, self.v = fused.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        half = shape.head_dim // 2
        angles = last[:, None] * 10000 ** -(torch.arange(half, device=device) / half)
        self.cos, self.sin = (x.repeat(1, 2).to(paged.q.dtype) for x in (angles.cos(), angles.sin()))

    def at_once(self, layer: int, backend: str) -> Tensor:
        paged = self.paged
        out: Tensor = ops.append_decode(
            self.q, self.k, self.v, paged.pool, layer, self.slots, paged.table, paged.lengths, paged.q_pos, self.cos,
            self.sin, None, paged.scale, 0, 0.0, backend,
        )  # fmt: skip
        return out

    def apart(self, layer: int) -> Tensor:
        paged = self.paged
        ops.append_fused(
            self.k, self.v, paged.pool, layer, self.slots, self.cos, self.sin, None, 0, None, 0, None, None,
            paged.shape.unit, "triton",
        )  # fmt: skip
        _, *rest = paged.decode_args(layer)
        out: Tensor = ops.decode(rotated(self.q, self.cos, self.sin).to(self.q.dtype), *rest, "triton")[0]
        return out


def races() -> list[Race]:
    target = Target(
        "faster than one after the other", lambda times: times.us["octavo"] < times.us.get("octavo apart", float("inf"))
    )
    return [
        Race("K1 append_decode", name, Shape(lengths).kv_bytes, 0, partial(_build, Shape(lengths)), target)
        for name, lengths in SHAPES.items()
    ]


def _build(shape: Shape, device: torch.device) -> Field:
    step = Step(shape, device)
    layers = range(step.paged.layers)

    def error() -> float:
        last = step.paged.layers - 1
        return relative_error(step.at_once(last, "triton"), step.at_once(last, "reference"))

    calls: dict[str, list[Callable[[], object]]] = {
        "octavo": [partial(step.at_once, layer, "triton") for layer in layers],
        "octavo apart": [partial(step.apart, layer) for layer in layers],
    }
    return Field(calls, error, TOLERANCE)
