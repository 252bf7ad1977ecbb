"""Paged K and V for the races of attention: a page-major pool that is never warm, and tables of scattered pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.layout import entry_units, pack_entries, pool_shape

COLD_BYTES = 500e6
"""K and V that the calls of a round read at least, over all layers: far more than an L2 holds."""

CPU_TOKENS, CPU_BATCH, CPU_KV_HEADS = 64, 2, 2
"""What shapes are cut to in Triton's interpreter, where a race checks its own code and nothing else."""


@dataclass(frozen=True)
class Shape:
    """A batch of sequences of bf16 heads.

    Attributes:
        lengths: tokens of each sequence.
        queries: of each sequence, its last tokens; 1 is a decode.
        heads, kv_heads, head_dim: of a layer.
        unit: tokens of a unit.
        pages: sizes of a sequence's pages in tokens, in turn; each is contiguous.
        capacity: tokens that a table has room for; 0 is the longest sequence.
    """

    lengths: tuple[int, ...]
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    unit: int = 16
    pages: tuple[int, ...] = (16,)
    capacity: int = 0

    @property
    def token_bytes(self) -> int:
        """K and V of a token and layer, in bf16."""
        return 2 * self.kv_heads * self.head_dim * 2

    @property
    def kv_bytes(self) -> int:
        """What attention over all sequences reads of a layer at least."""
        return sum(self.lengths) * self.token_bytes

    def fitting(self, device: torch.device) -> Shape:
        """The shape, or on a CPU a small part of it."""
        if device.type != "cpu":
            return self
        lengths = tuple(max(n * CPU_TOKENS // max(self.lengths), self.queries) for n in self.lengths[:CPU_BATCH])
        kv_heads = min(self.kv_heads, CPU_KV_HEADS)
        heads = self.heads // self.kv_heads * kv_heads
        return replace(self, lengths=lengths, heads=heads, kv_heads=kv_heads, capacity=0)


class Paged:
    """The tensors of a shape: ``layers`` of them, enough to be cold, in one pool, and one table for all layers.

    Attributes:
        pool: bf16 [units, layers, 2, kv_heads, unit, head_dim], random.
        table: int32 [1, B, 1, M]; the pages of all sequences lie in random order.
        lengths: int32 [1, B, 1].
        q: bf16 [B * queries, heads, head_dim].

    On a CPU both are fp32 and small.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape = shape.fitting(device)
        unit, batch = shape.unit, len(shape.lengths)
        sequences = [_page_units(length, shape) for length in shape.lengths]
        rows = _scattered(sequences)
        units = sum(map(sum, sequences))
        self.layers = 2 if device.type == "cpu" else min(max(math.ceil(COLD_BYTES / shape.kv_bytes), 2), 128)
        # Triton's interpreter multiplies bf16 wrongly.
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        size = pool_shape(units, self.layers, shape.kv_heads, unit, shape.head_dim)
        self.pool = torch.empty(size, device=device, dtype=dtype).normal_()
        table = torch.zeros((1, batch, 1, math.ceil(max(shape.capacity, *shape.lengths) / unit)), dtype=torch.int32)
        for b, (row, length) in enumerate(zip(rows, shape.lengths, strict=True)):
            held = math.ceil(length / unit)
            table[0, b, 0, :held] = pack_entries(row[:held], unit)
        self.table = table.to(device)
        self.lengths = torch.tensor(shape.lengths, device=device, dtype=torch.int32).view(1, -1, 1)
        self.q = torch.randn((batch * shape.queries, shape.heads, shape.head_dim), device=device, dtype=dtype)
        last = torch.arange(-shape.queries, 0, device=device, dtype=torch.int32)
        self.q_pos = (self.lengths.view(-1, 1) + last).flatten()
        self.cu_q = torch.arange(batch + 1, device=device, dtype=torch.int32) * shape.queries

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    def decode_args(self, layer: int) -> tuple[Any, ...]:
        """Arguments of ``ops.decode`` but for the backend: no window, cap, sinks, mass or log-sum-exp."""
        scores = (None, None, self.scale, 0, 0.0)
        return (self.q, self.pool, layer, self.table, self.lengths, self.q_pos, *scores, False, False)

    def prefill_args(self, layer: int) -> tuple[Any, ...]:
        """The same of ``ops.prefill``."""
        scores = (None, None, self.scale, 0, 0.0)
        where = (self.q, self.pool, layer, self.table, self.lengths, self.cu_q, self.q_pos)
        return (*where, *scores, self.shape.queries, False)

    def contiguous(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [B, kv_heads, tokens, head_dim] of sequences of one length, for rivals that know no pages."""
        context, unit = self.shape.lengths[0], self.shape.unit
        assert len(set(self.shape.lengths)) == 1
        units = entry_units(self.table[0, :, 0, : math.ceil(context / unit)])
        runs = self.pool[units, layer]  # [B, M, 2, kv_heads, unit, head_dim]
        k, v = (x.transpose(1, 2).flatten(2, 3)[:, :, :context].contiguous() for x in runs.unbind(2))
        return k, v


def _page_units(length: int, shape: Shape) -> list[int]:
    """Units of each page of a sequence; what the last page has beyond the end is not used."""
    found: list[int] = []
    while sum(found) * shape.unit < length:
        found.append(shape.pages[len(found) % len(shape.pages)] // shape.unit)
    return found


def _scattered(sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Unit ids int64 of each sequence: the pages of all lie one after another in random order, from unit 1 on."""
    sizes = torch.tensor([size for pages in sequences for size in pages])
    order = torch.randperm(len(sizes))
    starts = torch.empty_like(sizes)
    starts[order] = sizes[order].cumsum(0) - sizes[order] + 1
    first = starts.repeat_interleave(sizes)
    within = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return list((first + within).split([sum(pages) for pages in sequences]))
