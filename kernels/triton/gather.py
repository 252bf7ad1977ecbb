"""Gather: the K and V of whole tables as contiguous, head-major tensors, for a dense kernel.

    program   (BLOCK_T slots of a table, KV head, sequence)
    slots     | 0 1 2 3 | 4 5 . . | 6 7 8 . |      units of 4 tokens; a dot is a slot without a token
    keys      | 0 1 2 3 4 5 6 7 8 | 0 0 0 |        [tokens, D]; zeros behind the last token, never what was there before

Where the tokens of a tile go depends on how many lie before it: each program counts the valid slots of all entries, 4
bytes for ``unit_tokens`` slots, out of L2. K and V are read once and written once, in pieces of D elements at least, of
``unit_tokens * D`` where units are full.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings
from octavo.kernels.triton.tiles import VALID_MASK, axis_strides, load_entries, locate

SCAN_ENTRIES = tl.constexpr(1024)


@triton.jit(do_not_specialize=["layer", "tokens", "l_layer", "l_batch", "l_head", "t_layer", "t_batch", "t_head"])
def _gather_kernel(
    pool,
    table,
    lengths,
    keys_out,
    values_out,
    layer,
    tokens,
    unit_stride,
    t_layer,
    t_batch,
    t_head,
    l_layer,
    l_batch,
    l_head,
    U: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    start = tl.program_id(0) * BLOCK_T
    head = tl.program_id(1)
    b = tl.program_id(2)
    kv_heads = tl.num_programs(1)
    layer = layer.to(tl.int64)
    row = table + layer * t_layer + b * t_batch + head * t_head
    end = tl.load(lengths + layer * l_layer + b * l_batch + head * l_head)
    d = tl.arange(0, BLOCK_D)

    before = 0  # tokens before this tile
    present = 0  # tokens in all
    for first in range(0, tl.cdiv(end, U), SCAN_ENTRIES):
        index = first + tl.arange(0, SCAN_ENTRIES)
        valid = tl.load(row + index, mask=index * U < end, other=0) & VALID_MASK
        valid = tl.minimum(valid, end - index * U)
        valid = tl.where(index * U < end, valid, 0)
        present += tl.sum(valid)
        before += tl.sum(tl.minimum(valid, tl.maximum(start - index * U, 0)))

    to = (b * kv_heads + head).to(tl.int64) * tokens * D
    if start < end:
        entry = load_entries(row, start, end, U, BLOCK_T)
        at, seen = locate(entry, start, end, unit_stride, U, D, BLOCK_T)  # [N]
        target = before + tl.cumsum(seen.to(tl.int32), 0) - 1
        moved = (seen & (target < tokens))[:, None] & (d < D)[None, :]
        keys = pool + layer * (2 * kv_heads * U * D) + head * (U * D)
        fetched = at[:, None] + d[None, :]
        written = to + target[:, None] * D + d[None, :]
        tl.store(keys_out + written, tl.load(keys + fetched, mask=moved), mask=moved)
        tl.store(values_out + written, tl.load(keys + kv_heads * (U * D) + fetched, mask=moved), mask=moved)

    target = start + tl.arange(0, BLOCK_T)
    empty = ((target >= present) & (target < tokens))[:, None] & (d < D)[None, :]
    zeros = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    tl.store(keys_out + to + target[:, None] * D + d[None, :], zeros, mask=empty)
    tl.store(values_out + to + target[:, None] * D + d[None, :], zeros, mask=empty)


def gather(pool: Tensor, layer: int, table: Tensor, lengths: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """See ``reference.gather``."""
    kv_heads, unit_tokens, head_dim = pool.shape[3:]
    batch, slots = table.shape[1], table.shape[3] * unit_tokens
    assert pool.is_contiguous() and table.stride(3) == 1
    tuned = settings.launch("gather", "any", pool.device)
    keys = torch.empty((batch, kv_heads, tokens, head_dim), dtype=pool.dtype, device=pool.device)
    values = torch.empty_like(keys)
    _gather_kernel[triton.cdiv(max(slots, tokens), tuned["BLOCK_T"]), kv_heads, batch](
        pool,
        table,
        lengths,
        keys,
        values,
        layer,
        tokens,
        pool.stride(0),
        *axis_strides(table),
        *axis_strides(lengths),
        U=unit_tokens,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        **tuned,
    )
    return keys, values
