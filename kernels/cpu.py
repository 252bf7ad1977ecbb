"""The fast CPU path: matrix products over head-major keys and values (semantics and shapes as in reference.py).

A run, the K or V of one (unit, layer, head), is one contiguous row of the pool viewed as [runs, unit_tokens * D], so
one ``index_select`` brings the context of a head together, already head-major, whatever the order of its units and
whether tables are shared or per head::

    row of (unit, layer, K/V, head) = ((unit * layers + layer) * 2 + kv) * kv_heads + head

A group's query heads then share one matrix product with K and one with V. torch's own one-query attention is 4 to 30
times slower than that in bf16. Products accumulate in fp32; in a half-precision pool their results, the scores, are
rounded to its type before the softmax, as in transformers' eager attention.
"""

import torch
from torch import Tensor

from octavo.kernels.layout import entry_units, entry_valid
from octavo.kernels.reference import copy_units

__all__ = ["append", "copy_units", "decode", "prefill"]

QUERY_BLOCK = 128
"""Queries of a prefill block: large enough for the matrix product, small enough for one head's scores to stay in
cache while they are masked and normalised."""

PADDING_BYTES = 1 << 19
"""Padding that costs about as much to copy and multiply as one more round of calls (0.1 ms)."""

Rows = slice | list[int]


def append(k: Tensor, v: Tensor, pool: Tensor, layer: int, slots: Tensor) -> None:
    _, layers, _, heads, unit_tokens, dim = pool.shape
    unit = torch.div(slots, unit_tokens, rounding_mode="floor")
    first = (unit * (2 * layers * heads - 1) + 2 * layer * heads) * unit_tokens + slots  # slots holds one unit already
    rows = first[:, None] + torch.arange(0, heads * unit_tokens, unit_tokens)  # [T, Hkv]
    flat = pool.view(-1, dim)
    flat.index_copy_(0, rows.flatten(), k.reshape(-1, dim).to(pool.dtype))
    flat.index_copy_(0, rows.flatten() + heads * unit_tokens, v.reshape(-1, dim).to(pool.dtype))


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
) -> tuple[Tensor, Tensor, Tensor]:
    batch, q_heads, _ = q.shape
    heads, unit_tokens = pool.shape[3], pool.shape[4]
    out = torch.empty_like(q)
    lse = q.new_empty((batch, q_heads), dtype=torch.float32)
    mass = q.new_zeros((batch, heads, table.shape[3]) if want_mass else (0,), dtype=torch.float32)
    table, lengths = _of_layer(table, layer), _of_layer(lengths, layer)
    starts = None if unit_pos is None else _of_layer(unit_pos, layer)
    first = torch.zeros(batch, dtype=torch.int64)
    if starts is None:
        lengths = torch.minimum(lengths, q_pos[:, None] + 1)
        if window:
            first = (q_pos.long() - window + 1).clamp(min=0) // unit_tokens
            table, lengths, starts = _behind_window(table, lengths, first, window, unit_tokens)
    row_sinks = None if sinks is None else sinks.float().view(1, heads, -1)
    row_lengths = lengths.amax(1).tolist()
    for rows in _batches(row_lengths, 2 * heads * pool.shape[5] * pool.element_size()):
        context = _Context(pool, layer, table, lengths, starts, rows)
        query = (q[rows] * scale).to(pool.dtype).unflatten(1, (heads, -1))  # [b, Hkv, g, D]
        scores = _capped(query @ context.keys.mT, softcap)  # [b, Hkv, g, S]
        seen = context.held if context.logical else context.seen(q_pos[rows, None, None], window)
        if seen is not None:
            context.clear(~seen)
            scores.masked_fill_(~seen[:, :, None], -torch.inf)
        probs, weight, row_lse = _softmax(scores, row_sinks)
        attended = probs.to(pool.dtype) @ context.values
        out[rows] = (attended if weight is None else attended * weight[..., None]).to(q.dtype).flatten(1, 2)
        lse[rows] = row_lse.flatten(1)
        if want_mass:
            probs = probs.float() if weight is None else probs * weight[..., None]
            share = probs.mean(2).unflatten(2, (-1, unit_tokens)).sum(3)  # [b, Hkv, M]
            entry = first[rows][:, None] + torch.arange(share.shape[2])
            entry = entry.clamp(max=mass.shape[2] - 1)[:, None].expand_as(share)
            mass[rows] = mass[rows].scatter_add(2, entry, share)
    return out, lse, mass


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
) -> tuple[Tensor, Tensor]:
    q_heads, dim, heads = q.shape[1], q.shape[2], pool.shape[3]
    group = q_heads // heads
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    bounds = cu_q.tolist()
    out[bounds[-1] :], lse[bounds[-1] :] = 0.0, -torch.inf
    table, lengths = _of_layer(table, layer), _of_layer(lengths, layer)
    starts = None if unit_pos is None else _of_layer(unit_pos, layer)
    for b in range(len(bounds) - 1):
        context = _Context(pool, layer, table, lengths, starts, slice(b, b + 1))
        if context.held is not None:
            context.clear(~context.held)
        for start in range(bounds[b], bounds[b + 1], QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, bounds[b + 1])
            positions = q_pos[start:stop]
            part = context.seen_by(int(positions[0]), int(positions[-1]), window)
            hidden = part.hidden(positions, window)
            for head in range(heads):
                of_head = slice(head * group, (head + 1) * group)
                query = (q[start:stop, of_head] * scale).to(pool.dtype).transpose(0, 1)  # [g, q, D]
                scores = _capped(
                    (query.reshape(-1, dim) @ part.keys[0, head].mT).view(group, stop - start, -1), softcap
                )
                part.mask(scores, hidden, head)
                probs, weight, row_lse = _softmax(scores, None if sinks is None else sinks.float()[of_head, None])
                attended = (probs.to(pool.dtype).view(len(query) * (stop - start), -1) @ part.values[0, head]).view(
                    group, stop - start, dim
                )
                attended = attended if weight is None else attended * weight[..., None]
                out[start:stop, of_head] = attended.to(q.dtype).transpose(0, 1)
                lse[start:stop, of_head] = row_lse.T
    return out, lse


