"""Preparing and finishing a decode step on the device, so that a graph can replay it without the host.

The state is a row a sequence; a batch names the rows that take part, in its own order, with -1 for padding::

    row               0      1      2      3                  batch    rows    [ 2   0  -1 ]
    tokens  int64  [ 17     -      5      - ]  last token              ids     [ 5  17   0 ]
    lengths int32  [ 33     -    128      - ]  tokens in cache         q_pos   [128 33   0 ]
    tables  int32  [slices, rows, M]           entries                 slots   [ .   .   0 ]  0: the scratch unit

``step_decode`` reads the state only, so that a step that failed can be prepared again; ``scatter_tokens`` moves the
state on by the tokens that were drawn. Three loads follow one another (row, length, entry), and nothing else takes time
in so small a kernel: all slices are one tile, so that their entries are fetched together.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings
from octavo.kernels.triton.tiles import ID_SHIFT


@triton.jit(do_not_specialize=["batch", "slices", "t_slice", "t_row"])
def _step_kernel(
    rows,
    lengths,
    tokens,
    tables,
    ids,
    positions,
    q_pos,
    slots,
    slot_counts,
    batch,
    slices,
    t_slice,
    t_row,
    U: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = b < batch
    row = tl.load(rows + b, mask=inside, other=-1)
    used = row >= 0
    last = tl.load(tokens + row, mask=used, other=0)
    position = tl.load(lengths + row, mask=used, other=0)
    s = tl.arange(0, BLOCK_S)
    from_table = tables + s[:, None].to(tl.int64) * t_slice + (row.to(tl.int64) * t_row + position // U)[None, :]
    written = (s < slices)[:, None] & inside[None, :]
    entry = tl.load(from_table, mask=written & used[None, :], other=0)  # [S, B]
    unit = (entry >> ID_SHIFT).to(tl.int64)
    tl.store(ids + b, last, mask=inside)
    tl.store(positions + b, position.to(tl.int64), mask=inside)
    tl.store(q_pos + b, position, mask=inside)
    tl.store(slot_counts + b, tl.where(used, position + 1, 0), mask=inside)
    slot = tl.where(used[None, :], unit * U + (position % U)[None, :], 0)
    tl.store(slots + s[:, None] * batch + b[None, :], slot, mask=written)


def step_decode(
    rows: Tensor, lengths: Tensor, tokens: Tensor, tables: Tensor, unit_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``reference.step_decode``."""
    batch, slices = len(rows), len(tables)
    assert rows.stride(0) == lengths.stride(0) == tokens.stride(0) == tables.stride(2) == 1
    ids, positions = rows.new_empty(batch, dtype=torch.int64), rows.new_empty(batch, dtype=torch.int64)
    q_pos, slot_counts = rows.new_empty(batch), rows.new_empty((1, batch, 1))
    slots = rows.new_empty((slices, batch), dtype=torch.int64)
    tuned = settings.launch("step_decode", "any", rows.device)
    _step_kernel[(triton.cdiv(batch, tuned["BLOCK_B"]),)](
        rows,
        lengths,
        tokens,
        tables,
        ids,
        positions,
        q_pos,
        slots,
        slot_counts,
        batch,
        slices,
        tables.stride(0),
        tables.stride(1),
        U=unit_tokens,
        BLOCK_S=triton.next_power_of_2(slices),
        **tuned,
    )
    return ids, positions, q_pos, slots, slot_counts


@triton.jit(do_not_specialize=["batch"])
def _scatter_kernel(rows, ids, tokens, lengths, batch, BLOCK_B: tl.constexpr):
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    row = tl.load(rows + b, mask=b < batch, other=-1)
    drawn = tl.load(ids + b, mask=b < batch, other=0)
    used = row >= 0
    length = tl.load(lengths + row, mask=used, other=0)
    tl.store(tokens + row, drawn, mask=used)
    tl.store(lengths + row, length + 1, mask=used)


def scatter_tokens(rows: Tensor, ids: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    """See ``reference.scatter_tokens``."""
    assert rows.stride(0) == ids.stride(0) == tokens.stride(0) == lengths.stride(0) == 1
    tuned = settings.launch("scatter_tokens", "any", rows.device)
    _scatter_kernel[(triton.cdiv(len(rows), tuned["BLOCK_B"]),)](rows, ids, tokens, lengths, len(rows), **tuned)
