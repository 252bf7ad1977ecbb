"""Attention over pages that hold their keys for other positions than the reader's: one physical page serves many.

A row's table is cut into *parts* of entries whose stored positions differ from the row's own by one number, delta. Text
that the row wrote itself has delta 0; an image that was first computed 700 positions further to the front has 700::

    table of row b   | text          | image A       | text     | image B   | text ... the query
    part             | delta 0       | delta 700     | delta 0  | delta -12 | delta 0
    virtual row      each part is a row of its own: its slice of the table, and the query turned back by its delta

1. ``rotate_queries`` turns a copy of the query for each part: the turned query meets the stored key as the query meets
   the key at the row's position, ``R(-delta) q . k = q . R(delta) k`` (docs/kernels/rotation.md);
2. ``decode`` or ``prefill`` attends each virtual row to its slice;
3. ``merge_states`` joins the parts of a row by their log-sum-exps.

Positions decide two things, the angle and who sees whom. Only the angle depends on what was stored: entries keep their
place in the row, so causality and windows hold across parts as they would in one table.

What does not depend on the layer, the cut, is made once a step (``cut``); a layer is the three ops (``attend``). All
shapes follow from the number of parts, and nothing is read back, so that both can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels import ops


@dataclass(frozen=True)
class VirtualRows:
    """The parts of a batch as rows of their own, part by part; Q queries each, at any layer.

    Where they have different numbers of queries (``order``), the first axis of ``q_rows``, ``q_pos`` and ``deltas`` is
    the sum of these, S; ``bounds`` int32 [T + 1] are the states of each query of the batch, once ``order`` [S] has
    brought those of a query together.
    """

    table: Tensor  # int32 [Lt, n, Ht, M]
    lengths: Tensor  # int32 [Lt, n, Ht]
    unit_pos: Tensor | None  # int32 [Lt, n, Ht, M]
    q_rows: Tensor  # int32 [n * Q], of the batch's queries
    q_pos: Tensor  # int32 [n * Q], in the positions of the slice
    deltas: Tensor  # int32 [n * Q]
    cu_q: Tensor  # int32 [n + 1]
    bounds: Tensor  # int32 [B + 1], the virtual rows of each row
    order: Tensor | None = None  # int64, of the states, if virtual rows have different numbers of queries; see below
    max_q: int = 0  # the largest of these numbers, then

    @property
    def queries(self) -> int:
        """Q, queries of a row."""
        return len(self.q_rows) // self.table.shape[1]


def cut(
    table: Tensor, lengths: Tensor, q_pos: Tensor, unit_pos: Tensor | None, parts: Tensor, unit_tokens: int
) -> VirtualRows:
    """Cut the tables of B rows at the bounds of their parts.

    table, lengths, unit_pos   as the attention ops take them, int32 [Lt, B, Ht, M] and [Lt, B, Ht]
    q_pos    int32 [B * Q]     Q queries of each row, row by row: 1 to decode, a chunk's to prefill. Rows with chunks of
                               different lengths are cut apart
    parts    int32 [n, 4]      (row, first entry, entries, delta), ordered by row. The parts of a row are disjoint and
                               cover the entries that its queries may see; delta is the row's position of a slot less
                               the position that its key was stored for. A last part may reach beyond the length, for
                               tokens to come; a part of 0 entries is padding

    With per-head tables a part is the same entries in all heads.
    """
    batch, capacity, count = table.shape[1], table.shape[3], len(parts)
    queries = len(q_pos) // batch
    assert parts.shape == (count, 4) and count > 0 and queries * batch == len(q_pos)
    device = table.device
    row, first, entries, delta = parts.long().unbind(1)
    entry = (first[:, None] + torch.arange(capacity, device=device)).clamp_(max=capacity - 1)  # [n, M]

    def sliced(x: Tensor) -> Tensor:
        wide = (x.shape[0], count, x.shape[2], capacity)
        return x.index_select(1, row).gather(3, entry[None, :, None].expand(wide))

    start = first * unit_tokens
    most = (entries * unit_tokens)[:, None]
    slots = lengths.index_select(1, row) - start[:, None]
    own_pos = q_pos.view(batch, queries)[row]  # [n, Q]
    if unit_pos is None:  # slots count as positions: those of the slice begin at 0
        own_pos = own_pos - start[:, None]
        most = most.minimum(own_pos[:, -1:] + 1)
    slots = slots.minimum(most).clamp_(min=0)
    step = torch.arange(queries, device=device)
    return VirtualRows(
        table=sliced(table),
        lengths=slots.int(),
        unit_pos=None if unit_pos is None else sliced(unit_pos),
        q_rows=(row[:, None] * queries + step).flatten().int(),
        q_pos=own_pos.flatten().int(),
        deltas=delta.repeat_interleave(queries).int(),
        cu_q=torch.arange(0, (count + 1) * queries, queries, dtype=torch.int32, device=device),
        bounds=torch.searchsorted(row.contiguous(), torch.arange(batch + 1, device=device), out_int32=True),
    )


def attend(
    q: Tensor,
    pool: Tensor,
    layer: int,
    rows: VirtualRows,
    inv_freq: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    interleaved: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Attention of ``q [B * Q, Hq, D]`` over tables that ``cut`` has cut, in one layer.

    ``inv_freq`` fp32 [Dr/2] and ``interleaved`` are the layer's rotary embedding (``reference.rotate_keys``), the rest
    is as in the attention ops. Returns ``out [B * Q, Hq, D]`` in q's dtype and ``lse`` fp32 [B * Q, Hq]: what attention
    over keys moved to the row's positions would return, up to the rounding of the turned queries and of the parts'
    outputs to q's dtype.
    """
    heads, head_dim = q.shape[1:]
    count, queries = rows.table.shape[1], 0 if rows.order is not None else rows.queries
    turned = ops.rotate_queries(q, rows.q_rows, rows.deltas, inv_freq, interleaved, backend)
    where = (turned, pool, layer, rows.table, rows.lengths)
    scores = (rows.unit_pos, None, scale, window, softcap)  # the sinks join once, in the merge
    if rows.order is not None:
        outs, lses = ops.prefill(*where, rows.cu_q, rows.q_pos, *scores, rows.max_q, True, backend)
        return ops.merge_states(outs[rows.order], lses[rows.order], rows.bounds, sinks, backend)  # type: ignore[no-any-return]
    if queries == 1:
        outs, lses, _ = ops.decode(*where, rows.q_pos, *scores, False, True, backend)
    else:
        outs, lses = ops.prefill(*where, rows.cu_q, rows.q_pos, *scores, queries, True, backend)
    # The states of a query lie Q apart. Taken as heads of one row, the queries of a part need no reordering.
    states = (outs.view(count, queries * heads, head_dim), lses.view(count, queries * heads))
    out, lse = ops.merge_states(*states, rows.bounds, None if sinks is None else sinks.repeat(queries), backend)
    return out.view(-1, heads, head_dim), lse.view(-1, heads)
