"""Append: scatter the K and V rows of a step into their slots of one layer.

    k, v    [T, Hkv, D]   any strides with contiguous rows (slices of a fused projection are fine)
    slots   int64 [T]     unit * unit_tokens + offset
    pool    [units, layers, 2, kv_heads, unit_tokens, head_dim], see layout.py

A program moves ``BLOCK_T`` tokens of one KV head. Consecutive tokens of a head lie side by side in a unit, so the
writes of a prefill are whole runs. Padding tokens carry slots of the scratch unit; they may collide there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings


@triton.jit(do_not_specialize=["layer", "tokens"])
def _append_kernel(
    k,
    v,
    pool,
    slots,
    layer,
    tokens,
    k_token,
    k_head,
    v_token,
    v_head,
    unit_stride,
    KV_HEADS: tl.constexpr,
    U: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    inside = (token < tokens)[:, None] & (d < D)[None, :]
    slot = tl.load(slots + token, mask=token < tokens, other=0)
    # The unit is int64 already: this is the one place where an id meets a stride.
    target = (slot // U) * unit_stride + (slot % U) * D  # [T]
    run = pool + layer.to(tl.int64) * (2 * KV_HEADS * U * D) + head * (U * D)
    at = run + target[:, None] + d[None, :]
    row = token.to(tl.int64)[:, None]
    k_rows = tl.load(k + row * k_token + head * k_head + d[None, :], mask=inside)
    v_rows = tl.load(v + row * v_token + head * v_head + d[None, :], mask=inside)
    tl.store(at, k_rows, mask=inside)
    tl.store(at + KV_HEADS * U * D, v_rows, mask=inside)


def append(k: Tensor, v: Tensor, pool: Tensor, layer: int, slots: Tensor) -> None:
    """See ``reference.append``."""
    tokens, kv_heads, head_dim = k.shape
    assert k.stride(2) == v.stride(2) == slots.stride(0) == 1 and pool.is_contiguous()
    tuned = settings.launch("append", "any", k.device)
    _append_kernel[triton.cdiv(tokens, tuned["BLOCK_T"]), kv_heads](
        k,
        v,
        pool,
        slots,
        layer,
        tokens,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        pool.stride(0),
        KV_HEADS=kv_heads,
        U=pool.shape[4],
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        **tuned,
    )
