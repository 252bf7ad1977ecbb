"""Gating: ``out = act(first half) * second half`` of what gate and up of an MLP have given in one product.

A launch of its own, for products that do not gate on the way (``products/product.py``).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.plan import overlaps_launches

_BLOCK = 1024


@triton.jit
def _gate_kernel(x, out, N, TANH: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    at = x + row * (2 * N) + n
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(at, mask=inside, other=0.0)
    passed = tl.load(at + N, mask=inside, other=0.0)
    g = gate.to(tl.float32)
    inner = 1.5957691216 * (g + 0.044715 * g * g * g) if TANH else g  # 2 sqrt(2 / pi)
    opened = (g * tl.sigmoid(inner)).to(gate.dtype)  # rounded, as a model does
    tl.store(out + row * N + n, opened.to(tl.float32) * passed.to(tl.float32), mask=inside)


def gate(x: Tensor, activation: str, out: Tensor) -> None:
    """``out [..., N] = act(x[..., :N]) * x[..., N:]`` of ``x [..., 2 N]``, both contiguous and of one type of
    16 or 32 bits; ``activation`` is "silu" or "gelu_tanh"."""
    assert x.is_contiguous() and out.is_contiguous() and x.shape[-1] == 2 * out.shape[-1]
    width, overlap = out.shape[-1], overlaps_launches(x.device)
    _gate_kernel[x.shape[:-1].numel(), triton.cdiv(width, _BLOCK)](
        x,
        out,
        width,
        TANH=activation == "gelu_tanh",
        OVERLAP=overlap,
        BLOCK=_BLOCK,
        launch_pdl=overlap,
    )
