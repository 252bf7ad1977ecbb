"""Plain-torch truth of every op: slow, obvious, any device. The other backends answer to these functions.

Shapes: T tokens of a step, B sequences, M table entries a sequence, u = unit_tokens, D = head_dim,
Hq query heads in groups of g = Hq / Hkv over Hkv KV heads. ``Lt`` and ``Ht`` are 1, or the number of layers and of
KV heads: a shared table and a per-(layer, head) table differ by broadcasting alone.

    table     int32 [Lt, B, Ht, M]   packed entries (layout.py); entries past the length are never looked at
    lengths   int32 [Lt, B, Ht]      slots, counted along the table, that may hold tokens; slot s lies in
                                     entry s // u at offset s % u and holds a token if that offset < the entry's
                                     valid count
    unit_pos  int32 [Lt, B, Ht, M]   position in the sequence of each entry's first slot; None: entry j starts at
                                     j * u (stored order is logical order)
    q_pos     int32                  position of each query
    q_span    int32 [T, 2]           half-open range of positions, (first, past-last), of the bidirectional span that a
                                     query belongs to; (0, 0): none

A query sees a key when ``key_pos <= q_pos`` and, with a window W > 0, ``q_pos - key_pos < W``; besides, it sees the
whole of its own span, later keys and keys behind the window included (as for Gemma 3's images). ``softcap`` c > 0
replaces a score s by c * tanh(s / c). ``sinks [Hq]`` are learned logits that join the softmax with no value.
Scores, softmax and sums are fp32. A row that sees nothing gives 0 and a log-sum-exp of minus infinity.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.kernels.layout import entry_units, entry_valid
from octavo.kernels.reference.pages import append, rotated


def decode(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    unit_pos: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    want_mass: bool,
    want_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One query a sequence, ``q [B, Hq, D]``, over its table.

    Returns ``out [B, Hq, D]`` in q's dtype; when ``want_lse``, ``lse`` fp32 [B, Hq] (natural log of the softmax
    denominator, sink included); and when ``want_mass``, ``mass`` fp32 [B, Hkv, M]: the share of the softmax that fell
    on each entry, mean over the group's query heads (with no sink, a row sums to 1). What is not wanted is empty.
    """
    batch, q_heads, _ = q.shape
    kv_heads, entries = pool.shape[3], table.shape[3]
    out = torch.zeros_like(q)
    lse = q.new_full((batch, q_heads), -torch.inf, dtype=torch.float32)
    mass = q.new_zeros((batch, kv_heads, entries) if want_mass else (0,), dtype=torch.float32)
    group = q_heads // kv_heads
    for b in range(batch):
        for head in range(kv_heads):
            heads = slice(head * group, (head + 1) * group)
            keys, values, key_pos, entry = _gather(pool, layer, table, lengths, unit_pos, b, head)
            visible = _visible(key_pos, q_pos[b : b + 1], window)
            row_sinks = None if sinks is None else sinks[heads]
            probs, row_lse = _softmax(_scores(q[b, heads], keys, scale, softcap), visible, row_sinks)
            out[b, heads] = (probs @ _seen(values, visible)).to(q.dtype)
            lse[b, heads] = row_lse
            if want_mass:
                mass[b, head].index_add_(0, entry, probs.mean(0))
    return out, lse if want_lse else lse.new_empty(0), mass


def append_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    layer: int,
    slots: Tensor,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    *,
    append: Callable[..., None] = append,
    decode: Callable[..., tuple[Tensor, ...]] = decode,
) -> Tensor:
    """``append`` of one token a sequence, and ``decode`` of its query, in stored order that is logical order.

    Args:
        q: [B, Hq, D]; k, v: [B, Hkv, D]; before RoPE if there is ``cos``.
        slots: int64 [B], where K and V go: slot ``lengths - 1`` of each row's table, where nothing is read before. A
            row of length 0 is padding: it gives 0, and whether its K and V are stored is left open.
        cos, sin: [B, R] as for ``append_fused``; a backend may round turned queries once, to the pool's dtype.
        append, decode: the ops of a backend that has no call of its own for both.

    On a GPU the pool, ``table``, ``lengths`` and ``q_pos`` must not be written by the kernel just before, which may
    still run while they are read, but that it may be another ``append_decode``.

    Returns ``out [B, Hq, D]`` in q's dtype.
    """
    if cos is not None and sin is not None:
        q, k = rotated(q, cos, sin).to(q.dtype), rotated(k, cos, sin)
    append(k, v, pool, layer, slots)
    return decode(q, pool, layer, table, lengths, q_pos, None, sinks, scale, window, softcap, False, False)[0]


