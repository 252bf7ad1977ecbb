"""Pages of images that the tokens of a decode step ask back."""

from __future__ import annotations

from collections.abc import Sequence as Sequential

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.core.compression.frames import Frames
from octavo.core.compression.recallable import Recallable
from octavo.core.execution.decode_state import method_seed
from octavo.core.execution.page_view import StepPages
from octavo.core.hosting.away import StepAway, Waits
from octavo.core.interfaces import LayerTraits
from octavo.core.memory.host_tier import HostTier
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.step_plan import Chunk
from octavo.kernels.layout import entry_units, pack_entries


class RecallStep:
    """The rows of a group of decodes that may ask pages back.

    For each layer and KV head of such a row:

    1. All pages of the images are rated by their digests, those that the head keeps as well.
    2. It asks for those that are among the best, as many as it keeps, and that it does not keep; the best of them, if
       there are more than frames. So what is read depends on the token's query, and on nothing that was read before.
    3. Pages in the host tier get frames; those that were not in one are fetched, before the layer attends.
    4. Their entries go in front of those of what is kept and all since::

        table    [ recalled pages, ascending | kept | since ... ]
    """

    def __init__(self, chunks: Sequential[Chunk], kv: Tensor, plan: LayerPlan, host: HostTier | None, backend: str):
        self._kv = kv
        self._rows = {
            row: _Asking(chunk, kv, plan, host, backend) for row, chunk in enumerate(chunks) if may_recall(chunk)
        }

    def joined(self, layer: int, traits: LayerTraits, q: Tensor, table: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Table int32 [1, b, H, M] of slabs and slots int32 [1, b, H] of a layer, with what ``q [b, Hq, D]`` asks
        for."""
        heads, unit_tokens = self._kv.shape[3:5]
        asked = {row: one.ask(layer, traits, q[row : row + 1]) for row, one in self._rows.items() if one.misses(layer)}
        if not asked:
            return table, slots
        table, slots = table[0].expand(-1, heads, -1), slots[0].expand(-1, heads)
        width, last = max(entries.shape[1] for entries, _ in asked.values()), table.shape[2] - 1
        front, counts = table.new_zeros((*table.shape[:2], width)), torch.zeros_like(slots)
        for row, (entries, count) in asked.items():
            front[row, :, : entries.shape[1]], counts[row] = entries, count
        behind = torch.arange(width + last + 1, device=table.device) - counts[..., None]  # [b, H, width + M]
        table = pad(front, (0, last + 1)).where(behind < 0, table.gather(2, behind.clamp(0, last)))
        return table[None], (slots + counts * unit_tokens)[None]

    def account(self) -> None:
        """Tell the sequences what was read to choose, and from the host. The device has computed the step."""
        for asking in self._rows.values():
            asking.account()


def may_recall(chunk: Chunk) -> bool:
    """Whether a chunk of one token may ask pages back: those behind the decision may."""
    kept = chunk.sequence.kept
    return kept is not None and kept.recallable is not None and chunk.sequence.sparse_span(chunk.start) is not None


class _Asking:
    """One row of b = 1."""

    def __init__(self, chunk: Chunk, kv: Tensor, plan: LayerPlan, host: HostTier | None, backend: str) -> None:
        assert chunk.sequence.kept is not None and chunk.sequence.kept.recallable is not None
        self._chunk, self._kv, self._plan = chunk, kv, plan
        self._pages: Recallable = chunk.sequence.kept.recallable
        self._frames: Frames | None = chunk.sequence.frames
        count = len(self._pages.pages)
        self._view = StepPages(
            kv=kv,
            backend=backend,
            plan=plan,
            page_tokens=self._pages.units * kv.shape[4],
            tables=_ints((plan.slices, 1, 0), kv),
            slots=_ints((1, 1, 1), kv),
            q_pos=_ints((1,), kv),
            n_pages=_ints((1,), kv) + count + 1,
            max_pages=count + 1,
            seeds=_ints((1,), kv).long() + method_seed(chunk.sequence, chunk.start),
            first_units=torch.arange(count + 1, device=kv.device)[None],
            parts=self._pages.parts,
        )
        self._away: StepAway | None = None
        if self._frames is not None:
            assert host is not None and self._pages.host_units is not None
            self._away = StepAway(
                kv=kv,
                host_kv=host.kv,
                plan=plan,
                backend=backend,
                sets=self._frames.sets,
                rows=self._frames.rows,
                count=self._view.n_pages.long() - 1,
                host_units=self._pages.host_units,
                frame_units=self._frames.units,
                whole_entries=_ints((1, 0, 0), kv),
                whole_layers=(),
                digest_rows=_ints((1, 0), kv).long(),
                waits=Waits(kv.device),
                calls=self._frames.calls,
                ahead=self._frames.ahead,
                foresees=False,
            )

    def misses(self, layer: int) -> bool:
        """Whether a head of a layer does without some page."""
        return self._pages.misses[self._plan.places[layer].group_layer]

    def ask(self, layer: int, traits: LayerTraits, q: Tensor) -> tuple[Tensor, Tensor]:
        """Entries int32 [Hkv, F U] of slabs of what ``q [1, Hq, D]`` asks for, and how many are meant, int32 [Hkv]."""
        pages, at, (heads, count) = self._pages, self._plan.places[layer].group_layer, self._pages.is_kept.shape[1:]
        self._view.enter(layer, traits)
        scores = pages.recall.score(q, self._view)[0, :, :count].expand(heads, -1)
        order = scores.nan_to_num(nan=-torch.inf).argsort(dim=1, descending=True, stable=True)
        place = torch.arange(count, device=q.device)
        asked = (place < pages.budget[at][:, None]) & ~pages.is_kept[at].gather(1, order)
        asked &= asked.cumsum(1) <= pages.frames
        asked = torch.zeros_like(asked).scatter(1, order, asked)
        chosen = (~asked).long().argsort(dim=1, stable=True)[:, : pages.frames]  # [Hkv, F], ascending
        n_chosen = asked.sum(1)
        valid = pages.valid[chosen]  # [Hkv, F, U]
        if self._frames is None or self._away is None:
            assert pages.entries is not None
            entries = pages.entries[at][chosen]
        else:
            is_read = (place[: pages.frames] < n_chosen[:, None])[None]
            frames, missing, came_ahead = self._frames.sets.take(at, self._away.rows, chosen[None], is_read, is_read)
            self._away.fetch(layer, chosen[None], frames, missing)
            self._away.counted(is_read.sum((1, 2)), missing.sum((1, 2)), came_ahead.sum((1, 2)))
            units = entry_units(self._away.entries(layer, frames)).view_as(valid)
            entries = pack_entries(units * self._kv.shape[1] + self._plan.places[layer].unit_layer, valid)
        return entries.flatten(1), (n_chosen * pages.units).to(torch.int32)

    def account(self) -> None:
        sequence, run_bytes = self._chunk.sequence, self._kv[0, 0, 0, 0].nbytes
        if self._chunk.start >= len(sequence.request.prompt):
            sequence.digest_bytes_read += int(self._view.elements_read) * self._kv.element_size()
        if self._away is not None:
            sequence.resident_lookups += int(self._away.lookups)
            sequence.resident_misses += int(self._away.misses)
            sequence.host_bytes_read += int(self._away.fetched) * 2 * self._pages.units * run_bytes


def _ints(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=like.device)
