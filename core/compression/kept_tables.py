"""Block tables of each layer and KV head, for sequences that keep different tokens in each."""

from __future__ import annotations

from collections.abc import Sequence as Sequential
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from octavo.core.execution.device_tables import DeviceTables
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.sequence import Sequence
from octavo.core.uploads import upload
from octavo.kernels.layout import ID_SHIFT, entry_units, entry_valid


def slab_pool(kv: Tensor) -> Tensor:
    """The pool as one of units of a single layer: unit u's layers are the slabs u * layers + 0, 1, ..."""
    return kv.view(-1, 1, *kv.shape[2:])


@dataclass(frozen=True)
class KeptTables:
    """Tables int32 [L, b, H, M] of slabs, slot counts int32 [L, b, H] and positions int32 [L, b, H, M] of entries, for
    the L layers of the first group. H is 1 where no sequence has been compressed yet."""

    kv: Tensor
    plan: LayerPlan
    tables: Tensor
    slots: Tensor
    unit_pos: Tensor

    @classmethod
    def of(
        cls, kv: Tensor, plan: LayerPlan, device_tables: DeviceTables, sequences: Sequential[Sequence], ends: list[int]
    ) -> KeptTables:
        """The tables of sequences of which ``ends`` tokens are, or are about to be, in the pool."""
        made = [_wide(kv, plan, device_tables, s, end) for s, end in zip(sequences, ends, strict=True)]
        width = max(table.shape[2] for table, *_ in made)
        heads = max(table.shape[1] for table, *_ in made)

        def stack(index: int) -> Tensor:
            rows = [pad(each[index], (0, width - each[index].shape[2])).expand(-1, heads, -1) for each in made]
            return torch.stack(rows, 1)

        slots = torch.stack([slots.expand(-1, heads) for _, slots, _ in made], 1)
        return cls(slab_pool(kv), plan, stack(0), slots, stack(2))

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Table [1, b, H, M], slot counts [1, b, H] and positions [1, b, H, M] of a layer, in ``kv``."""
        at = self.plan.places[layer].group_layer
        return self.tables[at : at + 1], self.slots[at : at + 1], self.unit_pos[at : at + 1]


def _wide(
    kv: Tensor, plan: LayerPlan, device_tables: DeviceTables, sequence: Sequence, end: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence's tables [L, H, M], slot counts [L, H] and positions [L, H, M]: what is kept, then the units of its
    own pages since."""
    layout, kept = sequence.layout, sequence.kept
    unit_tokens, begin = layout.unit_tokens, 0 if kept is None else kept.end
    first, last = layout.first_entry(layout.page_of(begin)), layout.entries_for(end)
    own = device_tables.entries[:, device_tables.row(sequence), first:last]  # [slices, T]
    tail = slab_entries(own, plan, kv.shape[1])[:, None]  # [L, 1, T]
    starts = upload(layout.unit_pos(end)[first:], kv.device)
    stored = max(0, layout.stored_slots(end) - first * unit_tokens)  # of a sealed page, holes at its end do not count
    if kept is None:
        slots = torch.full(tail.shape[:2], stored, device=kv.device)
        return tail, slots.to(torch.int32), starts.expand_as(tail)
    at = torch.arange(kept.entries.shape[2] + last - first, device=kv.device)
    behind = at - kept.counts[..., None]  # [L, H, M], place among the entries since
    listed = pad(kept.entries, (0, last - first))
    unit_pos = torch.zeros_like(listed)  # kept tokens are in front of every query
    if last > first:
        since = behind.clamp(0, last - first - 1)
        listed = listed.where(behind < 0, tail.expand(-1, listed.shape[1], -1).gather(2, since))
        unit_pos = unit_pos.where(behind < 0, starts[since])
    slots = kept.counts * unit_tokens + stored
    return listed, slots.to(torch.int32), unit_pos


def slab_entries(entries: Tensor, plan: LayerPlan, unit_layers: int) -> Tensor:
    """Entries of slabs int32 [L, T] for the layers of the first group, from those of units [slices, T]."""
    places = [plan.places[layer] for layer in plan.groups[0].layers]
    of_slice = entries[[place.slice for place in places]]
    layers = torch.tensor([place.unit_layer for place in places], device=entries.device)[:, None]
    slabs = entry_units(of_slice) * unit_layers + layers
    return ((slabs << ID_SHIFT) | entry_valid(of_slice)).to(torch.int32)


def pack_runs(slabs: NDArray[np.int64], tokens: NDArray[np.int64], unit_tokens: int) -> NDArray[np.int32]:
    """Entries int32 [..., M] of ``slabs`` [..., M] that hold ``tokens`` [...] tokens one behind another."""
    filled = np.clip(tokens[..., None] - np.arange(slabs.shape[-1]) * unit_tokens, 0, unit_tokens)
    entries: NDArray[np.int32] = ((slabs << ID_SHIFT) | filled).astype(np.int32)
    return entries
