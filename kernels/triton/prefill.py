"""Prefill: ragged queries over their tables, in one kernel without a split over keys.

    q        [T, Hq, D]   sequence b owns rows cu_q[b] : cu_q[b + 1]
    program  (query tile, KV head, sequence); a tile is BLOCK_M rows = BLOCK_M // g tokens, each with the g query heads
             of the KV head, so that K and V are read once a group and the diagonal is narrow

The keys of a tile come in two phases::

    slots   begin        low                         whole        end
            |  window's   |  seen whole by every row  |  diagonal,  |
            |  edge       |                           |  holes      |
    phase      2             1: no mask                  2: every mask

``whole`` ends before the lowest query of the tile, and before the first entry that is not full, wherever that lies (a
scan over the entries, 4 bytes for ``unit_tokens`` slots, finds it); a window W puts ``low`` W slots before the highest
query, and a bidirectional span widens ``begin`` and ``end``. Stored positions leave the first phase empty. Long tiles
start first, so that the short ones fill the tail.

The first phase is where the time goes. Its tile is two products and, for each score, a maximum, one fused
multiply-add and one exp2: the running maximum is kept unscaled and ``scale`` enters in the exponent, exp2(scale * s -
scale * top), which costs nothing there and rounds nothing. A unit that holds a whole tile can be fetched by TMA (TMA):
the pool seen as rows of D elements is one static descriptor, and a tile lies at row
``(((unit * layers + layer) * 2 + K or V) * Hkv + head) * unit_tokens``.

With RESUME, part of the work is done before (``prefill_dense.py``): the first rows of a long chunk have their partial
result over the first ``base`` slots in ``out`` and ``lse``, and the online softmax goes on from there: acc = out,
total = 1, top = lse.

FlashAttention-2 (Dao, 2023); the two phases as in TensorRT-LLM's paged Triton kernel (NVIDIA/TensorRT-LLM#13010). Table
entries are located as in ``tiles.py``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton import settings
from octavo.kernels.triton.tiles import (
    ID_SHIFT,
    LN2,
    LOG2E,
    VALID_MASK,
    add_sink,
    axis_strides,
    load_entries,
    locate,
    scaled,
    score_arguments,
)

SCAN_ENTRIES = tl.constexpr(256)
NEVER = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Done:
    """Which rows are computed before the kernel runs, worked out alike on the host and on the device.

    Of a sequence with ``count`` queries after ``context`` tokens, the first ``count // row_grain * row_grain`` rows
    are: whole, if ``context`` is 0 and they are at least ``min_rows``; over the first
    ``context // context_grain * context_grain`` tokens, if those are not none and the rows at least ``min_chunk_rows``.
    """

    row_grain: int
    context_grain: int
    min_rows: int
    min_chunk_rows: int

    @property
    def squares(self) -> "Done":
        """The same without what has a context: where units are not full, so many tokens are not as many slots."""
        return replace(self, min_chunk_rows=NEVER.value)

    def of(self, count: int, context: int) -> tuple[int, int]:
        """(rows, base): rows done, and over how many tokens of context; base 0: whole."""
        rows, base = count // self.row_grain * self.row_grain, context // self.context_grain * self.context_grain
        enough = rows >= (self.min_chunk_rows if context else self.min_rows)
        return (rows, base) if enough and rows and (base or not context) else (0, 0)


@triton.jit
def _done(
    count,
    context,
    ROW_GRAIN: tl.constexpr,
    CONTEXT_GRAIN: tl.constexpr,
    MIN_ROWS: tl.constexpr,
    MIN_CHUNK_ROWS: tl.constexpr,
):
    """``Done.of`` on the device."""
    rows = count // ROW_GRAIN * ROW_GRAIN
    base = context // CONTEXT_GRAIN * CONTEXT_GRAIN
    enough = rows >= tl.where(context > 0, MIN_CHUNK_ROWS, MIN_ROWS)
    done = enough & ((base > 0) | (context == 0))
    return tl.where(done, rows, 0), tl.where(done, base, 0)


@triton.jit
def _whole_entries(row, start, stop, U: tl.constexpr, BLOCK_N: tl.constexpr):
    """``load_entries`` where ``start`` and ``stop`` are multiples of BLOCK_N: less to work out in the inner loop."""
    index = start // U
    if U < BLOCK_N:
        index += tl.arange(0, BLOCK_N) // U
    return tl.load(row + index, mask=start < stop, other=0)


@triton.jit
def _attend(state, query, k, v, visible, scale, cap, CAPPED: tl.constexpr, MASKED: tl.constexpr):
    """One tile of keys [N, D]: the new (acc [M, D], total [M], top [M]) of the online softmax.

    ``top`` is in the units of ``scores``, and ``rate`` brings these to log 2: bare products, or capped scores.
    """
    acc, total, top = state
    scores = tl.dot(query, tl.trans(k), input_precision="ieee")  # [M, N]
    if CAPPED:
        scores = scaled(scores, scale, cap, CAPPED)
        rate = 1.0
    else:
        rate = scale
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    pivot = new_top * rate
    if MASKED:
        pivot = tl.where(new_top == float("-inf"), 0.0, pivot)
    probs = tl.exp2(scores * rate - pivot[:, None])
    decay = tl.exp2(top * rate - pivot)
    total = total * decay + tl.sum(probs, 1)
    acc = tl.dot(probs.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, total, new_top


_UNSPECIALISED = ["layer", "tokens", "batch", "scale", "cap", "l_layer", "l_batch", "l_head"]
_UNSPECIALISED += ["t_layer", "t_batch", "t_head", "p_layer", "p_batch", "p_head"]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _prefill_kernel(
    q,
    pool,
    pool_rows,
    table,
    lengths,
    cu_q,
    q_pos,
    q_span,
    unit_pos,
    sinks,
    out,
    lse,
    layer,
    tokens,
    batch,
    scale,
    cap,
    q_token,
    q_head,
    out_token,
    out_head,
    unit_stride,
    t_layer,
    t_batch,
    t_head,
    l_layer,
    l_batch,
    l_head,
    p_layer,
    p_batch,
    p_head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    U: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ORDERED: tl.constexpr,
    SINKS: tl.constexpr,
    SPANS: tl.constexpr,
    TMA: tl.constexpr,
    RESUME: tl.constexpr,
    ROW_GRAIN: tl.constexpr,
    CONTEXT_GRAIN: tl.constexpr,
    MIN_ROWS: tl.constexpr,
    MIN_CHUNK_ROWS: tl.constexpr,
):
    head = tl.program_id(1)
    b = tl.program_id(2)
    TILE: tl.constexpr = BLOCK_M // GROUP  # tokens

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    heads = head * GROUP + m % GROUP  # [M]
    if b == batch:  # rows of no sequence (the padding of a step) see nothing
        first = tl.load(cu_q + batch) + tl.program_id(0) * TILE
        for start in range(first, tokens, tl.num_programs(0) * TILE):
            token = (start + m // GROUP).to(tl.int64)
            live = (m < TILE * GROUP) & (token < tokens)
            to = out + token[:, None] * out_token + heads[:, None] * out_head + d[None, :]
            tl.store(to, tl.zeros([BLOCK_M, BLOCK_D], tl.float32), mask=live[:, None] & (d < D)[None, :])
            tl.store(lse + token * (KV_HEADS * GROUP) + heads, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=live)
        return

    first_token = tl.load(cu_q + b)
    count = tl.load(cu_q + b + 1) - first_token
    if count <= 0:
        return
    limit = count
    base = 0  # slots that the rows of this tile have seen before
    if RESUME:  # tiles of the rows that are half done, then of the rest; those that are done need none
        context = tl.load(q_pos + first_token)
        done_rows, done_base = _done(count, context, ROW_GRAIN, CONTEXT_GRAIN, MIN_ROWS, MIN_CHUNK_ROWS)
        half = tl.where(done_base > 0, done_rows, 0)
        half_tiles = tl.cdiv(half, TILE)
        tile = half_tiles + tl.cdiv(count - done_rows, TILE) - 1 - tl.program_id(0)
        is_half = tile < half_tiles
        first_row = tl.where(is_half, tile * TILE, done_rows + (tile - half_tiles) * TILE)
        limit = tl.where(is_half, half, count)
        base = tl.where(is_half, done_base, 0)
    else:
        tile = tl.cdiv(count, TILE) - 1 - tl.program_id(0)  # long tiles first
        first_row = tile * TILE
    if tile < 0:
        return

    local = first_row + m // GROUP
    live = (m < TILE * GROUP) & (local < limit)
    token = (first_token + local).to(tl.int64)  # [M]
    position = tl.load(q_pos + token, mask=live, other=-1)  # a row that is not live sees nothing
    inside = live[:, None] & (d < D)[None, :]
    query = tl.load(q + token[:, None] * q_token + heads[:, None] * q_head + d[None, :], mask=inside, other=0.0)
    query = query.to(pool.dtype.element_ty)  # the pool need not have the model's dtype, and a product takes one

    wide_layer = layer.to(tl.int64)
    row = table + wide_layer * t_layer + b * t_batch + head * t_head
    starts = unit_pos + wide_layer * p_layer + b * p_batch + head * p_head
    keys = pool + wide_layer * (2 * KV_HEADS * U * D) + head * (U * D)
    VALUES: tl.constexpr = KV_HEADS * U * D  # V lies so far behind K

    end = tl.load(lengths + wide_layer * l_layer + b * l_batch + head * l_head)
    begin = base
    low = base  # slots from low to whole are seen whole by every row
    whole = base
    if SPANS:
        span_first = tl.load(q_span + 2 * token, mask=live, other=0)  # [M]
        span_end = tl.load(q_span + 2 * token + 1, mask=live, other=0)
    if ORDERED:
        lowest = tl.min(tl.where(live, position, NEVER))
        highest = tl.max(position)
        sight = highest + 1
        if WINDOW > 0:
            begin = tl.maximum(lowest + 1 - WINDOW, 0)
            low = tl.cdiv(tl.maximum(highest + 1 - WINDOW, 0), BLOCK_N) * BLOCK_N
        if SPANS:
            sight = tl.maximum(sight, tl.max(span_end))
            if WINDOW > 0:
                begin = tl.minimum(begin, tl.min(tl.where(span_first < span_end, span_first, NEVER)))
        begin = begin // BLOCK_N * BLOCK_N
        end = tl.maximum(tl.minimum(end, sight), 0)
        whole = tl.maximum(tl.minimum(end, lowest + 1), low) // BLOCK_N * BLOCK_N
        needed = tl.cdiv(whole, U)
        full = needed  # entries from low on before the first that is not full
        for first in range(low // U, needed, SCAN_ENTRIES):
            index = first + tl.arange(0, SCAN_ENTRIES)
            valid = tl.load(row + index, mask=index < needed, other=U) & VALID_MASK
            full = tl.minimum(full, tl.min(tl.where(valid < U, index, needed)))
        whole = tl.maximum(tl.minimum(whole, full * U // BLOCK_N * BLOCK_N), low)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if RESUME:
        half_done = live & (base > 0)
        at_row = out + token[:, None] * out_token + heads[:, None] * out_head
        acc = tl.load(at_row + d[None, :], mask=half_done[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        total = tl.where(half_done, 1.0, 0.0)
        top = tl.load(lse + token * (KV_HEADS * GROUP) + heads, mask=half_done, other=float("-inf")) * (LOG2E / scale)

    if ORDERED:
        entry = _whole_entries(row, low, whole, U, BLOCK_N)
        for start in range(low, whole, BLOCK_N):
            now = entry
            entry = _whole_entries(row, start + BLOCK_N, whole, U, BLOCK_N)
            within = 0  # the tile's first slot in its unit
            if U > BLOCK_N:
                within = start % U
            if TMA:
                unit_row = (now >> ID_SHIFT) * (unit_stride // D) + (layer * 2 * KV_HEADS + head) * U
                k = pool_rows.load([(unit_row + within).to(tl.int32), 0])
                v = pool_rows.load([(unit_row + within).to(tl.int32) + KV_HEADS * U, 0])
            else:
                unit = (now >> ID_SHIFT).to(tl.int64) * unit_stride  # [N] or one
                if U < BLOCK_N:
                    unit = unit[:, None]
                at = keys + unit + (within * D + (n % U * D)[:, None] + d[None, :])  # [N, D]
                if D < BLOCK_D:
                    k = tl.load(at, mask=(d < D)[None, :], other=0.0)
                    v = tl.load(at + VALUES, mask=(d < D)[None, :], other=0.0)
                else:
                    k = tl.load(at)
                    v = tl.load(at + VALUES)
            acc, total, top = _attend((acc, total, top), query, k, v, None, scale, cap, CAPPED, False)

    gap = tl.maximum(whole - low, 0)  # the second phase leaps over the first: low, then whole
    entry = load_entries(row, begin + tl.where(begin >= low, gap, 0), end, U, BLOCK_N)
    for ahead in range(begin, end - gap, BLOCK_N):
        now = entry
        start = ahead + tl.where(ahead >= low, gap, 0)
        following = ahead + BLOCK_N
        entry = load_entries(row, following + tl.where(following >= low, gap, 0), end, U, BLOCK_N)
        at, seen = locate(now, start, end, unit_stride, U, D, BLOCK_N)  # [N]
        at = keys + at[:, None] + d[None, :]  # [N, D]
        present = seen[:, None] & (d < D)[None, :]
        k = tl.load(at, mask=present, other=0.0)
        v = tl.load(at + VALUES, mask=present, other=0.0)

        slot = start + n
        key_position = slot
        if not ORDERED:
            key_position = slot % U + tl.load(starts + slot // U, mask=seen, other=0)
        distance = position[:, None] - key_position[None, :]
        visible = distance >= 0
        if WINDOW > 0:
            visible = visible & (distance < WINDOW)
        if SPANS:
            visible = visible | (
                (key_position[None, :] >= span_first[:, None]) & (key_position[None, :] < span_end[:, None])
            )
        visible = visible & seen[None, :]
        acc, total, top = _attend((acc, total, top), query, k, v, visible, scale, cap, CAPPED, True)

    if not CAPPED:
        top = top * scale
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    row_lse = tl.where(nothing, float("-inf"), top + tl.log2(tl.where(nothing, 1.0, total)))
    if SINKS:
        row_lse, shrink = add_sink(row_lse, tl.load(sinks + heads).to(tl.float32) * LOG2E)
        acc = acc * shrink[:, None]
    tl.store(out + token[:, None] * out_token + heads[:, None] * out_head + d[None, :], acc, mask=inside)
    tl.store(lse + token * (KV_HEADS * GROUP) + heads, row_lse * LN2, mask=live)


def native(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    cu_q: Tensor,
    q_pos: Tensor,
    unit_pos: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    max_q: int,
    q_span: Tensor | None,
    out: Tensor,
    lse: Tensor,
    done: Done | None = None,
) -> None:
    """``reference.prefill`` by the kernel alone, into ``out`` like ``q`` and ``lse`` fp32 [T, Hq].

    ``done``: what these hold already; it goes with no ``sinks``, ``window``, ``softcap`` or ``q_span``, and ``squares``
    alone with ``unit_pos``.
    """
    tokens, q_heads, head_dim = q.shape
    units, layers, _, kv_heads, unit_tokens, _ = pool.shape
    batch, group = len(cu_q) - 1, q_heads // kv_heads
    assert pool.is_contiguous() and q.stride(2) == out.stride(2) == table.stride(3) == 1 and lse.is_contiguous()
    assert scale > 0 and (q_span is None or q_span.is_contiguous())

    block_d = max(triton.next_power_of_2(head_dim), 16)
    tuned = settings.launch("prefill", f"{block_d}x{pool.element_size()}", q.device)
    block_n = tuned["BLOCK_N"]
    block_m = max(min(tuned["BLOCK_M"], triton.next_power_of_2(max_q * group)), triton.next_power_of_2(group), 16)
    tiles = max(triton.cdiv(max_q, block_m // group), 1)  # without a query, too, rows of no sequence are written
    resume = {"RESUME": done is not None, "ROW_GRAIN": 0, "CONTEXT_GRAIN": 0, "MIN_ROWS": 0, "MIN_CHUNK_ROWS": 0}
    if done is not None:
        assert done.context_grain % max(unit_tokens, block_n) == 0
        assert sinks is None and q_span is None and not window and not softcap
        assert unit_pos is None or done == done.squares
        tiles += 1  # rows half done and rows to do share no tile
        resume |= {
            "ROW_GRAIN": done.row_grain,
            "CONTEXT_GRAIN": done.context_grain,
            "MIN_ROWS": done.min_rows,
            "MIN_CHUNK_ROWS": done.min_chunk_rows,
        }
    rows = units * layers * 2 * kv_heads * unit_tokens  # of D elements, in the pool
    tma = bool(tuned["TMA"]) and unit_tokens >= block_n and head_dim == block_d and rows < 2**31
    scale, cap = score_arguments(scale, softcap)
    _prefill_kernel[tiles, kv_heads, batch + 1](
        q,
        pool,
        TensorDescriptor(pool, [rows, head_dim], [head_dim, 1], [block_n, block_d]) if tma else pool,
        table,
        lengths,
        cu_q,
        q_pos,
        q_pos if q_span is None else q_span,
        table if unit_pos is None else unit_pos,
        lse if sinks is None else sinks,
        out,
        lse,
        layer,
        tokens,
        batch,
        scale,
        cap,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        pool.stride(0),
        *axis_strides(table),
        *axis_strides(lengths),
        *((0, 0, 0) if unit_pos is None else axis_strides(unit_pos)),
        GROUP=group,
        KV_HEADS=kv_heads,
        U=unit_tokens,
        D=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        WINDOW=window,
        CAPPED=softcap != 0,
        ORDERED=unit_pos is None,
        SINKS=sinks is not None,
        SPANS=q_span is not None,
        TMA=tma,
        num_warps=tuned["num_warps"] if block_m > 64 else min(tuned["num_warps"], 4),
        num_stages=tuned["num_stages"],
        **resume,
    )
