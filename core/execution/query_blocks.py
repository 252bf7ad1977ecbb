"""Prefill in blocks of queries that each read pages of their own (interfaces.PrefillPattern)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from octavo.core.interfaces import LayerTraits, PrefillPattern
from octavo.core.memory.layer_groups import LayerPlan
from octavo.kernels.layout import entry_units

if TYPE_CHECKING:
    from octavo.core.execution.attention import PrefillGroup

BlockWatch = Callable[[PrefillPattern, int, Tensor, Tensor, Tensor, Tensor], None]
"""Is shown, of a layer, ``out [T, Hq, D]`` and ``lse`` fp32 [T, Hq] of what was read, and both of all pages."""


@dataclass
class StepBlocks:
    """The blocks of one chunk, the same for all layers of a step; ``layer``, ``traits`` and ``q`` move on.

    ``tables`` int32 [slices, M] list the chunk's sequence; ``cu_q`` int32 [N + 1] are the blocks' bounds among the
    chunk's rows. ``elements_read`` counts what was read to choose, over layers, blocks and KV heads.
    """

    kv: Tensor
    plan: LayerPlan
    page_tokens: int
    block_tokens: int
    first: int
    tables: Tensor
    cu_q: Tensor
    layer: int = 0
    traits: LayerTraits = field(default_factory=lambda: LayerTraits(1.0))
    q: Tensor = field(default_factory=lambda: torch.empty(0))
    elements_read: int = 0

    @property
    def kv_heads(self) -> int:
        return self.kv.shape[3]

    @property
    def count(self) -> int:
        return len(self.cu_q) - 1

    @property
    def ends(self) -> Tensor:
        block = torch.arange(self.first + 1, self.first + self.count + 1, device=self.kv.device)
        return block * (self.block_tokens // self.page_tokens)

    @property
    def table(self) -> Tensor:
        """int32 [P * units of a page] of the present layer."""
        pages = (self.first + self.count) * (self.block_tokens // self.page_tokens)
        units = pages * (self.page_tokens // self.kv.shape[4])
        return self.tables[self.plan.places[self.layer].slice, :units]

    def keys(self) -> Tensor:
        _, _, _, heads, unit_tokens, dim = self.kv.shape
        before, last = self.first, self.first + self.count
        slots = (last * (last + 1) - before * (before + 1)) // 2 * self.block_tokens  # up to each block's end, added up
        self.elements_read += slots * heads * dim
        units = self.kv[entry_units(self.table), self.plan.places[self.layer].unit_layer, 0]  # [P * units, Hkv, u, D]
        pages = units.view(-1, self.page_tokens // unit_tokens, heads, unit_tokens, dim).transpose(1, 2)
        return pages.flatten(2, 3)


@dataclass
class BlockGroup:
    """Rows ``start`` to ``stop`` of the step: whole blocks of queries of one sequence under a prefill pattern.

    ``whole`` is the chunk as dense prefill takes it. ``pages_read`` counts, over layers, blocks and KV heads, the pages
    that the kernels were given where a pattern chose them.
    """

    start: int
    stop: int
    pattern: PrefillPattern
    whole: PrefillGroup
    blocks: StepBlocks
    pages_read: int = 0
    watch: BlockWatch | None = None


class ChosenPages(NamedTuple):
    """A table a block and KV head: ``table`` int32 [1, N, H, M], ``slots`` int32 [1, N, H] of it, and ``unit_pos``
    int32 [1, N, H, M], as ``ops.prefill`` takes them."""

    table: Tensor
    slots: Tensor
    unit_pos: Tensor


def choose_pages(group: BlockGroup, layer: int, q: Tensor, traits: LayerTraits) -> ChosenPages | None:
    """What the blocks of a chunk read in a layer, ``q [T, Hq, D]``; None where each reads all pages up to its end.

    ::

        page of the sequence   0 1 2 3 4 5 6 7 8 9 ...
        block 2, head 0        x . . x . x . . o o        x chosen, o the block's own
        its table              0 3 5 8 9                  all full, ascending, so its slots have no gaps; where a page's
                                                          tokens stand in the sequence is in ``unit_pos``
    """
    blocks, kv = group.blocks, group.blocks.kv
    blocks.layer, blocks.traits = layer, traits
    blocks.q = q.view(blocks.count, blocks.block_tokens, *q.shape[1:])
    chosen = group.pattern.choose(blocks)
    page = torch.arange(chosen.shape[2], device=kv.device)
    ends = blocks.ends[:, None, None]
    own = page >= ends - blocks.block_tokens // blocks.page_tokens
    chosen = (chosen | own) & (page < ends)
    counts = chosen.sum(2)  # [N, H]
    read, most, missed = torch.stack([counts.sum(), counts.max(), (ends[:, 0] - counts).sum()]).tolist()
    group.pages_read += read * (blocks.kv_heads // chosen.shape[1])
    if not missed:
        return None
    pages = chosen.to(torch.uint8).argsort(dim=2, descending=True, stable=True)[:, :, :most]  # [N, H, most]
    page_units = blocks.page_tokens // kv.shape[4]
    units = (pages[..., None] * page_units + torch.arange(page_units, device=kv.device)).flatten(2)
    slots = (counts * blocks.page_tokens).to(torch.int32)
    return ChosenPages(blocks.table[units][None], slots[None], (units * kv.shape[4]).to(torch.int32)[None])
