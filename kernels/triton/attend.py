"""Attention of a block of query rows over a stretch of one table row: the inner loop of decoding."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl

from octavo.kernels.triton.tiles import load_entries, locate, scaled


@triton.jit
def attend(
    query,
    position,
    row,
    starts,
    keys,
    values,
    first,
    last,
    unit_stride,
    scale,
    cap,
    piece_rows,
    piece_mask,
    U: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ORDERED: tl.constexpr,
    MASS: tl.constexpr,
    FULL: tl.constexpr,
    CHUNK: tl.constexpr = False,
    fresh_score=None,
    fresh_value=None,
    FRESH: tl.constexpr = False,
):
    """Online softmax of ``query [M, D]`` over the slots ``[first, last)`` of ``row``, a tile of BLOCK_N at a time.

    Gives the normalised output fp32 [M, D] and its log-sum-exp, base 2, fp32 [M]; a row that sees nothing gives 0 and
    minus infinity. ``keys`` and ``values`` point to the runs of unit 0; ``starts`` is the row of ``unit_pos``. An
    ORDERED table ends where the query may not look; FULL: every slot holds a token that every row sees, and there are
    whole tiles only; CHUNK: each row has its own ``position [M]``, and is masked by it. With MASS, the log-sum-exp of
    each piece (min(U, BLOCK_N) slots) goes to ``piece_rows [M]``. FRESH: one more token, in no slot, goes first, with
    ``fresh_score`` fp32 [M] as of ``scaled`` (minus infinity: there is none) and ``fresh_value [D]``.
    """
    query = query.to(keys.dtype.element_ty)  # the pool need not have the model's dtype, and a product takes one
    d = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if FRESH:
        top = fresh_score
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        acc = total[:, None] * fresh_value.to(tl.float32)[None, :]
    entry = load_entries(row, first, last, U, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        at, seen = locate(entry, start, last, unit_stride, U, D, BLOCK_N)  # [N]
        tile = at[:, None] + d[None, :]  # [N, D]
        if FULL and D == BLOCK_D:
            k = tl.load(keys + tile, eviction_policy="evict_first")
            v = tl.load(values + tile, eviction_policy="evict_first")
        else:
            inside = seen[:, None] & (d < D)[None, :]
            k = tl.load(keys + tile, mask=inside, other=0.0, eviction_policy="evict_first")
            v = tl.load(values + tile, mask=inside, other=0.0, eviction_policy="evict_first")
        entry = load_entries(row, start + BLOCK_N, last, U, BLOCK_N)

        scores = scaled(tl.dot(query, tl.trans(k), input_precision="ieee"), scale, cap, CAPPED)  # [M, N]
        if not FULL:
            slot = start + tl.arange(0, BLOCK_N)
            if not ORDERED:
                slot = slot % U + tl.load(starts + slot // U, mask=seen, other=0)
            if CHUNK:
                distance = position[:, None] - slot[None, :]  # [M, N]
                visible = seen[None, :] & (distance >= 0)
                if WINDOW > 0:
                    visible = visible & (distance < WINDOW)
                scores = tl.where(visible, scores, float("-inf"))
            else:
                if not ORDERED:
                    seen = seen & (slot <= position)
                if WINDOW > 0:
                    seen = seen & (position - slot < WINDOW)
                scores = tl.where(seen[None, :], scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, 1))
        pivot = new_top
        if not FULL:
            pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        probs = tl.exp2(scores - pivot[:, None])
        decay = tl.exp2(top - pivot)
        if MASS:
            PIECE: tl.constexpr = min(U, BLOCK_N)
            by_piece = tl.sum(tl.reshape(probs, [BLOCK_M, BLOCK_N // PIECE, PIECE]), 2)  # [M, N / PIECE]
            piece = start // PIECE + tl.arange(0, BLOCK_N // PIECE)
            keep = piece_mask[:, None] & (piece * PIECE < last)[None, :]
            tl.store(piece_rows[:, None] + piece[None, :], pivot[:, None] + tl.log2(by_piece), mask=keep)
        total = total * decay + tl.sum(probs, 1)
        acc = acc * decay[:, None] + tl.dot(probs.to(v.dtype), v, input_precision="ieee")
        top = new_top

    nothing = total == 0.0
    divisor = tl.where(nothing, 1.0, total)
    return acc / divisor[:, None], tl.where(nothing, float("-inf"), top + tl.log2(divisor))
