"""The fast CPU path (semantics and shapes as in ``reference/attention.py``).

Decoding, and causal prefill in bf16 where the processor multiplies it, read K and V straight out of the pages, in
compiled code (``native.py``). All other prefill, and decoding where there is no compiler, gather them first: a run, the
K or V of one (unit, layer, head), is one contiguous row of the pool viewed
as [runs, unit_tokens * D], so one ``index_select`` brings the context of a head together, already head-major, whatever
the order of its units and whether tables are shared or per head::

    row of (unit, layer, K/V, head) = ((unit * layers + layer) * 2 + kv) * kv_heads + head

A group's query heads then share one matrix product with K and one with V. torch's own one-query attention is 4 to 30
times slower than that in bf16. Products accumulate in fp32; in a half-precision pool the gathered path rounds their
results, the scores, to its type before the softmax, as in transformers' eager attention.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from octavo.kernels import log
from octavo.kernels.cpu import native
from octavo.kernels.cpu.pages import append
from octavo.kernels.cpu.plan import plan_decode
from octavo.kernels.layout import entry_units, entry_valid
from octavo.kernels.reference import attention as reference

QUERY_BLOCK = 128
"""Queries of a prefill block: large enough for the matrix product, small enough for one head's scores to stay in
cache while they are masked and normalised."""


def decode(q: Tensor, pool: Tensor, *args, **named):  # type: ignore[no-untyped-def]
    done = native.decode(q, pool, *args, **named)
    if log.KERNELS:
        _say("decode", pool, done is not None, query_heads=q.shape[1], rows=len(q))
    return decode_gathered(q, pool, *args, **named) if done is None else done


append_decode = partial(reference.append_decode, append=append, decode=decode)


def _say(op: str, pool: Tensor, compiled: bool, **facts: object) -> None:
    log.chosen(op, "cpu", "compiled C" if compiled else "gathered, torch", pool, **facts)


def decode_gathered(
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
    heads, unit_tokens, dim = pool.shape[3:]
    starts = None if unit_pos is None else _of_layer(unit_pos, layer)
    table = _of_layer(table, layer)
    plan = plan_decode(tuple(pool.shape), pool.element_size(), table, _of_layer(lengths, layer), q_pos, starts, window)
    query = (q * scale).to(pool.dtype).unflatten(1, (heads, -1))  # [B, Hkv, g, D]
    if plan.order is not None:
        query = query[plan.order]
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3] if want_lse else (0,), dtype=torch.float32)
    mass = q.new_zeros((len(q), heads, table.shape[2]) if want_mass else (0,), dtype=torch.float32)
    row_sinks = None if sinks is None else sinks.float().view(1, heads, -1)
    for part in plan.parts:
        rows = slice(part.start, part.stop)
        runs = pool.view(-1, unit_tokens * dim).index_select(0, part.runs + 2 * layer * heads)
        keys, values = runs.view(2, part.stop - part.start, heads, part.entry.shape[1] * unit_tokens, dim)
        scores = _capped(query[rows] @ keys.mT, softcap)  # [b, Hkv, g, S]
        if part.hidden is not None and part.blank is not None:
            scores.masked_fill_(part.hidden, -torch.inf)
            values.flatten(0, 2).index_fill_(0, part.blank, 0.0)  # a weight of zero does not hide a NaN
        probs, row_lse = _softmax(scores, row_sinks, part.blind, want_lse)
        if row_lse is not None and want_lse:
            lse[rows] = row_lse
        torch.matmul(probs.to(pool.dtype), values, out=out[rows])
        if want_mass:
            share = probs.float().mean(2).unflatten(2, (-1, unit_tokens)).sum(3)  # [b, Hkv, M]
            entry = part.entry.clamp(max=mass.shape[2] - 1)[:, None].expand_as(share)
            mass[rows] = mass[rows].scatter_add(2, entry, share)
    back = slice(None) if plan.inverse is None else plan.inverse
    out = out.to(q.dtype).flatten(1, 2)[back]
    return out, lse.flatten(1)[back] if want_lse else lse, mass[back] if want_mass else mass


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
    args = (q, pool, layer, table, lengths, cu_q, q_pos, unit_pos, sinks, scale, window, softcap, want_lse, q_span)
    done = native.prefill(*args)
    if log.KERNELS:
        _say("prefill", pool, done is not None, query_heads=q.shape[1], window=window)
    return prefill_gathered(*args) if done is None else done


def prefill_gathered(
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
    want_lse: bool,
    q_span: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    heads, dim = pool.shape[3], pool.shape[5]
    group = q.shape[1] // heads
    bounds, positions = cu_q.tolist(), q_pos.tolist()
    query = (q * scale).to(pool.dtype).transpose(0, 1)  # [Hq, T, D]
    out = torch.empty_like(q)
    lse = q.new_full(q.shape[:2] if want_lse else (0,), -torch.inf, dtype=torch.float32)
    out[bounds[-1] :] = 0.0
    table, lengths = _of_layer(table, layer), _of_layer(lengths, layer)
    starts = None if unit_pos is None else _of_layer(unit_pos, layer)
    for b in range(len(bounds) - 1):
        context = _Context(pool, layer, table[b], lengths[b], None if starts is None else starts[b])
        for start in range(bounds[b], bounds[b + 1], QUERY_BLOCK):
            rows = slice(start, min(start + QUERY_BLOCK, bounds[b + 1]))
            spans = None if q_span is None else q_span[rows]
            part = context.seen_by(positions[start], positions[rows.stop - 1], window, spans)
            hidden = part.hidden(q_pos[rows], window, spans)  # [1 or Hkv, q, last slots]
            blind = hidden.shape[2] == part.keys.shape[1] and bool(hidden.all(2).any())
            for head in range(heads):
                of_head = slice(head * group, (head + 1) * group)
                block = query[of_head, rows].reshape(-1, dim)  # [g * q, D]
                scores = _capped((block @ part.keys[head].mT).unflatten(0, (group, -1)), softcap)  # [g, q, S]
                scores[..., scores.shape[2] - hidden.shape[2] :].masked_fill_(
                    hidden[min(head, len(hidden) - 1)], -torch.inf
                )
                row_sinks = None if sinks is None else sinks.float()[of_head, None]
                probs, row_lse = _softmax(scores, row_sinks, blind, want_lse)
                attended = (probs.to(pool.dtype).flatten(0, 1) @ part.values[head]).view(group, -1, dim)
                out[rows, of_head] = attended.transpose(0, 1).to(q.dtype)
                if row_lse is not None and want_lse:
                    lse[rows, of_head] = row_lse.T
    return out, lse


class _Context:
    """Keys and values ``[Hkv, S, D]`` of one sequence, which of the S slots hold tokens (``held`` bool [H, S], None:
    all of them), and at which positions (int64 [1 or H, S]). ``logical``: slot s is position s."""

    def __init__(self, pool: Tensor, layer: int, table: Tensor, lengths: Tensor, starts: Tensor | None) -> None:
        _, layers, _, heads, unit_tokens, dim = pool.shape
        used = -(-int(lengths.amax()) // unit_tokens)
        exists = torch.arange(used) < (-(-lengths // unit_tokens))[:, None]
        entries = table[:, :used].where(exists, 0)  # [H, M]; what is past a length may say anything
        run = (entry_units(entries) * layers + layer) * (2 * heads) + torch.arange(heads)[:, None]  # [Hkv, M]
        runs = pool.view(-1, unit_tokens * dim).index_select(0, torch.stack([run, run + heads]).flatten())
        self.keys, self.values = runs.view(2, heads, used * unit_tokens, dim)
        slot = torch.arange(used * unit_tokens)
        held = (slot < lengths[:, None]) & (slot % unit_tokens < entry_valid(entries).repeat_interleave(unit_tokens, 1))
        self.held = None if held.all() else held
        if self.held is not None:  # a weight of zero does not hide a NaN
            self.values.masked_fill_(~held[..., None], 0.0)
        self.logical = starts is None
        self.positions = slot[None]
        if starts is not None:
            self.positions = starts[:, :used].repeat_interleave(unit_tokens, 1) + slot % unit_tokens

    def seen_by(self, first_position: int, last_position: int, window: int, spans: Tensor | None) -> "_Context":
        """The slots that queries at these positions can see at most; all of them where stored order is not logical."""
        if not self.logical:
            return self
        first, past_last = max(0, first_position - window + 1) if window else 0, last_position + 1
        for begin, end in () if spans is None else spans.unique(dim=0).tolist():
            if begin < end:
                first, past_last = min(first, begin), max(past_last, end)
        reach = slice(first, past_last)
        part = object.__new__(_Context)
        part.keys, part.values = self.keys[:, reach], self.values[:, reach]
        part.held = None if self.held is None else self.held[:, reach]
        part.positions, part.logical = self.positions[:, reach], True
        return part

    def hidden(self, q_pos: Tensor, window: int, spans: Tensor | None) -> Tensor:
        """bool [1 or H, q, n] of what queries ``q_pos [q]`` must not see among the last n slots; they see all before.

        Where stored order is logical and nothing else hides, those are the slots that the queries themselves fill.
        """
        if (
            self.logical
            and not window
            and spans is None
            and (self.held is None or bool(self.held[:, : -len(q_pos)].all()))
        ):
            last = slice(max(0, self.keys.shape[1] - len(q_pos)), None)
        else:
            last = slice(0, None)
        distance = q_pos[None, :, None] - self.positions[:, None, last]
        hidden = distance < 0
        if window:
            hidden = hidden | (distance >= window)
        if spans is not None:
            first, past_last = spans[None, :, :, None].unbind(2)  # [1, q, 1]
            key_pos = self.positions[:, None, last]
            hidden = hidden & ~((first <= key_pos) & (key_pos < past_last))
        return hidden if self.held is None else hidden | ~self.held[:, None, last]


def _of_layer(x: Tensor, layer: int) -> Tensor:
    return x[min(layer, x.shape[0] - 1)]


def _capped(scores: Tensor, softcap: float) -> Tensor:
    return scores.float().div_(softcap).tanh_().mul_(softcap) if softcap else scores


def _softmax(scores: Tensor, sinks: Tensor | None, blind: bool, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Softmax over the last axis, in one pass that keeps the type (its arithmetic is fp32), and the log of its
    denominator, fp32, from the largest entry alone: log sum exp(s) = max s - log max p.

    ``blind`` says that some row sees nothing; it gives zeros. ``sinks`` broadcasts against the denominator.
    """
    if scores.shape[-1] == 0:
        nothing = scores.new_full(scores.shape[:-1], -torch.inf, dtype=torch.float32)
        return scores, nothing if sinks is None else nothing.logaddexp(sinks)
    probs = scores.softmax(-1)
    if blind:
        probs.nan_to_num_(0.0)
    if sinks is None and not want_lse:
        return probs, None
    lse = scores.amax(-1).float() - probs.amax(-1).float().log()
    if blind:
        lse.nan_to_num_(-torch.inf, neginf=-torch.inf)
    if sinks is None:
        return probs, lse
    total = lse.logaddexp(sinks)
    share = (lse - total).exp()
    if blind:
        share.nan_to_num_(0.0)  # neither a key nor a sink that is finite
    return probs * share[..., None], total
