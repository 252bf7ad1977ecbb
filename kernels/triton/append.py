"""Append: scatter the K and V rows of a step into their slots of one layer; on the way turn K and digest full pages.

    k, v      [T, Hkv, D]   any strides with contiguous rows (slices of a fused projection are fine)
    slots     int64 [T]     unit * unit_tokens + offset
    pool      [units, layers, 2, kv_heads, unit_tokens, head_dim], see layout.py
    digests   [rows, layers, Hkv, 2, D]   min and max of a page's keys, any strides with contiguous rows

A program moves ``BLOCK_T`` tokens of one KV head. The head is the fast axis of the grid, so that the programs that run
at one time read whole tokens and write whole units, and share the angles of their tokens in L2. Consecutive tokens of a
head lie side by side in a unit, so the writes of a prefill are whole runs. Padding tokens carry slots of the scratch
unit; they may collide there.

Two features are compiled in where they are asked for:

ROTARY  K is turned by RoPE as it is loaded (rotary.py).
SEAL    The program that writes the last slot of a page also digests the page. It takes the page's keys from ``k`` (and
        turns them again) where this call writes them, and from the pool where an earlier one did::

            page    | 0  1  2  3  4 | 5  6  7  8  9 | 10 11 ...
            step 1  | x  x  x  x  x | x  x          |               seals page 0: all of it from k
            step 2  |               |       x  x  x | x             seals page 1: 5, 6 from the pool, 7-9 from k

        No program reads what another one writes in the same launch, hence neither atomics nor an order. A key that is
        turned twice rounds alike both times, so a digest bounds the stored keys to the last bit.

The digests are those of Quest (arXiv 2406.10774, section 3.2).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings
from octavo.kernels.triton.rotary import load_turned
from octavo.kernels.triton.tiles import ID_SHIFT

FEW_TOKENS = 512
"""Up to so many tokens, a step of decoding, latency counts: small programs, and few pages to digest in each."""


@triton.jit
def _bounds(
    k,
    cos,
    sin,
    run,
    rows,
    entries,
    last,
    mine,
    k_token,
    angle_token,
    unit_stride,
    U: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Minimum and maximum, fp32 [BLOCK_D], of the page that token ``last`` of sequence ``mine`` completes.

    ``run`` is the head's run of unit 0 in the layer, ``entries`` the page's part of the block table.
    """
    d = tl.arange(0, BLOCK_D)
    low = tl.full([BLOCK_D], float("inf"), tl.float32)
    high = tl.full([BLOCK_D], float("-inf"), tl.float32)
    for start in range(0, PAGE, BLOCK_P):
        offset = start + tl.arange(0, BLOCK_P)  # in the page
        exists = offset < PAGE
        source = last - (PAGE - 1) + offset  # in this call, if that token is of the same sequence
        fresh = exists & (tl.load(rows + source, mask=exists & (source >= 0), other=-1) == mine)
        stored = exists & ~fresh
        entry = tl.load(entries + offset // U, mask=stored, other=0)
        at = (entry >> ID_SHIFT).to(tl.int64) * unit_stride + (offset % U) * D
        old = tl.load(run + at[:, None] + d[None, :], mask=stored[:, None] & (d < D)[None, :], other=0.0)
        new = load_turned(k, cos, sin, source, fresh, k_token, angle_token, D, ROTARY, BLOCK_D)
        keys = tl.where(fresh[:, None], new.to(old.dtype), old).to(tl.float32)  # [P, BLOCK_D]
        low = tl.minimum(low, tl.min(tl.where(exists[:, None], keys, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(exists[:, None], keys, float("-inf")), 0))
    return low, high


_UNSPECIALISED = ["layer", "tokens", "digest_layer", "table_slice", "t_slice", "t_row"]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _append_kernel(
    k,
    v,
    pool,
    slots,
    cos,
    sin,
    digests,
    tables,
    rows,
    q_pos,
    layer,
    tokens,
    digest_layer,
    table_slice,
    k_token,
    k_head,
    v_token,
    v_head,
    angle_token,
    unit_stride,
    g_row,
    g_layer,
    g_head,
    g_part,
    t_slice,
    t_row,
    KV_HEADS: tl.constexpr,
    U: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    SEAL: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    listed = token < tokens
    slot = tl.load(slots + token, mask=listed, other=0)
    if SEAL:  # ahead of the stores, which would hold these loads back
        row = tl.load(rows + token, mask=listed, other=-1)
        position = tl.load(q_pos + token, mask=listed, other=0)
    k += head * k_head
    v += head * v_head
    keys = load_turned(k, cos, sin, token, listed, k_token, angle_token, D, ROTARY, BLOCK_D)
    inside = listed[:, None] & (d < D)[None, :]
    values = tl.load(v + token.to(tl.int64)[:, None] * v_token + d[None, :], mask=inside)
    # The unit is int64 already: here an id meets a stride.
    target = (slot // U) * unit_stride + (slot % U) * D  # [T]
    run = pool + layer.to(tl.int64) * (2 * KV_HEADS * U * D) + head * (U * D)
    at = run + target[:, None] + d[None, :]
    tl.store(at, keys.to(pool.dtype.element_ty), mask=inside)
    tl.store(at + KV_HEADS * U * D, values, mask=inside)

    if SEAL:
        closing = (row >= 0) & (position % PAGE == PAGE - 1)  # [T]
        for _ in range(tl.sum(closing.to(tl.int32))):
            last = tl.min(tl.where(closing, token, tokens))  # the next token of the block that completes a page
            closing = closing & (token != last)
            mine = tl.load(rows + last)
            first_entry = tl.load(q_pos + last) // PAGE * (PAGE // U)
            entries = tables + mine.to(tl.int64) * t_row + first_entry
            page = tl.load(entries) >> ID_SHIFT  # a page goes by the first unit of its first slice
            low, high = _bounds(
                k, cos, sin, run, rows, entries + table_slice.to(tl.int64) * t_slice, last, mine,
                k_token, angle_token, unit_stride, U, D, ROTARY, PAGE, BLOCK_D, BLOCK_P,
            )  # fmt: skip
            digest = digests + page.to(tl.int64) * g_row + digest_layer.to(tl.int64) * g_layer + head * g_head
            tl.store(digest + d, low, mask=d < D)
            tl.store(digest + g_part + d, high, mask=d < D)


def append(k: Tensor, v: Tensor, pool: Tensor, layer: int, slots: Tensor) -> None:
    """See ``reference.append``."""
    append_fused(k, v, pool, layer, slots, None, None, None, 0, None, 0, None, None, pool.shape[4])


def append_fused(
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    layer: int,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    digests: Tensor | None,
    digest_layer: int,
    tables: Tensor | None,
    table_slice: int,
    rows: Tensor | None,
    q_pos: Tensor | None,
    page_tokens: int,
) -> None:
    """See ``reference.append_fused``."""
    tokens, kv_heads, head_dim = k.shape
    unit_tokens = pool.shape[4]
    assert k.stride(2) == v.stride(2) == slots.stride(0) == 1 and pool.is_contiguous()
    rotary = angle_token = 0
    if cos is not None:
        assert sin is not None and cos.shape == sin.shape and cos.stride() == sin.stride() and cos.stride(1) == 1
        rotary, angle_token = cos.shape[1], cos.stride(0)
        assert rotary % 2 == 0 and rotary <= head_dim
    digest_strides, table_strides = (0, 0, 0, 0), (0, 0)
    if digests is not None:
        assert tables is not None and rows is not None and q_pos is not None
        assert digests.stride(4) == tables.stride(2) == rows.stride(0) == q_pos.stride(0) == 1
        assert page_tokens % unit_tokens == 0
        digest_strides, table_strides = digests.stride()[:4], tables.stride()[:2]
    tuned = settings.launch("append", "few" if tokens <= FEW_TOKENS else "many", k.device)
    block_d = triton.next_power_of_2(head_dim)
    unused = slots  # in place of what a feature that is left out would read
    _append_kernel[kv_heads, triton.cdiv(tokens, tuned["BLOCK_T"])](
        k,
        v,
        pool,
        slots,
        unused if cos is None else cos,
        unused if sin is None else sin,
        unused if digests is None else digests,
        unused if tables is None else tables,
        unused if rows is None else rows,
        unused if q_pos is None else q_pos,
        layer,
        tokens,
        digest_layer,
        table_slice,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        angle_token,
        pool.stride(0),
        *digest_strides,
        *table_strides,
        KV_HEADS=kv_heads,
        U=unit_tokens,
        D=head_dim,
        ROTARY=rotary,
        SEAL=digests is not None,
        PAGE=page_tokens,
        BLOCK_D=block_d,
        BLOCK_T=tuned["BLOCK_T"],
        BLOCK_P=min(triton.next_power_of_2(page_tokens), tuned["SEAL_ELEMENTS"] // block_d),
        num_warps=tuned["num_warps"],
    )
