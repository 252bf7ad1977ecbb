"""Races of K17, Linear layers of few rows: the products of a decode step of an 8B Llama and of SmolLM2-135M.

QKV, and gate and up, are joined. The floor is one read of the weight. The rival is ``F.linear``, which is cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels import ops
from octavo.scripts.kernel_races.checking import relative_error
from octavo.scripts.kernel_races.race import Field, Race, Target

COLD_BYTES = 150e6
"""What the calls of a round read at least: over twice an L2."""

CPU_FEATURES, CPU_INPUTS = 72, 264
"""The shape in Triton's interpreter, where a race checks its own code."""

TOLERANCE = 5e-3
"""A result is rounded to bf16: 2^-9 at most, in norm about half of that."""


@dataclass(frozen=True)
class Product:
    """A weight [features, inputs]."""

    name: str
    features: int
    inputs: int


LLAMA_8B = (
    Product("8B gate and up", 28672, 4096),
    Product("8B down", 4096, 14336),
    Product("8B QKV", 6144, 4096),
    Product("8B o", 4096, 4096),
    Product("8B lm_head", 128256, 4096),
)
SMOLLM2_135M = (
    Product("135M gate and up", 3072, 576),
    Product("135M down", 576, 1536),
    Product("135M QKV", 960, 576),
    Product("135M o", 576, 576),
    Product("135M lm_head", 49152, 576),
)


def races() -> list[Race]:
    return [_race(product, rows) for product in LLAMA_8B for rows in (1, 8, 32, 64)] + [
        _race(product, 1) for product in SMOLLM2_135M
    ]


def _race(product: Product, rows: int) -> Race:
    n, k = product.features, product.inputs
    return Race(
        "K17 linear",
        f"{product.name}, {rows} row{'s' if rows > 1 else ''}",
        moved_bytes=2 * (n * k + rows * (n + k)),
        flops=2 * rows * n * k,
        build=partial(_build, product, rows),
        target=Target("faster than torch", lambda times: times.us["octavo"] < times.us["torch"]),
    )


def _build(product: Product, rows: int, device: torch.device) -> Field:
    n, k, turns = product.features, product.inputs, ceil(COLD_BYTES / (2 * product.features * product.inputs))
    if device.type == "cpu":
        n, k, turns = CPU_FEATURES, CPU_INPUTS, 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    x = normal(rows, k)
    weights = [normal(n, k) / k**0.5 for _ in range(turns)]

    def error() -> float:
        x, weight = normal(rows, k), weights[0]
        return relative_error(ops.linear(x, weight, None, "triton"), F.linear(x.float(), weight.float()))

    return Field(
        contenders={
            "octavo": [lambda w=w: ops.linear(x, w, None, "triton") for w in weights],
            "torch": [lambda w=w: F.linear(x, w) for w in weights],
        },
        error=error,
        tolerance=TOLERANCE,
    )
