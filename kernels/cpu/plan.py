"""What every layer of a decoding step shares on a CPU: which rows go together, and which runs and slots they need.

A table says the same for all layers, so the index arithmetic is done once a step and each layer only adds its offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from octavo.kernels.layout import entry_units, entry_valid

PADDING_BYTES = 1 << 19
"""Padding that costs about as much to copy and multiply as one more round of calls (0.1 ms)."""

REMEMBERED = 4
"""Plans kept: one for each shared table of a step (the dense rows, and methods whose heads agree)."""


@dataclass(frozen=True)
class DecodePart:
    """Rows ``start`` to ``stop``, in the plan's order, served by one round of calls and padded to S slots.

    ``runs`` int64 [2 * b * Hkv * M] are the runs of K, then of V, in layer 0. ``hidden`` bool [b, H, 1, S] are the
    slots that a row's query must not see, and ``blank`` int64 their places in ``[b * Hkv * S]``; None if it sees all.
    ``entry`` int64 [b, M] are the table entries. ``blind`` says that some row sees nothing.
    """

    start: int
    stop: int
    runs: Tensor
    hidden: Tensor | None
    blank: Tensor | None
    entry: Tensor
    blind: bool


@dataclass(frozen=True)
class DecodePlan:
    """``order`` int64 [B] sorts the rows by length, ``inverse`` sorts them back; None where they stay as they are."""

    parts: list[DecodePart]
    order: Tensor | None
    inverse: Tensor | None


_remembered: list[tuple[tuple[object, ...], tuple[Tensor | None, ...], DecodePlan]] = []


def plan_decode(
    shape: tuple[int, ...],
    itemsize: int,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    starts: Tensor | None,
    window: int,
) -> DecodePlan:
    """The plan for one layer's ``table [B, H, M]``, ``lengths [B, H]`` and ``starts [B, H, M]`` in a pool of ``shape``.

    The last few plans of shared tables are remembered and found by the contents of these tensors.
    """
    if table.shape[1] > 1:
        return _plan(shape, itemsize, table, lengths, q_pos, starts, window)
    fixed, inputs = (shape, itemsize, window), (table, lengths, q_pos, starts)
    for known, tensors, plan in _remembered:
        if known == fixed and all(_same(a, b) for a, b in zip(tensors, inputs, strict=True)):
            return plan
    plan = _plan(shape, itemsize, table, lengths, q_pos, starts, window)
    _remembered.insert(0, (fixed, tuple(None if x is None else x.clone() for x in inputs), plan))
    del _remembered[REMEMBERED:]
    return plan


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _plan(
    shape: tuple[int, ...],
    itemsize: int,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    starts: Tensor | None,
    window: int,
) -> DecodePlan:
    _, _, _, heads, unit_tokens, dim = shape
    batch = len(table)
    first = torch.zeros(batch, dtype=torch.int64)
    if starts is None:
        lengths = torch.minimum(lengths, q_pos[:, None] + 1).clamp(min=0)  # a query may stand before all tokens
        if window:
            first = (q_pos.long() - window + 1).clamp(min=0) // unit_tokens
            table, lengths, starts = _behind_window(table, lengths, first, window, unit_tokens)
    longest = lengths.amax(1)
    order = longest.argsort(stable=True)
    bounds = _bounds(longest[order].tolist(), 2 * heads * dim * itemsize)
    if len(bounds) == 2:
        order = torch.arange(batch)
    parts = []
    for start, stop in pairwise(bounds):
        rows = order[start:stop]
        used = -(-int(longest[rows].max()) // unit_tokens)
        entries, filler = _fill(table[rows, :, :used], lengths[rows], unit_tokens)
        runs = entry_units(entries) * (shape[1] * 2 * heads) + torch.arange(heads)[:, None]  # [b, Hkv, M]
        slot = torch.arange(used * unit_tokens)
        seen = slot < lengths[rows][..., None]  # [b, H, S]
        seen &= slot % unit_tokens < entry_valid(entries).repeat_interleave(unit_tokens, 2)
        if starts is not None:
            position = starts[rows, :, :used].repeat_interleave(unit_tokens, 2) + slot % unit_tokens
            distance = q_pos[rows].view(-1, 1, 1) - position
            seen &= (distance >= 0) & (distance < window) if window else distance >= 0
        all_seen = bool(seen.all())
        parts.append(
            DecodePart(
                start=start,
                stop=stop,
                runs=torch.stack([runs, runs + heads]).flatten(),
                hidden=None if all_seen else ~seen[:, :, None],
                blank=None if all_seen else _blank(seen, filler if starts is None else None, heads, unit_tokens),
                entry=first[rows, None] + torch.arange(used),
                blind=not bool(seen.any(2).all()),
            )
        )
    if len(parts) == 1:
        return DecodePlan(parts, None, None)
    return DecodePlan(parts, order, order.argsort())


def _fill(entries: Tensor, lengths: Tensor, unit_tokens: int) -> tuple[Tensor, Tensor]:
    """``entries [b, H, M]`` with each row's first in place of those past its length, which may say anything; and bool
    [b, H, M] of the places that so hold a whole unit of real tokens."""
    past = torch.arange(entries.shape[2]) >= (-(-lengths // unit_tokens))[..., None]
    first = entries[:, :, :1].where(lengths[..., None] > 0, 0)
    whole = (lengths[..., None] >= unit_tokens) & (entry_valid(first) == unit_tokens)
    return torch.where(past, first, entries), past & whole


def _blank(seen: Tensor, filler: Tensor | None, heads: int, unit_tokens: int) -> Tensor:
    """Places in ``[b * Hkv * S]`` of unseen slots whose values may be anything, NaN included."""
    unsafe = ~seen if filler is None else ~seen & ~filler.repeat_interleave(unit_tokens, 2)
    return unsafe.expand(-1, heads, -1).flatten().nonzero()[:, 0]


def _behind_window(
    table: Tensor, lengths: Tensor, first: Tensor, window: int, unit_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of a table ``[B, H, M]`` from entry ``first [B]`` on that a window can reach, its lengths, and the
    positions at which its entries start."""
    reach = min(table.shape[2], -(-window // unit_tokens) + 1)
    entry = first[:, None] + torch.arange(reach)  # [B, reach]
    picked = table.gather(2, entry.clamp(max=table.shape[2] - 1)[:, None].expand(-1, table.shape[1], -1))
    length = (lengths - first[:, None] * unit_tokens).clamp(0, reach * unit_tokens)
    return picked, length, (entry * unit_tokens)[:, None].expand_as(picked)


def _bounds(lengths: list[int], slot_bytes: int) -> list[int]:
    """Where to cut rows that are sorted by length, so that padding costs less than another round of calls."""
    bounds, padding = [0], 0
    for row in range(1, len(lengths)):
        padding += (row - bounds[-1]) * (lengths[row] - lengths[row - 1]) * slot_bytes
        if padding > PADDING_BYTES:
            bounds.append(row)
            padding = 0
    return [*bounds, len(lengths)]
