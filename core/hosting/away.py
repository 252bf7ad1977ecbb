"""Pages that are in the host tier alone, as one decode step reads them (interfaces.AwayPages)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from octavo.core.execution.captured_calls import CapturedCalls
from octavo.core.hosting.copies_ahead import CopiesAhead
from octavo.core.hosting.interfaces import ResidentSets
from octavo.core.memory.layer_groups import LayerPlan
from octavo.kernels import ops
from octavo.kernels.layout import ID_SHIFT, entry_units, pack_entries


class Waits:
    """Seconds that a device spent on fetches which a layer had to wait for.

    On a GPU events stand around each, and are read when the step's results have been; elsewhere a copy is made by the
    time it returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._seconds = 0.0

    def mark(self) -> None:
        """A wait begins, or ends."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._seconds = time.perf_counter() - self._seconds

    def forget(self) -> None:
        """A wait that has begun does not end."""
        self._events, self._seconds = [], 0.0

    def take(self) -> float:
        """Seconds since the last call. Precondition: the device has done what it was given."""
        if self._cuda:
            pairs = zip(self._events[::2], self._events[1::2], strict=True)
            self._seconds = sum(begin.elapsed_time(end) for begin, end in pairs) / 1000
            self._events = []
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass
class StepAway:
    """See the protocol. K units a page and slice; M entries of the step's tables.

    Attributes:
        kv, host_kv: the two pools, [units, unit layers, 2, Hkv, unit_tokens, D].
        host_units: int32 [b, P, slices, K], where each page lies in the host's pool.
        frame_units: int32 [b, F, slices, K], where each frame lies in the device's.
        whole_entries: int32 [b, W, M], where the runs of a page in the W layers that read everything lie on the device,
            as entries of the pool seen as ``[units * unit layers, 1, ...]``.
        whole_layers: which those layers are.
        digest_rows: int64 [b, P], of the digest store.
        calls: replays what many small operations make of these.
        ahead: the copies that are made beside the model's work.
        foresees: whether the method wants to know what queries layers are going to ask.
        lookups, misses: int64 [b], pages that were chosen, and not in a frame.
        fetched: int64 [b], pages that came from the host for them; prefetched: ahead.
        prefetched_read: int64 [b], pages that came ahead, in whatever step, and were read in this for the first time.
    """

    kv: Tensor
    host_kv: Tensor
    plan: LayerPlan
    backend: str
    sets: ResidentSets
    rows: Tensor
    count: Tensor
    host_units: Tensor
    frame_units: Tensor
    whole_entries: Tensor
    whole_layers: tuple[int, ...]
    digest_rows: Tensor
    waits: Waits
    calls: CapturedCalls
    ahead: CopiesAhead
    foresees: bool
    lookups: Tensor = field(init=False)
    misses: Tensor = field(init=False)
    fetched: Tensor = field(init=False)
    prefetched: Tensor = field(init=False)
    prefetched_read: Tensor = field(init=False)

    def __post_init__(self) -> None:
        counts = torch.zeros((5, len(self.rows)), dtype=torch.int64).to(self.kv.device)
        self.lookups, self.misses, self.fetched, self.prefetched, self.prefetched_read = counts

    def is_away(self, pages: int) -> Tensor:
        """bool [b, pages], which of the first pages are."""
        return torch.arange(pages, device=self.count.device) < self.count[:, None]

    def entries(self, layer: int, frames: Tensor) -> Tensor:
        units = self._of(self.frame_units[:, :, self._slice(layer)], frames)  # [b, Hkv, S, K]
        return pack_entries(units, self.kv.shape[4]).flatten(2)

    @property
    def framed(self) -> list[int]:
        """The layers that read what they choose out of frames."""
        return [layer for layer in self.plan.groups[0].layers if layer not in self.whole_layers]

    def following(self, layer: int) -> int | None:
        return next((later for later in self.framed if later > layer), None)

    def fetch(self, layer: int, pages: Tensor, frames: Tensor, missing: Tensor, *, ahead: bool = False) -> None:
        """1. Each missing page is K units, and in each the layer's K and V run of the head: 2 K pairs of runs.
        2. The pairs of missing pages move to the front of the list, whose length stays on the device.
        3. One launch copies them, out of pinned memory."""
        place = self.plan.places[layer]
        units = self.host_units[:, :, place.slice], self.frame_units[:, :, place.slice]
        key = layer, ahead, pages.shape, self.host_units.shape
        listed = self.calls(key, partial(self._listed, place.unit_layer), *units, pages, frames, missing)
        copy = partial(ops.transfer_counted, self._runs(self.host_kv), self._runs(self.kv), *listed, self.backend)
        if ahead:
            self.prefetched += missing.sum((1, 2))
            self.ahead.add(layer, copy, *listed)
            return
        self.fetched += missing.sum((1, 2))
        self.waits.mark()
        self.ahead.wait(layer)
        copy()
        self.waits.mark()

    def counted(self, lookups: Tensor, misses: Tensor, prefetched_read: Tensor) -> None:
        self.lookups += lookups
        self.misses += misses
        self.prefetched_read += prefetched_read

    def whole(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """The pool and the table int32 [1, b, 1, M] with which layer 0 of that pool reads all pages of a layer, whose
        block table is ``table`` int32 [b, M]. Packed runs of several layers take turns in the layers of a unit, so the
        pool is seen as one whose units have a layer each."""
        layers = self.kv.shape[1]
        own = entry_units(table) * layers + self.plan.places[layer].unit_layer
        here = pack_entries(own, 0) | (table & ((1 << ID_SHIFT) - 1))
        page_units = self.host_units.shape[3]
        is_away = torch.arange(table.shape[1], device=table.device) < self.count[:, None] * page_units
        entries = self.whole_entries[:, self.whole_layers.index(layer)].where(is_away, here)
        return self.kv.view(-1, 1, *self.kv.shape[2:]), entries[None, :, None]

    def _slice(self, layer: int) -> int:
        return self.plan.places[layer].slice

    def _of(self, units: Tensor, index: Tensor) -> Tensor:
        """``units`` [b, n, K] at ``index`` int64 [b, Hkv, S], as [b, Hkv, S, K]."""
        flat = index.flatten(1)[..., None].expand(-1, -1, units.shape[2])
        return units.gather(1, flat).view(*index.shape, -1)

    def _runs(self, pool: Tensor) -> Tensor:
        return pool.view(-1, 1, 1, 1, *pool.shape[4:])

    def _listed(
        self, unit_layer: int, host_units: Tensor, frame_units: Tensor, pages: Tensor, frames: Tensor, missing: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pairs of runs int32 [n, 2], those of missing pages first, and how many they are, int32 [1]. Of the two pools'
        units int32 [b, P or F, K] those of a slice."""
        heads = self.kv.shape[3]
        both = torch.stack([self._of(host_units, pages), self._of(frame_units, frames)], -1)  # units [b, Hkv, S, K, 2]
        head = torch.arange(heads, dtype=torch.int32, device=both.device)[:, None, None, None]
        keys = (both * self.kv.shape[1] + unit_layer) * (2 * heads) + head
        pairs = torch.stack([keys, keys + heads], -2).flatten(3, 4).flatten(0, 2)  # [b * Hkv * S, 2 K, 2]
        wanted = missing.flatten()
        at = wanted.cumsum(0)
        listed = torch.empty((len(wanted) + 1, *pairs.shape[1:]), dtype=torch.int32, device=both.device)
        listed[(at - 1).where(wanted, len(wanted))] = pairs  # the last place is for what is not wanted
        return listed.flatten(0, 1), (at[-1:] * pairs.shape[1]).to(torch.int32)