def prefill(
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
    want_lse: bool,
    q_span: Tensor | None = None,
    counts: Sequence[int] = (),
    contexts: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Ragged queries ``q [T, Hq, D]``: sequence b owns rows ``cu_q[b] : cu_q[b + 1]`` (int32 [B + 1]), at most
    ``max_q`` of them, at positions that follow on one another, but that the last one may be repeated (rows that fill a
    chunk up); rows past ``cu_q[B]`` belong to nobody and see nothing.
    The K and V of the queries' own tokens are already in the pool, and ``lengths`` counts them.

    ``counts`` and ``contexts`` [B] tell the host what the device knows from ``cu_q`` and ``q_pos``: the queries of each
    sequence, and the tokens before them. They change no result and may be left out; a backend may use them to choose
    how it computes. Who gives them says that every entry but a sequence's last is full or, where there is ``unit_pos``,
    that the tokens of a table lie in the order of their positions.

    Returns ``out [T, Hq, D]`` in q's dtype and, when ``want_lse``, ``lse`` fp32 [T, Hq]; otherwise ``lse`` is empty.
    """
    q_heads, kv_heads = q.shape[1], pool.shape[3]
    group = q_heads // kv_heads
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    bounds = cu_q.tolist()
    for b in range(len(bounds) - 1):
        rows = slice(bounds[b], bounds[b + 1])
        for head in range(kv_heads):
            keys, values, key_pos, _ = _gather(pool, layer, table, lengths, unit_pos, b, head)
            visible = _visible(key_pos, q_pos[rows], window, None if q_span is None else q_span[rows])
            for h in range(head * group, (head + 1) * group):
                row_sinks = None if sinks is None else sinks[h].expand(rows.stop - rows.start)
                probs, row_lse = _softmax(_scores(q[rows, h], keys, scale, softcap), visible, row_sinks)
                out[rows, h] = (probs @ _seen(values, visible)).to(q.dtype)
                lse[rows, h] = row_lse
    return out, lse if want_lse else lse.new_empty(0)


def gather(pool: Tensor, layer: int, table: Tensor, lengths: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The K and V of the first ``tokens`` tokens of every sequence, in the order of its table, without the slots that
    hold none: ``keys, values [B, Hkv, tokens, D]`` in the pool's dtype, zeros behind a sequence's last token."""
    shape = (table.shape[1], pool.shape[3], tokens, pool.shape[5])
    keys, values = pool.new_zeros(shape), pool.new_zeros(shape)
    for b in range(shape[0]):
        for head in range(shape[1]):
            k, v, _, _ = _gather(pool, layer, table, lengths, None, b, head)
            keys[b, head, : len(k)] = k[:tokens]
            values[b, head, : len(v)] = v[:tokens]
    return keys, values


def _gather(
    pool: Tensor, layer: int, table: Tensor, lengths: Tensor, unit_pos: Tensor | None, b: int, head: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values [n, D] that one row may see, with their positions and table entries, int64 [n]."""
    unit_tokens = pool.shape[4]

    def pick(x: Tensor) -> Tensor:
        return x[min(layer, x.shape[0] - 1), b, min(head, x.shape[2] - 1)]

    slot = torch.arange(int(pick(lengths)), device=pool.device)
    entry, offset = slot // unit_tokens, slot % unit_tokens
    filled = offset < entry_valid(pick(table))[entry]
    entry, offset = entry[filled], offset[filled]
    unit = entry_units(pick(table))[entry]
    start = entry * unit_tokens if unit_pos is None else pick(unit_pos)[entry].long()
    return pool[unit, layer, 0, head, offset], pool[unit, layer, 1, head, offset], start + offset, entry


def _scores(q: Tensor, keys: Tensor, scale: float, softcap: float) -> Tensor:
    scores = (q.float() @ keys.float().mT) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _visible(key_pos: Tensor, q_pos: Tensor, window: int, q_span: Tensor | None = None) -> Tensor:
    """Which keys [n] the queries [q] see, bool [q, n]."""
    distance = q_pos.long()[:, None] - key_pos[None, :]
    visible = (distance >= 0) & (distance < window) if window else distance >= 0
    if q_span is not None:
        first, past_last = q_span.long()[:, :, None].unbind(1)
        visible |= (first <= key_pos[None, :]) & (key_pos[None, :] < past_last)
    return visible


def _seen(values: Tensor, visible: Tensor) -> Tensor:
    """Values fp32 with 0 where nobody looks: there may be NaN behind a window, and 0 times NaN is NaN."""
    return values.float().masked_fill(~visible.any(0)[:, None], 0.0)


def _softmax(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over the visible keys of each row, and the log of its denominator; rows that see nothing give 0."""
    scores = scores.masked_fill(~visible, -torch.inf)
    joined = scores if sinks is None else torch.cat([scores, sinks.float()[:, None]], 1)
    if joined.shape[1] == 0:
        return scores, scores.new_full((len(scores),), -torch.inf)
    lse = joined.logsumexp(1)
    return torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[:, None]), lse
