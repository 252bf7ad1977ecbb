"""``linear.c`` and the layout of its weights: products in bf16 at the rate at which a few rows can read the weight.

At up to 64 rows it takes 0.7 to 0.85 of the time of oneDNN's product by a packed weight, from 256 on 0.92 to 0.97
(docs/cpu.md). The ops are registered from C, so that code in C++ calls them without Python:

    linear_blocks         x W^T + b
    linear_blocks_added   the same and what is added to it, rounded once
    linear_blocks_gated   silu(x G^T) * (x U^T)
    linear_blocks_3       three products of one x
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.kernels.cpu import compiler, processor

SOURCE = Path(__file__).with_name("linear.c")
HEADERS = tuple(Path(__file__).with_name(name) for name in ("columns.h", "exponential.h"))
WIDE = 32
"""Outputs of a block."""

_library: Any = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_WEIGHTS = ", ".join(f"Tensor {name}, int {name}_outputs" for name in "abc")
_library.define("linear_blocks(Tensor x, Tensor blocks, int outputs) -> Tensor")
_library.define("linear_blocks_added(Tensor x, Tensor blocks, int outputs, Tensor added) -> Tensor")
_library.define("linear_blocks_gated(Tensor x, Tensor gate, Tensor up, int outputs) -> Tensor")
_library.define(f"linear_blocks_3(Tensor x, {_WEIGHTS}) -> (Tensor, Tensor, Tensor)")


def _like(x: Tensor, outputs: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


for _name, _fake in {
    "linear_blocks": lambda x, _, outputs: _like(x, outputs),
    "linear_blocks_added": lambda x, _, outputs, __: _like(x, outputs),
    "linear_blocks_gated": lambda x, _, __, outputs: _like(x, outputs),
    "linear_blocks_3": lambda x, _, a, __, b, ___, c: tuple(_like(x, outputs) for outputs in (a, b, c)),
}.items():
    torch.library.register_fake(f"octavo::{_name}", _fake, lib=_library)


def serves(weight: Tensor) -> bool:
    """Whether a weight ``[outputs, inputs]`` can be laid out in blocks here."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and _registered()


def pack(weight: Tensor, bias: Tensor | None) -> Tensor:
    """A bf16 ``weight [outputs, inputs]`` and its bias in blocks, int32 ``[outputs / 32, 1 + inputs / 2, 32]``, as
    ``columns.h`` draws them. Columns past the outputs are zero."""
    outputs, inputs = weight.shape
    missing = -outputs % WIDE
    pairs = pad(weight, (0, 0, 0, missing)).contiguous().view(torch.int32).view(-1, WIDE, inputs // 2)
    biases = weight.new_zeros(outputs, dtype=torch.float32) if bias is None else bias.float()
    first = pad(biases, (0, missing)).view(torch.int32).view(-1, 1, WIDE)
    return torch.cat([first, pairs.transpose(1, 2)], 1)


def multiply(x: Tensor, blocks: Tensor, outputs: int) -> Tensor:
    """``x [..., inputs] W^T + b``, bf16 [..., outputs], of contiguous bf16 x; sums are fp32."""
    return torch.ops.octavo.linear_blocks(x, blocks, outputs)  # type: ignore[no-any-return]


@cache
def _registered() -> bool:
    """Whether torch calls ``linear.c``, by now."""
    if "avx512_bf16" not in processor.flags().split():
        return False
    return compiler.op_library(SOURCE, HEADERS) is not None
