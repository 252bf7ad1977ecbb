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


@triton.jit(do_not_specialize=["total"])
def _gate_kernel(x, out, total, N, TANH: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    at = x + i // N * (2 * N) + i % N
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(at, mask=inside, other=0.0)
    passed = tl.load(at + N, mask=inside, other=0.0)
    g = gate.to(tl.float32)
    inner = 1.5957691216 * (g + 0.044715 * g * g * g) if TANH else g  # 2 sqrt(2 / pi)
    opened = (g * tl.sigmoid(inner)).to(gate.dtype)  # rounded, as a model does
    tl.store(out + i, opened.to(tl.float32) * passed.to(tl.float32), mask=inside)


def gate(x: Tensor, activation: str, out: Tensor) -> None:
    """``out [..., N] = act(x[..., :N]) * x[..., N:]`` of ``x [..., 2 N]``, both contiguous and of one type;
    ``activation`` is "silu" or "gelu_tanh"."""
    assert x.is_contiguous() and out.is_contiguous() and x.shape[-1] == 2 * out.shape[-1]
    total, overlap = out.numel(), overlaps_launches(x.device)
    _gate_kernel[(triton.cdiv(total, _BLOCK),)](
        x,
        out,
        total,
        out.shape[-1],
        TANH=activation == "gelu_tanh",
        OVERLAP=overlap,
        BLOCK=_BLOCK,
        launch_pdl=overlap,
    )
