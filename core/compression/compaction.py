"""Carries out what a compressor decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequential
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.compression.interfaces import Compressor
from octavo.core.compression.kept_set import KeptSet
from octavo.core.compression.kept_tables import pack_runs, slab_entries, slab_pool
from octavo.core.compression.recallable import Recallable
from octavo.core.compression.sequence_context import SequenceContext, UnscoredItem
from octavo.core.compression.split_units import Slabs, SplitUnits
from octavo.core.encoding.encoded_items import EncodedItems
from octavo.core.execution.step_runner import StepRunner
from octavo.core.hf_model import HFModel
from octavo.core.memory.host_tier import HostTier
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_pool import PagePool
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence
from octavo.core.uploads import upload
from octavo.kernels.layout import MAX_UNITS, entry_valid


class Compaction:
    """Compresses sequences when they are due, between the forward pass that computes the last token in front of the
    decision and the drawing of the next.

    1. The compressor sees K and V of every layer without a window, in whole, and says which tokens of each KV head it
       keeps. The open page stays as it is.
    2. Where it drops: K and V of what is kept are read; the pages go back to the pool, whose exact ones stay findable,
       or, where it demotes, to the host tier; runs are taken, which the pages that have gone make room for unless
       others share them; K and V are written. Pages are read only, so whoever shares them notices nothing.
    3. Where it does not: the entries of the kept pages are listed, and nothing else changes.
    4. Where decode steps may ask pages of images back, all of those are pinned in the host tier before. If it has no
       room for them, or what is kept and the frames to come take as much as is freed, they stay where they are, as
       under 3, and the tokens are the same.

    Keys keep the positions that they were rotated by, and tokens to come count on from where the sequence is.
    """

    def __init__(
        self,
        model: HFModel,
        runner: StepRunner,
        pool: PagePool,
        plan: LayerPlan,
        scheduler: Scheduler,
        host: HostTier | None,
        read: Callable[[str | Sequential[int]], list[int]],
        items: EncodedItems,
    ) -> None:
        self._model = model
        self._runner = runner
        self._pool = pool
        self._plan = plan
        self._scheduler = scheduler
        self._host = host
        self._read = read
        self._items = items
        self.split = SplitUnits(pool, plan.unit_layers, model.spec.kv_heads)

    def require_positions(self, compressor: Compressor, tokens: int) -> None:
        """Refuse, with a ValueError, a sequence of which so many tokens may stand in front of a decision, behind which
        what is to be computed would have no place."""
        behind, most = compressor.behind(tokens, self._read), self._model.spec.max_tokens
        if tokens + behind > most:
            raise ValueError(
                f"to decide what is kept, {behind} tokens are computed behind the {tokens} in front of it, and "
                f"{self._model.spec.name} has {most} positions; compute fewer (scorer.chunk_tokens, or "
                "scorer.lookahead_tokens), or give a shorter prompt"
            )

    def validate(self) -> None:
        """Refuse, with a ValueError, what this engine cannot compress."""
        windows = self._model.spec.windows
        if any(windows) and len(self._plan.groups) == 1 and not all(windows):
            raise ValueError(
                f"{self._model.spec.name} has layers with a window and layers without, which only tables of their own "
                "let go of different tokens; set layer_groups=True"
            )
        slabs = (self._pool.most_units + 1) * self._plan.unit_layers
        if slabs > MAX_UNITS:
            raise ValueError(
                f"a pool of {self._pool.most_units} units of {self._plan.unit_layers} layers is {slabs} pieces, and a "
                f"table of each layer and head can name {MAX_UNITS}; lower pool_tokens"
            )

    def run(self, sequences: Iterable[Sequence]) -> list[tuple[Request, ValueError]]:
        """Compress those that have come to where they are due. Gives the requests whose images an encoder that is
        asked about them fails on, and why.

        If a compression is left half way, its sequence is computed again."""
        failed = []
        for sequence in sequences:
            if not sequence.is_due or sequence not in self._scheduler.running:
                continue
            try:
                with torch.inference_mode():
                    self._compress(sequence)
            except UnscoredItem as error:
                failed.append((sequence.request, error.reason))
            except BaseException:  # out of memory, or Ctrl-C while tokens behind it were computed
                if sequence in self._scheduler.running:
                    self._scheduler.preempt(sequence)
                raise
        return failed

    def _compress(self, sequence: Sequence) -> None:
        request, end = sequence.request, sequence.layout.first_token(sequence.layout.full_pages(sequence.computed))
        compressor, observation = request.compressor, sequence.observation
        assert compressor is not None and observation is not None, "the chunk that came here was observed"
        context = SequenceContext(self._model, self._runner, self._plan, sequence, self._read, self._items)
        kept = None if self._plan.groups[0].window else compressor.keep(context)
        sequence.observation, sequence.compressed = None, sequence.computed
        if kept is None or end == 0:
            return
        closed = (context.positions >= 0) & (context.positions < end)  # bool [L, Hkv, N]
        wanted = kept.tokens & closed
        if torch.equal(wanted, closed):
            return
        order = (~wanted).long().argsort(dim=2, stable=True)[..., : max(1, int(wanted.sum(2).max()))]
        meant = wanted.gather(2, order)
        positions = context.positions.expand_as(wanted).gather(2, order).masked_fill(~meant, -1)
        carry = None if kept.carry is None else kept.carry.gather(2, order).masked_fill(~meant, 0.0)
        recallable = None
        if compressor.recall is not None:
            recallable = Recallable.of(compressor.recall, context, sequence.layout, end, wanted)
        choice = _Choice(sequence, context, end, wanted, order, positions, carry, recallable)
        if compressor.drops and (recallable is None or self._shelve(choice, recallable)):
            self._drop(choice)
        else:
            self._hide(choice)

    def _shelve(self, choice: _Choice, recallable: Recallable) -> bool:
        """Have the host tier keep pages of images, the tail of the chain first; if it has no room for one, or that
        would free nothing, none of them."""
        assert self._host is not None
        sequence, pinned = choice.sequence, list[int]()
        layout, slices = sequence.layout, sequence.table.slices
        runs = (-(-choice.tokens // layout.unit_tokens)).sum(0).max()
        taken = -(-int(runs) // self._plan.unit_layers) + recallable.frame_units(slices)
        if taken >= layout.first_entry(layout.page_of(choice.end)) * slices:
            return False
        for at in reversed(recallable.pages):
            node = sequence.nodes[at] if at < len(sequence.nodes) else None
            if node is not None and not node.host[0]:
                units = self._pool.units_of(sequence.table.pages(at, at + 1), layout.page_entries(at) * slices)
                self._host.store(units[0], node, 0)
            if node is None or not node.host[0]:
                for page in reversed(pinned):
                    self._host.unpin(page)
                return False
            self._host.pin(node.host[0])
            pinned.append(node.host[0])
        recallable.shelve(self._host, pinned[::-1], slices)
        return True

    def _drop(self, choice: _Choice) -> None:
        """Let the pages go, and keep what was chosen in runs of its own."""
        sequence, tokens = choice.sequence, choice.tokens
        runs = -(-tokens // sequence.layout.unit_tokens)
        by_head: list[Slabs] | None = None
        try:
            moved = [choice.context.gathered(number, choice.order[number]) for number in range(len(choice.order))]
            self._let_go(sequence, sequence.layout.page_of(choice.end))
            if self._scheduler.make_room(lambda: self.split.units_for(runs.sum(0)), sequence):
                by_head = self.split.allocate(runs.sum(0))
                self._fill(choice, moved, by_head)
            elif choice.recallable is not None:
                choice.recallable.release()
        except BaseException:
            if by_head is not None:
                self.split.release(by_head)
            if choice.recallable is not None:
                choice.recallable.release()
            raise

    def _let_go(self, sequence: Sequence, end: int) -> None:
        """Of the pages before page ``end``, and of what an earlier compression has kept."""
        if sequence.request.compressor is not None and sequence.request.compressor.demotes:
            self._demote(sequence, end)
        sequence.table.drop_before(end)
        before, sequence.kept = sequence.kept, None
        if before is not None:
            before.release()

    def _fill(self, choice: _Choice, moved: list[tuple[Tensor, Tensor]], by_head: list[Slabs]) -> None:
        """Put K and V [Hkv, N, D] of what was chosen in each layer into runs, and have the sequence keep these."""
        sequence, tokens = choice.sequence, choice.tokens
        runs = -(-tokens // sequence.layout.unit_tokens)
        if self._host is not None:
            self._host.copy_out(self._runner.kv)  # what was evicted just now, before it is written over
        slabs = np.zeros((*runs.shape, max(1, int(runs.max()))), np.int64)
        slabs.transpose(1, 0, 2)[np.arange(slabs.shape[2]) < runs.T[..., None]] = np.concatenate(by_head)
        self._write(moved, upload(slabs, self._runner.kv.device), choice.positions)
        entries = pack_runs(slabs, tokens, sequence.layout.unit_tokens)
        sequence.kept = self._kept(choice, entries, runs, by_head, self._digests(choice, moved))

    def _demote(self, sequence: Sequence, end: int) -> None:
        """Let the host tier have the pages before page ``end`` that nobody else holds, the tail of the chain first, as
        far as it has room; these are not findable on the device any longer, and free once they are let go of."""
        assert self._host is not None
        table = sequence.table
        for at in reversed(range(table.first_page, min(end, len(sequence.nodes)))):
            page, size = table.pages(at, at + 1), sequence.layout.page_entries(at) * table.slices
            units = self._pool.units_of(page, size)[0]
            if table.copy_needed(at) or not self._host.store(units, sequence.nodes[at], 0):
                return
            self._pool.withdraw(page)

    def _write(self, moved: list[tuple[Tensor, Tensor]], slabs: Tensor, positions: Tensor) -> None:
        """Put K and V [Hkv, n, D] of each layer into runs of ``slabs`` int64 [L, Hkv, M], but for padding."""
        pool = slab_pool(self._runner.kv)
        unit_tokens = pool.shape[4]
        for number, (keys, values) in enumerate(moved):
            head, token = (positions[number] >= 0).nonzero(as_tuple=True)
            slab = slabs[number][head, token // unit_tokens]
            pool[slab, 0, 0, head, token % unit_tokens] = keys[head, token]
            pool[slab, 0, 1, head, token % unit_tokens] = values[head, token]

    def _hide(self, choice: _Choice) -> None:
        """The same, where the tokens are whole pages that stay: an entry is kept if its first token is."""
        context, order, unit_tokens = choice.context, choice.order, choice.sequence.layout.unit_tokens
        table, slots = context.tables.tables[:, 0], context.tables.slots[:, 0]  # [L, H, M], [L, H]
        at = torch.arange(table.shape[2], device=table.device) * unit_tokens
        valid = torch.minimum(entry_valid(table), slots[..., None] - at).clamp(min=0).expand(-1, order.shape[1], -1)
        firsts = (valid.cumsum(2) - valid).clamp(max=choice.wanted.shape[2] - 1)
        is_kept = (valid > 0) & choice.wanted.gather(2, firsts)
        whole = torch.equal((valid * is_kept).sum(2), choice.wanted.sum(2))
        assert whole, "a compressor that does not drop keeps whole pages"
        counts = is_kept.sum(2).cpu().numpy()
        listed = (~is_kept).long().argsort(dim=2, stable=True)[..., : max(1, int(counts.max()))]
        entries = table.expand_as(valid).gather(2, listed)
        if choice.recallable is not None:
            self._let_stay(choice.sequence, choice.recallable)
        moved = (context.gathered(number, order[number]) for number in range(len(order)))
        digests = self._digests(choice, moved)
        before = choice.sequence.kept
        choice.sequence.kept = self._kept(choice, entries.cpu().numpy(), counts, None, digests)
        if before is not None:
            before.release()

    def _let_stay(self, sequence: Sequence, recallable: Recallable) -> None:
        """Steps find the pages of images where they are."""
        layout, runner = sequence.layout, self._runner
        row = runner.tables.entries[:, runner.tables.row(sequence)]  # [slices, M]
        first = torch.tensor([layout.first_entry(page) for page in recallable.pages], device=row.device)
        at = first[:, None] + torch.arange(recallable.units, device=row.device)
        listed = slab_entries(row[:, at.flatten()], self._plan, runner.kv.shape[1]).view(-1, *at.shape)
        recallable.entries = listed.masked_fill(recallable.valid == 0, 0)

    def _kept(
        self,
        choice: _Choice,
        entries: NDArray[np.int32],
        counts: NDArray[np.int64],
        slabs: list[Slabs] | None,
        digests: dict[str, Tensor],
    ) -> KeptSet:
        device, counts = self._runner.kv.device, counts.astype(np.int32)
        return KeptSet(
            choice.end, upload(entries, device), upload(counts, device), choice.positions, choice.carry, slabs,
            self.split, choice.tokens.max(1).tolist(), digests, choice.recallable,
        )  # fmt: skip

    def _digests(self, choice: _Choice, moved: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Digests of the pages that what is kept of K and V [Hkv, n, D] of each layer makes, by part; none if no method
        chooses among them, otherwise all heads of a layer have as many, in whole pages."""
        method, context, tokens = choice.sequence.request.method, choice.context, choice.tokens
        page = context.page_tokens
        if method is None or method.digest is None:
            return {}
        found: dict[str, list[Tensor]] = {}
        for at, ((keys, values), kept) in enumerate(zip(moved, tokens, strict=True)):
            count = int(kept[0])
            assert (kept == count).all() and count % page == 0, "a method chooses among whole pages"
            heads, dim = keys.shape[0], keys.shape[2]
            k, v = (x[:, :count].view(heads, -1, page, dim).transpose(0, 1)[:, None] for x in (keys, values))
            for part, rows in method.digest.compute(k, v, context.layers[at : at + 1]).items():
                rows = rows[:, 0].transpose(0, 1).to(keys.dtype)  # [Hkv, pages, ...]
                missing = [0, 0] * (rows.dim() - 2) + [0, int(tokens.max()) // page - rows.shape[1]]
                found.setdefault(part, []).append(torch.nn.functional.pad(rows, missing, value=torch.nan))
        return {part: torch.stack(layers) for part, layers in found.items()}

    def pins(self, holders: Iterable[Sequence]) -> Iterable[int]:
        """The pages of the host tier that kept sets may recall, one for each pin."""
        sets = {id(sequence.kept): sequence.kept for sequence in holders if sequence.kept is not None}
        return (page for kept in sets.values() if kept.recallable is not None for page in kept.recallable.host_pages)

    def check(self, holders: Iterable[Sequence]) -> None:
        """Recount who holds which kept set and which runs, and which page is in which frame."""
        sets: dict[int, KeptSet] = {}
        held: dict[int, int] = {}
        for sequence in holders:
            if sequence.frames is not None:
                sequence.frames.check()
            if sequence.kept is not None:
                sets[id(sequence.kept)] = sequence.kept
                held[id(sequence.kept)] = held.get(id(sequence.kept), 0) + 1
        for key, kept in sets.items():
            if kept.holders != held[key]:
                raise AssertionError(f"a kept set counts {kept.holders} holders, {held[key]} hold it")
        self.split.check([kept.slabs for kept in sets.values() if kept.slabs is not None])


@dataclass(frozen=True)
class _Choice:
    """What a compressor keeps of a sequence in front of token ``end``: the ``wanted`` bool [L, Hkv, N] of the context's
    tokens. Those are the tokens ``order`` int64 [L, Hkv, n], with their ``positions`` int64 and what is carried on with
    them, fp32; position -1 is padding. ``recallable`` are the pages of images that steps may ask back."""

    sequence: Sequence
    context: SequenceContext
    end: int
    wanted: Tensor
    order: Tensor
    positions: Tensor
    carry: Tensor | None
    recallable: Recallable | None

    @property
    def tokens(self) -> NDArray[np.int64]:
        """How many of each layer and KV head, [L, Hkv]."""
        counts: NDArray[np.int64] = (self.positions >= 0).sum(2).cpu().numpy()
        return counts