class _Context:
    """Keys and values ``[b, Hkv, S, D]`` of some rows of a table ``[B, H, M]``, and which of the S slots hold tokens
    (``held`` bool [b, H, S], None: all of them) at which positions (int64 [b or 1, H, S])."""

    def __init__(
        self, pool: Tensor, layer: int, table: Tensor, lengths: Tensor, starts: Tensor | None, rows: Rows
    ) -> None:
        _, layers, _, heads, unit_tokens, dim = pool.shape
        lengths = lengths[rows]
        used = -(-int(lengths.amax()) // unit_tokens)
        entries = table[rows][:, :, :used]  # [b, H, M]
        run = (entry_units(entries) * layers + layer) * (2 * heads) + torch.arange(heads)[:, None]  # [b, Hkv, M]
        runs = pool.view(-1, unit_tokens * dim).index_select(0, torch.stack([run, run + heads]).flatten())
        self.keys, self.values = runs.view(2, len(entries), heads, used * unit_tokens, dim)
        slot = torch.arange(used * unit_tokens)
        offset = slot % unit_tokens
        held = slot < lengths[..., None]
        valid = entry_valid(entries)
        if (valid < unit_tokens).any():
            held &= offset < valid.repeat_interleave(unit_tokens, 2)
        self.held = None if held.all() else held
        self.logical = starts is None
        self.positions = slot[None, None]
        if starts is not None:
            self.positions = starts[rows][:, :, :used].repeat_interleave(unit_tokens, 2) + offset

    def clear(self, hidden: Tensor) -> None:
        """Zeros instead of the values of ``hidden`` bool [b, H, S] slots: a weight of zero does not hide a NaN."""
        slots = hidden.expand(self.values.shape[:3]).flatten().nonzero()[:, 0]
        self.values.flatten(0, 2).index_fill_(0, slots, 0.0)

    def seen_by(self, first_position: int, last_position: int, window: int) -> "_Context":
        """The slots that queries at these positions can see at most; all of them where stored order is not logical."""
        if not self.logical:
            return self
        reach = slice(max(0, first_position - window + 1) if window else 0, last_position + 1)
        part = object.__new__(_Context)
        part.keys, part.values = self.keys[:, :, reach], self.values[:, :, reach]
        part.held = None if self.held is None else self.held[:, :, reach]
        part.positions, part.logical = self.positions[:, :, reach], True
        return part

    def hidden(self, positions: Tensor, window: int) -> Tensor:
        """bool [H or 1, q, S] of what queries of one row must not see. Where stored order is logical and nothing else
        hides, only the last slots, which the queries themselves fill, are given: all others are seen by all."""
        if self.logical and not window and self.held is None:
            return (self.positions[0, 0, -len(positions) :] > positions[:, None])[None]
        seen = self.seen(positions.view(-1, 1, 1), window)  # [q, H or 1, S]
        return ~seen.transpose(0, 1)

    @staticmethod
    def mask(scores: Tensor, hidden: Tensor, head: int) -> None:
        """Minus infinity in ``scores [g, q, S]`` of one head where ``hidden`` says so."""
        scores[..., scores.shape[-1] - hidden.shape[-1] :].masked_fill_(hidden[min(head, len(hidden) - 1)], -torch.inf)

    def seen(self, q_pos: Tensor, window: int) -> Tensor:
        """bool [..., H or 1, S] for positions ``q_pos [..., 1, 1]`` of queries of the rows, or of the one row."""
        seen = self.positions <= q_pos
        if window:
            seen = seen & (q_pos - self.positions < window)
        return seen if self.held is None else seen & self.held


def _behind_window(
    table: Tensor, lengths: Tensor, first: Tensor, window: int, unit_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of a table ``[B, H, M]`` from entry ``first [B]`` on that a window can reach, its lengths, and the
    positions at which its entries start."""
    reach = min(table.shape[2], -(-window // unit_tokens) + 1)
    entry = first[:, None] + torch.arange(reach)  # [B, reach]
    picked = table.gather(2, entry.clamp(max=table.shape[2] - 1)[:, None].expand(-1, table.shape[1], -1))
    return (
        picked,
        (lengths - first[:, None] * unit_tokens).clamp(0, reach * unit_tokens),
        (entry * unit_tokens)[:, None],
    )


def _of_layer(x: Tensor, layer: int) -> Tensor:
    return x[min(layer, x.shape[0] - 1)]


def _batches(lengths: list[int], slot_bytes: int) -> list[Rows]:
    """Rows to be served together, padded to the longest of them. Rows are joined in order of length while the padding
    costs less than another round of calls."""
    batches: list[list[int]] = []
    padding = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches:
            padding += len(batches[-1]) * (lengths[row] - lengths[batches[-1][-1]]) * slot_bytes
        if batches and padding <= PADDING_BYTES:
            batches[-1].append(row)
        else:
            batches.append([row])
            padding = 0
    return [slice(None)] if len(batches) == 1 else list(batches)


def _capped(scores: Tensor, softcap: float) -> Tensor:
    return scores.float().div_(softcap).tanh_().mul_(softcap) if softcap else scores


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Softmax over the last axis, in one pass that keeps the type (its arithmetic is fp32); the factor that a sink
    leaves of it, None without sinks; and the log of the denominator, fp32. A row that sees nothing gives zeros.

    The denominator comes from the largest entry alone: log sum exp(s) = max s - log max p.
    """
    if scores.shape[-1] == 0:
        nothing = scores.new_full(scores.shape[:-1], -torch.inf, dtype=torch.float32)
        return scores, None, nothing if sinks is None else nothing.logaddexp(sinks)
    peak = scores.amax(-1).float()
    blind = peak.isinf()
    probs = scores.softmax(-1)
    if blind.any():
        probs.masked_fill_(blind[..., None], 0.0)
    lse = torch.where(blind, -torch.inf, peak - probs.amax(-1).float().log())
    if sinks is None:
        return probs, None, lse
    total = torch.logaddexp(lse, sinks)
    return probs, (lse - total).exp(), total
