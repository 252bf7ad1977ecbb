"""From a step plan to tensors, one forward pass, and what it read."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.compression.kept_pages import KeptPages
from octavo.core.compression.kept_tables import KeptTables
from octavo.core.compression.observation import Observation
from octavo.core.compression.recall_step import RecallStep, may_recall
from octavo.core.config import EngineConfig
from octavo.core.encoding.encoded_items import EncodedItems
from octavo.core.encoding.pieces import reused, stretches
from octavo.core.execution.attention import DecodeGroup, PagedStep, PrefillGroup
from octavo.core.execution.choosers import Choosers
from octavo.core.execution.decode_batch import DecodeBatch
from octavo.core.execution.decode_program import DecodeProgram
from octavo.core.execution.decode_state import method_seed
from octavo.core.execution.deviations import Comparison, Enough
from octavo.core.execution.device_tables import DeviceTables
from octavo.core.execution.drafts import UNREAD
from octavo.core.execution.flight import Flight, Row
from octavo.core.execution.lent_rows import lent_rows
from octavo.core.execution.page_copies import PageCopies
from octavo.core.execution.page_view import StepPages
from octavo.core.execution.pieces import PiecewisePass
from octavo.core.execution.query_blocks import BlockGroup, BlockWatch, StepBlocks
from octavo.core.execution.read_accounts import ReadAccounts
from octavo.core.execution.replayer import Replayer
from octavo.core.execution.rotary import Rotary, find_rotary
from octavo.core.execution.shared_runs import RunFinder
from octavo.core.execution.verification import Verification
from octavo.core.hf_model import HFModel
from octavo.core.hosting.hosted_pages import HostedPages
from octavo.core.interfaces import SparseMethod
from octavo.core.memory.digests import DigestStore
from octavo.core.memory.host_tier import HostTier
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_pool import PagePool
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence
from octavo.core.step_plan import Chunk, StepPlan
from octavo.core.uploads import upload
from octavo.kernels.products.product import choosing
from octavo.kernels.zero_copy import VirtualRows


def computes_beside(device: torch.device) -> bool:
    """Whether a device computes while the host goes on. On a CPU whoever launches waits for it, so that what is read
    later is later, and nothing else."""
    return device.type == "cuda"


class StepRunner:
    """Runs planned steps on the device. Owns the pool's memory, the device tables, the digests, and what methods have
    of their pages in the host tier: ``hosted``, by composition.

    ``copies`` counts copy-on-write copies of a page. ``block_watch`` is shown what chunks under a prefill pattern read
    and what they missed.

    Packing of a step's T tokens in one row::

        [ d d d d | s s | s | b b b b | p p p p p p | p p p ]
          dense     one     chunks    chunks of several tokens
          decodes   group   in        (prefill kernel)
                    a       blocks
                    method  of queries

    A chunk of one token is a decode whatever it is for: the kernels do not know prompts from outputs.
    """

    def __init__(
        self,
        model: HFModel,
        config: EngineConfig,
        kv: Tensor,
        backend: str,
        execution: str,
        pool: PagePool,
        plan: LayerPlan,
        max_entries: int,
        host: HostTier | None,
        items: EncodedItems,
    ) -> None:
        self.kv = kv
        self.backend = backend
        self._model = model
        self._pool = pool
        self._plan = plan
        self._host = host
        self._items = items
        self._page_tokens = config.text_page_tokens
        self._tables = DeviceTables(config.max_seqs, plan.slices, max_entries, kv.device)
        self._digests: dict[tuple[str, bool], DigestStore] = {}
        self.hosted: dict[str, HostedPages] = {}
        self._step_tokens = config.step_tokens
        self.copies = PageCopies(kv, backend)
        self.choosers = Choosers(model.spec, self._page_tokens)
        self.accounts = ReadAccounts(kv, model.spec.windows, self._page_tokens)
        self._runs: RunFinder | None = None
        if config.shared_decode and 0 in model.spec.windows:  # the first tables are those of layers without a window
            row_bytes = 2 * kv.shape[3] * kv.shape[5] * kv.element_size()  # of a token in one layer
            self._runs = RunFinder(self._page_tokens, config.shared_decode_bytes // row_bytes)
        self._program: DecodeProgram | None = None
        self._replayer: Replayer | None = None
        if execution != "eager":
            self._program = DecodeProgram(model, kv, plan, backend, self._tables, config.max_seqs, self._page_tokens)
            self._replayer = Replayer(
                self._program, self._tables, self.choosers, self._runs, self._digest_store, self.accounts,
                self._page_tokens,
            )  # fmt: skip
        self._beside = computes_beside(kv.device)
        self._pieces: PiecewisePass | None = None
        if self._program is not None and kv.device.type == "cuda":
            self._pieces = PiecewisePass(model, kv, plan, backend, config.max_seqs)
        self.rotary: Rotary | None = None  # known once images are reused
        self.block_watch: BlockWatch | None = None

    def learn_rotary(self) -> None:
        """Ask the model how its keys turn, once.

        Raises:
            UnsupportedModelError: not by their positions alone.
        """
        if self.rotary is None:
            self.rotary = find_rotary(self._model)

    def run(self, plan: StepPlan, scheduler: Scheduler) -> tuple[Tensor, list[Row]]:
        """Exchange pages with the host, let go of those that a method reads from there, copy what is to be written,
        make missing digests, compute the plan's tokens.
        Preconditions: its copies are queued, its images encoded.

        Gives fp32 logits of the rows that somebody wants, in the order of the list.
        """
        for chunk in plan.chunks:
            if chunk.sequence.request.hosting is not None and chunk.start >= chunk.sequence.sparse_spans[-1].start:
                self._hosted_by(chunk.sequence.request).offer(chunk.sequence)
        self._make_ready(scheduler)
        if self._program is not None:
            self._program.state.pass_by()
        chunks, step, rows, logits = self._compute(plan.chunks)
        self.accounts.step(step, chunks, self.hosted)
        return logits, rows

    def _compute(self, planned: list[Chunk]) -> tuple[list[Chunk], PagedStep, list[Row], Tensor]:
        """Pack chunks and compute them: in their order then, with the rows that somebody wants and fp32 logits of
        these."""
        chunks = sorted(planned, key=self._packing)
        step, rows = self._build(chunks)
        positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
        first = dict(zip(map(id, chunks), np.cumsum([0, *(c.count for c in chunks)]).tolist(), strict=False))
        wanted = np.array([first[id(r.chunk)] + r.position - r.chunk.start for r in rows], np.int64)
        ids = self._ids(chunks)
        inputs = ids, self._to_device(positions), self._to_device(wanted), step
        embedded = self._items.placed(chunks)
        try:
            if any(group.foresees for group in step.decodes):  # which calls layers: the pass is not replayed in pieces
                with self._model.foreseeing(step):
                    logits = self._model.forward(*inputs, embedded)
            elif self._pieces is not None and embedded is None and self._pieces.serves(len(ids), len(rows)):
                logits = self._pieces.forward(*inputs)
            else:
                # Most steps with many prompts have as many tokens as they may; how many rows want logits, nobody knows.
                with choosing(len(ids)) if len(ids) == self._step_tokens else nullcontext():
                    logits = self._model.forward(*inputs, embedded)
        except BaseException:
            self._forget_frames(chunks)
            raise
        return chunks, step, rows, logits.float()

    def _ids(self, chunks: list[Chunk]) -> Tensor:
        """The token ids of packed chunks; those that the host does not know are on the device."""
        ids = np.concatenate([np.asarray(c.token_ids, np.int64) for c in chunks])
        sent, unread = self._to_device(ids), [c.sequence for c in chunks if c.end > len(c.sequence.tokens)]
        places = np.flatnonzero(ids == UNREAD)
        if len(places):
            assert self._program is not None
            sent.index_copy_(0, self._to_device(places), self._program.state.last_tokens(self._tables.rows(unread)))
        return sent

    def compare(self, sequence: Sequence, scheduler: Scheduler) -> None:
        """Compute a sequence's next tokens, up to its last image, as far as the layer in which KV is compared, and let
        its layout say which tokens of its images are to be computed. What a request has chosen once it keeps.
        Preconditions as for ``run``."""
        self._make_ready(scheduler)
        spans = reused(sequence.layout, sequence.computed)
        reuse = spans[0].item.reuse
        assert reuse is not None and reuse.layer is not None
        deviations = []
        for start in range(sequence.computed, spans[-1].end, self._step_tokens):
            chunk = Chunk(sequence, start, min(self._step_tokens, spans[-1].end - start))
            step, _ = self._build([chunk])
            compared = Comparison(step, reuse.layer)
            ids = np.asarray(sequence.tokens[start : chunk.end], np.int64)
            with suppress(Enough):
                self._model.forward(
                    self._to_device(ids), self._to_device(np.arange(start, chunk.end)), None, compared,
                    self._items.placed([chunk]),
                )  # fmt: skip
            deviations.append(compared.deviations)
        joined = torch.cat(deviations)
        chosen = {}
        for item, start, end in spans:
            if not item.anew:
                tokens = reuse.choose(joined[start - sequence.computed : end - sequence.computed]).tolist()
                chosen[start] = replace(item, anew=stretches(tokens))
        sequence.request.layout = sequence.layout.changed(chosen)
        sequence.compares = False

    def launches(self, plan: StepPlan) -> bool:
        """Whether the tokens of a plan may be read later: ``launch`` it. If all of it can be replayed, it has a batch
        from now on; else it is worth while only where the device computes beside the host."""
        if self._replayer is None:
            return False
        found = self._replayer.batch_of(plan.chunks)
        plan.verification = found if isinstance(found, Verification) else None
        plan.batch = found.batch if isinstance(found, Verification) else found
        return plan.batch is not None or (self._beside and all(chunk.sequence.is_plain for chunk in plan.chunks))

    def carries(self, batch: DecodeBatch) -> bool:
        """Whether the device can decode on with a batch before its last tokens are read."""
        return self._replayer is not None and self._replayer.carries(batch)

    def launch(self, plan: StepPlan, scheduler: Scheduler, idle: bool) -> Flight | None:
        """Let the device, which may be ``idle``, compute a plan that this ``launches``; None if that draws nothing.
        Preconditions as for ``run``."""
        assert self._replayer is not None
        try:
            if plan.batch is None:
                return self._launch_chunks(plan.chunks, scheduler, time.perf_counter() if idle else 0.0)
            if plan.ahead and not plan.copies and self._host is None:
                self._tables.update(plan.changed)
                if plan.growth is not None:
                    self._tables.grow(plan.growth, self._replayer.rows(plan.batch)[plan.growth.members])
            else:
                self._make_ready(scheduler)
        except BaseException:
            self._replayer.forget()
            raise
        if plan.verification is not None:
            return self._replayer.verify(plan.verification)
        return self._replayer.launch(plan.batch, scheduler.running)

    def _launch_chunks(self, planned: list[Chunk], scheduler: Scheduler, begun: float) -> Flight | None:
        """The same of chunks of plain sequences."""
        assert self._replayer is not None
        self._make_ready(scheduler)
        chunks, step, rows, logits = self._compute(planned)
        for group in step.decodes:
            self.accounts.spared(group.slots_spared)
        if not rows:
            self._replayer.program.state.pass_by()
            return None
        flight = self._replayer.draw([Chunk(r.chunk.sequence, r.position, 1) for r in rows], logits, self.backend)
        work, counts = tuple((chunk.count, chunk.start) for chunk in chunks), np.array([r.chunk.count for r in rows])
        return replace(flight, counts=counts, chunks=work, begun=begun)

    def land(self, flight: Flight) -> NDArray[np.int64]:
        """The tokens of a flight, one a member of its batch, or a column of news of each, once the device has drawn
        them."""
        assert self._replayer is not None
        return self._replayer.land(flight)

    def resume(self, flight: Flight, alive: NDArray[np.bool_], batch: DecodeBatch, tokens: NDArray[np.int64]) -> None:
        """Let those of a verified flight that are ``alive`` go on as a ``batch``, behind their last ``tokens``."""
        assert self._replayer is not None
        self._replayer.resume(flight, alive, batch, tokens)

    def forget(self) -> None:
        """What the device carries from step to step may be anything."""
        if self._replayer is not None:
            self._replayer.forget()

    @property
    def tables(self) -> DeviceTables:
        """The block tables on the device, as the last step has left them."""
        return self._tables

    @property
    def digest_bytes(self) -> int:
        return sum(store.nbytes for store in self._digests.values())

    def _make_ready(self, scheduler: Scheduler) -> None:
        """Bring the device's tables up to date, and the pages that they list into the pool."""
        if self._runs is not None:
            self._runs.forget(scheduler.running)
        self._tables.sync(scheduler.running)
        for hosted in self.hosted.values():
            hosted.settle()
        if self._host is not None:
            self._host.copy_out(self.kv)
        for hosted in self.hosted.values():
            hosted.carry_out()
        self.copies.carry_out(self.rotary)
        if self._host is not None:
            self._host.copy_in(self.kv)

    def _forget_frames(self, chunks: list[Chunk]) -> None:
        """A pass was left, perhaps between giving frames to pages and fetching these."""
        for sequence in {id(chunk.sequence): chunk.sequence for chunk in chunks}.values():
            if sequence.request.hosting is not None:
                self._hosted_by(sequence.request).forget(sequence)
            if sequence.frames is not None:
                sequence.frames.forget()

    def _build(self, chunks: list[Chunk]) -> tuple[PagedStep, list[Row]]:
        rows = []
        for chunk in chunks:
            rows += [Row(chunk, p) for p in chunk.sequence.known_rows(chunk.start, chunk.end)]
            if not chunk.sequence.forced:  # the last token's row, and those of drafts
                rows += [Row(chunk, p) for p in range(max(chunk.start, len(chunk.sequence.tokens) - 1), chunk.end)]
        slots = np.ascontiguousarray(np.concatenate([self._slots(chunk) for chunk in chunks], axis=1))
        step = PagedStep(self.kv, self._plan, self.backend, self._to_device(slots))
        singles = [chunk for chunk in chunks if chunk.count == 1]
        start = 0
        for _, grouped in groupby(singles, key=self._packing):
            group = list(grouped)
            step.decodes.append(self._decode_group(group, start))
            start += len(group)
        for chunk in chunks[len(singles) :]:
            if chunk.in_blocks:
                step.blocks.append(self._block_group(chunk, start))
                start += chunk.count
        whole = [chunk for chunk in chunks[len(singles) :] if not chunk.in_blocks]
        for _, grouped in groupby(whole, key=self._packing):
            group = list(grouped)
            step.prefills.append(self._prefill_group(group, start))
            start += sum(chunk.count for chunk in group)
        self._observe(step, chunks)
        step.rotary = self.rotary
        return step, rows

    def _block_group(self, chunk: Chunk, start: int) -> BlockGroup:
        pattern = chunk.sequence.pattern
        assert pattern is not None
        block, whole = pattern.block_tokens, self._prefill_group([chunk], start)
        blocks = StepBlocks(
            kv=self.kv,
            plan=self._plan,
            page_tokens=self._page_tokens,
            block_tokens=block,
            first=chunk.start // block,
            tables=whole.tables[:, 0],
            cu_q=self._to_device(np.arange(0, chunk.count + 1, block, dtype=np.int32)),
        )
        return BlockGroup(whole.start, whole.stop, pattern, whole, blocks, watch=self.block_watch)

    def _observe(self, step: PagedStep, chunks: list[Chunk]) -> None:
        """Have the queries kept that compressors want to see."""
        first = 0
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.points and chunk.end >= min(sequence.due.at, sequence.due.at - sequence.due.window + 1):
                if sequence.observation is None or sequence.observation.point != sequence.due:
                    sequence.observation = Observation(sequence.due, self._model.spec, self.kv.device)
                step.observed.append((sequence.observation, first, first + chunk.count, chunk.start))
            first += chunk.count

    def _slots(self, chunk: Chunk) -> NDArray[np.int64]:
        """Where the K and V of a chunk go, int64 [slices, count]: a slot of the pool in every slice."""
        layout = chunk.sequence.layout
        first_page, last_page = layout.page_of(chunk.start), layout.pages_for(chunk.end)
        units = np.concatenate([table.entries(first_page, last_page, layout) for table in chunk.sequence.tables])
        entry, offset = np.divmod(layout.slots(chunk.start, chunk.end), layout.unit_tokens)
        return units[:, entry - layout.first_entry(first_page)].astype(np.int64) * layout.unit_tokens + offset

    def _prefill_group(self, chunks: list[Chunk], start: int) -> PrefillGroup:
        tables, slots, unit_pos = self._tables_of(chunks)
        counts = [chunk.count for chunk in chunks]
        return PrefillGroup(
            start=start,
            stop=start + sum(counts),
            tables=tables,
            slots=slots,
            cu_q=self._to_device(np.cumsum([0, *counts], dtype=np.int32)),
            q_pos=self._to_device(np.concatenate([np.arange(c.start, c.end, dtype=np.int32) for c in chunks])),
            max_q=max(counts),
            unit_pos=unit_pos,
            q_span=self._items.spans(chunks),
            counts=counts,
            contexts=[chunk.start for chunk in chunks],
            kept=self._kept_tables(chunks),
            lent=self._lent_rows(chunks),
        )

    def _kept_tables(self, chunks: list[Chunk]) -> KeptTables | None:
        """The tables of compressed sequences; none of the others are in a group with them."""
        sequences = [chunk.sequence for chunk in chunks]
        if sequences[0].kept is None:
            return None
        return KeptTables.of(self.kv, self._plan, self.tables, sequences, [chunk.end for chunk in chunks])

    def _decode_group(self, chunks: list[Chunk], start: int) -> DecodeGroup:
        tables, slots, unit_pos = self._tables_of(chunks)
        q_pos = self._to_device(np.array([chunk.start for chunk in chunks], np.int32))
        method = self.choosers.of(chunks[0])
        group = DecodeGroup(start, start + len(chunks), tables, slots, q_pos, unit_pos, method)
        group.kept, group.lent = self._kept_tables(chunks), self._lent_rows(chunks)
        if any(map(may_recall, chunks)):
            group.recall = RecallStep(chunks, self.kv, self._plan, self._host, self.backend)
        if self._runs is not None and method is None and unit_pos is None and group.kept is None:
            shared = self._runs.find([chunk.sequence for chunk in chunks], [chunk.start for chunk in chunks])
            if shared is not None:
                group.runs, group.slots_spared = self._to_device(shared.groups), shared.spared
        if method is not None:
            probed = self.choosers.probed
            group.probed = [row for row, chunk in enumerate(chunks) if probed(chunk.sequence, chunk.start)]
            group.probe = self.choosers.probe if group.probed else None
            n_pages = np.array([-(-chunk.end // self._page_tokens) for chunk in chunks], np.int32)
            first = [chunk.sequence.first_whole for chunk in chunks]
            sealed = [
                c.sequence.table.pages(i, c.start // self._page_tokens) for i, c in zip(first, chunks, strict=True)
            ]
            first_units = np.zeros((len(chunks), n_pages.max()), np.int64)
            for row, pages in enumerate(sealed):
                first_units[row, : len(pages)] = pages
            parts: dict[str, Tensor] = {}
            hosted = self.hosted.get(method.provenance)
            if method.digest is not None:
                store = self._digest_store(method, hosted is not None)
                exact = [c.sequence.computed // self._page_tokens - i for i, c in zip(first, chunks, strict=True)]
                store.make([pages[:count] for pages, count in zip(sealed, exact, strict=True)])
                store.make([pages[count:] for pages, count in zip(sealed, exact, strict=True)], drafts=True)
                parts = store.parts
            rows, away = self._to_device(first_units), None
            if hosted is not None:
                away = hosted.step([chunk.sequence for chunk in chunks], tables.shape[2])
            if away is not None:
                rows = away.digest_rows.where(away.is_away(n_pages.max()), rows)
            group.pages = StepPages(
                kv=self.kv,
                backend=self.backend,
                plan=self._plan,
                page_tokens=self._page_tokens,
                tables=tables,
                slots=slots,
                q_pos=q_pos,
                n_pages=self._to_device(n_pages),
                max_pages=int(n_pages.max()),
                seeds=self._to_device(np.array([method_seed(c.sequence, c.start) for c in chunks], np.int64)),
                first_units=rows,
                parts=parts,
                away=away,
                prior=self._prior(chunks, int(n_pages.max())),
            )
            if group.kept is not None:
                group.pages = KeptPages.of(group.pages, group.kept, chunks)
        return group

    def _prior(self, chunks: list[Chunk], pages: int) -> Tensor | None:
        """What the requests say of their pages, fp32 [b, pages]; 0 of those that they say nothing of."""
        if all(chunk.sequence.request.prior is None for chunk in chunks):
            return None
        said = np.zeros((len(chunks), pages), np.float32)
        for row, chunk in enumerate(chunks):
            if (prior := chunk.sequence.request.prior) is not None:
                said[row, : len(prior)] = prior
        return torch.from_numpy(said).to(self.kv.device)

    def _packing(self, chunk: Chunk) -> tuple[int, int]:
        """Dense decodes, those of compressed sequences, those with lent pages, then one group a method, and one of
        compressed sequences, then chunks in blocks of queries, then other chunks, like the dense decodes; the order
        within a group is kept."""
        sequence = chunk.sequence
        kind = 1 if sequence.kept is not None else 2 if sequence.layout.lends else 0
        if chunk.count > 1:
            return (3, 0) if chunk.in_blocks else (4, kind)
        method = self.choosers.of(chunk)
        return (0, kind) if method is None else (1 + (sequence.kept is not None), id(method))

    def _lent_rows(self, chunks: list[Chunk]) -> VirtualRows | None:
        """The tables of sequences with lent pages in parts; none of the others are in a group with them."""
        if not chunks[0].sequence.layout.lends:
            return None
        rows = self._to_device(self._tables.rows(chunk.sequence for chunk in chunks))
        return lent_rows(chunks, self.tables.entries, rows, self.kv.shape[4])

    def _tables_of(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tables int32 [slices, b, M], slot counts int32 [1, b, 1] and, if some sequence needs them, the positions of
        its entries int32 [1, b, 1, M], of the sequences of some chunks."""
        layouts = [chunk.sequence.layout for chunk in chunks]
        width = max(layout.entries_for(chunk.end) for layout, chunk in zip(layouts, chunks, strict=True))
        rows = self._to_device(self._tables.rows(chunk.sequence for chunk in chunks))
        tables = self._tables.entries[:, rows, :width]
        slots = [layout.stored_slots(chunk.end) for layout, chunk in zip(layouts, chunks, strict=True)]
        positions = None
        if self._tables.unit_pos is not None and not all(layout.uniform for layout in layouts):
            positions = self._tables.unit_pos[rows, :width][None, :, None]
        return tables, self._to_device(np.array(slots, np.int32))[None, :, None], positions

    def _digest_store(self, method: SparseMethod, hosted: bool = False) -> DigestStore:
        """``hosted``: one that has room for the pages of the host tier too."""
        assert method.digest is not None
        key = method.digest.provenance, hosted
        if key not in self._digests:
            host_units = self._host.units_total + 1 if hosted and self._host is not None else 0
            self._digests[key] = DigestStore(
                method.digest, self._model.spec, self.kv, self._pool, self._plan.groups[0], self._page_tokens,
                host_units,
            )  # fmt: skip
        return self._digests[key]

    def _hosted_by(self, request: Request) -> HostedPages:
        method, hosting = request.method, request.hosting
        assert method is not None and hosting is not None and self._host is not None
        if method.provenance not in self.hosted:
            digests = None if method.digest is None else self._digest_store(method, hosted=True)
            self.hosted[method.provenance] = HostedPages(
                hosting, self._model.spec, self.kv, self._plan, self._pool, self._host, self._page_tokens,
                self.backend, digests,
            )  # fmt: skip
        return self.hosted[method.provenance]

    def _to_device(self, array: NDArray[np.integer]) -> Tensor:
        return upload(array, self.kv.device)
