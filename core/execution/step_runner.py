"""From a step plan to tensors, one forward pass, and what it read."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.compression.kept_pages import KeptPages
from octavo.core.compression.kept_tables import KeptTables
from octavo.core.compression.observation import Observation
from octavo.core.config import EngineConfig
from octavo.core.costs import dense_units
from octavo.core.encoding.encoded_items import EncodedItems
from octavo.core.encoding.pieces import reused, stretches
from octavo.core.execution.attention import DecodeGroup, PagedStep, PrefillGroup
from octavo.core.execution.decode_program import MOST_SETS, DecodeProgram, RowSet
from octavo.core.execution.decode_state import method_seed
from octavo.core.execution.deviations import Comparison, Enough
from octavo.core.execution.device_tables import DeviceTables
from octavo.core.execution.flight import Flight, Row
from octavo.core.execution.lent_rows import lent_rows
from octavo.core.execution.page_copies import PageCopies
from octavo.core.execution.page_view import StepPages
from octavo.core.execution.pieces import PiecewisePass
from octavo.core.execution.query_blocks import BlockGroup, BlockWatch, StepBlocks
from octavo.core.execution.rotary import Rotary, find_rotary
from octavo.core.execution.shared_runs import RunFinder
from octavo.core.hf_model import HFModel
from octavo.core.hosting.hosted_pages import HostedPages
from octavo.core.inspection.probing import AttentionProbe
from octavo.core.interfaces import SparseMethod
from octavo.core.memory.digests import DigestStore
from octavo.core.memory.host_tier import HostTier
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_pool import PagePool
from octavo.core.scheduler import Chunk, Scheduler, StepPlan
from octavo.core.sequence import Request, Sequence
from octavo.core.uploads import Download, upload
from octavo.kernels.zero_copy import VirtualRows


class StepRunner:
    """Runs planned steps on the device. Owns the pool's memory, the device tables, the digests, and what methods have
    of their pages in the host tier: ``hosted``, by composition.

    ``copies`` counts copy-on-write copies of a page; ``kv_bytes_spared`` what decoding has read less, over all layers
    and KV heads, than the tables that its kernels were given list, because a run that several tables share was read
    once. ``block_watch`` is shown what chunks under a prefill pattern read and what they missed.

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
        self._whole_pages: dict[str, int] = {}
        self._step_tokens = config.step_tokens
        self._launched: dict[Sequence, str] = {}  # who was in the last replayed step, and under which method
        self.copies = PageCopies(kv, backend)
        self._windows = Counter(model.spec.windows)
        self._row_bytes = 2 * kv.shape[3] * kv.shape[5] * kv.element_size()  # of a token in one layer
        self._runs: RunFinder | None = None
        if config.shared_decode and 0 in model.spec.windows:  # the first tables are those of layers without a window
            self._runs = RunFinder(self._page_tokens, config.shared_decode_bytes // self._row_bytes)
        self._program: DecodeProgram | None = None
        if execution != "eager":
            self._program = DecodeProgram(model, kv, plan, backend, self._tables, config.max_seqs, self._page_tokens)
        self._pieces: PiecewisePass | None = None
        if self._program is not None and kv.device.type == "cuda":
            self._pieces = PiecewisePass(model, kv, plan, backend, config.max_seqs)
        self.probe: AttentionProbe | None = None
        self.rotary: Rotary | None = None  # known once images are reused
        self.block_watch: BlockWatch | None = None
        self.kv_bytes_spared = 0

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
            self._program.state.leave_out(plan.chunks)
        chunks = sorted(plan.chunks, key=self._packing)
        step, rows = self._build(chunks)
        ids = np.concatenate([np.asarray(c.token_ids, np.int64) for c in chunks])
        positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
        first = dict(zip(map(id, chunks), np.cumsum([0, *(c.count for c in chunks)]).tolist(), strict=False))
        wanted = np.array([first[id(r.chunk)] + r.position - r.chunk.start for r in rows], np.int64)
        inputs = self._to_device(ids), self._to_device(positions), self._to_device(wanted), step
        embedded = self._items.placed(chunks)
        if self._pieces is not None and embedded is None and self._pieces.serves(len(ids), len(rows)):
            logits = self._pieces.forward(*inputs)
        else:
            logits = self._model.forward(*inputs, embedded)
        self._account(step, chunks)
        return logits.float(), rows

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

    def replays(self, plan: StepPlan) -> bool:
        """Whether a plan is a step of the decode program: ``launch`` it, and read its tokens later."""
        if self._program is None or not all(c.count == 1 and c.sequence.draws_on_device for c in plan.chunks):
            return False
        if any(self._probed(chunk.sequence, chunk.start) for chunk in plan.chunks):
            return False
        return len({_composition(self._method(chunk)) for chunk in plan.chunks}) <= MOST_SETS

    def carries(self, sequences: list[Sequence]) -> bool:
        """Whether the device can decode on with these before their last tokens are read."""
        if self._program is None or not self._program.state.carries(sequences):
            return False
        if any(self._probed(sequence, sequence.computed) for sequence in sequences):
            return False
        return len({_composition(self._next_method(s)) for s in sequences}) <= MOST_SETS

    def launch(self, plan: StepPlan, scheduler: Scheduler) -> Flight:
        """Let the device compute a plan that ``replays``, and come back at once. Tokens that the host does not know yet
        are where the last flight has left them. Preconditions as for ``run``."""
        program, chunks = self._program, plan.chunks
        assert program is not None
        try:
            if plan.ahead and not plan.copies and self._host is None:
                self._tables.update(plan.grown)
            else:
                self._make_ready(scheduler)
            if self._bucket_of(chunks) > program.bucket(len(chunks)):
                self._tables.sync(scheduler.running)  # whoever has ended leaves a row free
                if moves := self._tables.close_gaps():
                    program.state.move(moves)
            by_method: dict[str, list[Chunk]] = {}
            for chunk in chunks:
                by_method.setdefault(_composition(self._method(chunk)), []).append(chunk)
            shared, dense = None, by_method.get("", [])
            if dense and self._runs is not None:
                shared = self._runs.find([(chunk.sequence, chunk.start) for chunk in dense])
            digests = {name: self._digest_fresh(own) for name, own in by_method.items()}
            rows = program.state.bring_in(chunks, self._tables)
            sets = [
                RowSet(
                    rows=[self._tables.row(chunk.sequence) for chunk in own],
                    method=self._method(own[0]),
                    longest=-(-max(chunk.end for chunk in own) // self._page_tokens),
                    digests=digests[name],
                    runs=shared.groups if own is dense and shared is not None else None,
                )
                for name, own in by_method.items()
            ]
            flight = Flight(chunks, rows, Download(program.launch(sets)))
        except BaseException:
            program.state.forget()
            raise
        self._launched = {chunk.sequence: name for name, own in by_method.items() for chunk in own}
        if shared is not None:
            layers = self._model.spec.windows.count(0)
            self.kv_bytes_spared += layers * shared.spared * self._row_bytes
        return flight

    def _digest_fresh(self, chunks: list[Chunk]) -> DigestStore | None:
        """Make the digests that chunks of one method read in a replayed step and that do not exist yet: of the page
        that has been filled last, and of all pages where a sequence comes in, or begins to choose."""
        method = self._method(chunks[0])
        if method is None or method.digest is None:
            return None
        assert self._program is not None
        store, page = self._digest_store(method), self._page_tokens
        sealed, drafted = [], []
        for chunk in chunks:
            sequence, full = chunk.sequence, chunk.start // page
            comes_in = self._launched.get(sequence) != method.provenance or not self._program.state.carries([sequence])
            if not comes_in and chunk.start % page:
                continue
            first, exact = 0 if comes_in else full - 1, sequence.computed // page
            sealed.append(sequence.table.pages(first, min(exact, full)))
            drafted.append(sequence.table.pages(max(first, exact), full))
        if sealed:
            store.make(sealed)
            store.make(drafted, drafts=True)
        return store

    def _bucket_of(self, chunks: list[Chunk]) -> int:
        assert self._program is not None
        return self._program.bucket(1 + max(self._tables.row(chunk.sequence) for chunk in chunks))

    def land(self, flight: Flight) -> list[int]:
        """The tokens of a flight, a chunk each, once the device has drawn them."""
        drawn, *read = flight.news.wait().tolist()
        if read:
            self._account_sparse_flight(flight, *read)
        else:
            self._account_flight(flight)
        return [drawn[row] for row in flight.rows]

    def _account_flight(self, flight: Flight) -> None:
        """Add what each token that the program has decoded read to its sequence: whole tables, in closed form."""
        unit_tokens = self.kv.shape[4]
        ends = np.array([chunk.end for chunk in flight.chunks])
        units = np.zeros_like(ends)
        for window, layers in self._windows.items():
            units += layers * dense_units(ends, window, unit_tokens)
        read = (units * (unit_tokens * self._row_bytes)).tolist()
        for chunk, nbytes in zip(flight.chunks, read, strict=True):
            sequence = chunk.sequence
            if chunk.start >= len(sequence.request.prompt) and sequence.finish_reason is None:
                sequence.decode_steps += 1
                sequence.kv_bytes_read += nbytes

    def _account_sparse_flight(self, flight: Flight, units: list[int], elements: list[int]) -> None:
        """Add what each token that the program has decoded under a method read, as its kernels have counted."""
        unit_bytes = self._row_bytes // self.kv.shape[3] * self.kv.shape[4]
        for chunk, row in zip(flight.chunks, flight.rows, strict=True):
            sequence = chunk.sequence
            if chunk.start >= len(sequence.request.prompt) and sequence.finish_reason is None:
                sequence.decode_steps += not chunk.draft
                sequence.kv_bytes_read += units[row] * unit_bytes
                sequence.digest_bytes_read += elements[row] * self.kv.element_size()

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
        if self._host is not None:
            self._host.copy_out(self.kv)
        for hosted in self.hosted.values():
            hosted.carry_out()
        self.copies.carry_out(self.rotary)
        if self._host is not None:
            self._host.copy_in(self.kv)

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
        method = self._method(chunks[0])
        group = DecodeGroup(start, start + len(chunks), tables, slots, q_pos, unit_pos, method)
        group.kept, group.lent = self._kept_tables(chunks), self._lent_rows(chunks)
        if self._runs is not None and method is None and unit_pos is None and group.kept is None:
            shared = self._runs.find([(chunk.sequence, chunk.start) for chunk in chunks])
            if shared is not None:
                group.runs, group.slots_spared = self._to_device(shared.groups), shared.spared
        if method is not None:
            group.probed = [row for row, chunk in enumerate(chunks) if self._probed(chunk.sequence, chunk.start)]
            group.probe = self.probe if group.probed else None
            n_pages = np.array([-(-chunk.end // self._page_tokens) for chunk in chunks], np.int32)
            first = [chunk.sequence.first_whole for chunk in chunks]
            sealed = [c.sequence.table.pages(c.sequence.first_whole, c.start // self._page_tokens) for c in chunks]
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
                seeds=self._to_device(np.array([method_seed(chunk) for chunk in chunks], np.int64)),
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

    def _method(self, chunk: Chunk) -> SparseMethod | None:
        """Who chooses the pages of a chunk of one token; None if all are read."""
        if chunk.draft:
            return self._drafter(chunk.sequence)
        method = chunk.sequence.request.method
        if method is None or chunk.sequence.sparse_span(chunk.start) is None:
            return None
        return self._chooser(method, chunk.end)

    def _next_method(self, sequence: Sequence) -> SparseMethod | None:
        """The same of the next token of a sequence that decodes."""
        if sequence.drafting:
            return self._drafter(sequence)
        return self._chooser(sequence.request.method, sequence.computed + 1)

    @staticmethod
    def _drafter(sequence: Sequence) -> SparseMethod:
        rule = sequence.drafts.rule
        assert rule is not None
        return rule.method

    def _chooser(self, method: SparseMethod | None, tokens: int) -> SparseMethod | None:
        """The method, if it chooses among the pages of so many tokens; None if it reads them all."""
        return method if method is not None and tokens > self.whole_tokens(method) else None

    def whole_tokens(self, method: SparseMethod) -> int:
        """Tokens of the longest sequence that a method reads whole."""
        name = method.provenance
        if name not in self._whole_pages:  # what reads a number of pages whole reads any less whole
            spec, page = self._model.spec, self._page_tokens
            self._whole_pages[name] = bisect_left(
                range(1, spec.max_tokens // page + 2), True, key=lambda n: not method.reads_all(n * page, spec, page)
            )
        return self._whole_pages[name] * self._page_tokens

    def _probed(self, sequence: Sequence, start: int) -> bool:
        """Whether the probe looks on when the token at ``start`` is computed; such a step is not replayed. It compares
        with all pages, so it does not look at sequences whose pages may be in host memory."""
        if self.probe is None or sequence.request.hosting is not None or (span := sequence.sparse_span(start)) is None:
            return False
        return (start - span.start) % self.probe.every == 0

    def _packing(self, chunk: Chunk) -> tuple[int, int]:
        """Dense decodes, those of compressed sequences, those with lent pages, then one group a method, and one of
        compressed sequences, then chunks in blocks of queries, then other chunks, like the dense decodes; the order
        within a group is kept."""
        sequence = chunk.sequence
        kind = 1 if sequence.kept is not None else 2 if sequence.layout.lends else 0
        if chunk.count > 1:
            return (3, 0) if chunk.in_blocks else (4, kind)
        method = self._method(chunk)
        return (0, kind) if method is None else (1 + (sequence.kept is not None), id(method))

    def _lent_rows(self, chunks: list[Chunk]) -> VirtualRows | None:
        """The tables of sequences with lent pages in parts; none of the others are in a group with them."""
        if not chunks[0].sequence.layout.lends:
            return None
        rows = self.tables.rows(chunk.sequence for chunk in chunks)
        return lent_rows(chunks, self.tables.entries, rows, self.kv.shape[4])

    def _tables_of(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tables int32 [slices, b, M], slot counts int32 [1, b, 1] and, if some sequence needs them, the positions of
        its entries int32 [1, b, 1, M], of the sequences of some chunks."""
        layouts = [chunk.sequence.layout for chunk in chunks]
        width = max(layout.entries_for(chunk.end) for layout, chunk in zip(layouts, chunks, strict=True))
        rows = self._tables.rows(chunk.sequence for chunk in chunks)
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

    def _account(self, step: PagedStep, chunks: list[Chunk]) -> None:
        """Add what each decoded token read to its sequence, and what it did not, since others read it too."""
        unit_bytes = 2 * self.kv.shape[4] * self.kv.shape[5] * self.kv.element_size()
        for group in step.decodes:
            self.kv_bytes_spared += group.units_spared(self.kv) * unit_bytes
            read = group.units_read(self.kv).tolist()
            scoring = [0] * len(read) if group.pages is None else group.pages.elements_read.tolist()
            for chunk, units, elements in zip(chunks[group.start : group.stop], read, scoring, strict=True):
                sequence = chunk.sequence
                if chunk.start < len(sequence.request.prompt):
                    continue
                sequence.decode_steps += not chunk.draft
                sequence.kv_bytes_read += units * unit_bytes
                sequence.digest_bytes_read += elements * self.kv.element_size()
            if group.pages is not None and group.pages.away is not None and group.method is not None:
                sequences = [chunk.sequence for chunk in chunks[group.start : group.stop]]
                self.hosted[group.method.provenance].account(group.pages.away, sequences)
        for chunk in chunks:
            if chunk.verifies:
                units = [
                    layers * dense_units(chunk.end, window and window + chunk.count - 1, self.kv.shape[4])
                    for window, layers in self._windows.items()
                ]
                chunk.sequence.kv_bytes_read += sum(units) * self.kv.shape[4] * self._row_bytes
        page_bytes = self._row_bytes // self.kv.shape[3] * self._page_tokens
        in_blocks = [chunk.sequence for chunk in chunks if chunk.count > 1 and chunk.in_blocks]
        for blocks, sequence in zip(step.blocks, in_blocks, strict=True):
            sequence.prefill_bytes_read += blocks.pages_read * page_bytes
            sequence.prefill_scoring_bytes_read += blocks.blocks.elements_read * self.kv.element_size()

    def _to_device(self, array: NDArray[np.integer]) -> Tensor:
        return upload(array, self.kv.device)


def _composition(method: SparseMethod | None) -> str:
    """What two methods that choose alike have in common; "" is reading all."""
    return "" if method is None else method.provenance
