"""A decode step as one program that the device replays, without the host in between.

::

    step_decode -> embedding -> layers, with attention over the tables -> logits -> sample -> scatter_tokens
         ^                                                                                        |
         +------------------------------- DecodeState, on the device -----------------------------+

Nothing in it depends on a length: lengths, tables, tokens and filters are read on the device. So one CUDA graph a
bucket of rows, captured once, serves every batch of at most so many. All graphs share one memory pool; the largest is
captured first, so that the others find room in what it needed. Where there are no CUDA graphs the same program runs as
plain calls.

A batch row is a row of the state. Rows where nobody decodes are padding: token 0, into the scratch unit, which sees
nothing.

A batch under one sparse method has graphs of its own, a bucket of rows and a power of two of pages: what a method
scores has the width of the longest table, and would otherwise have that of the longest possible. A batch of several
methods (reading all is one of them) has graphs of their combination: each method's ops run over a list of rows that is
read on the device, and padded to a bucket of its own::

    batch rows      0 1 2 3 4 5 6
    dense           [0 3 4 -1]          q of rows 0, 3, 4 -> attention over whole tables
    quest           [1 6]               q of rows 1, 6    -> selection, attention over what it chose
    everything else runs over all rows at once

A step that verifies drafts is such a program too (``verify_program.py``), with graphs a bucket of rows and number of
places.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence as Sequential
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.execution.attention import DecodeGroup, PagedStep
from octavo.core.execution.decode_state import DecodeState
from octavo.core.execution.device_tables import DeviceTables
from octavo.core.execution.downloads import Download, Landing, download
from octavo.core.execution.page_view import StepPages
from octavo.core.execution.step_mail import StepMail
from octavo.core.execution.verify_program import VerifyProgram
from octavo.core.hf_model import HFModel
from octavo.core.interfaces import SparseMethod
from octavo.core.memory.digests import DigestStore
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.uploads import upload
from octavo.kernels import ops
from octavo.kernels.layout import entry_units
from octavo.kernels.products.product import choosing

log = logging.getLogger(__name__)

LEAST_PAGES = 64
"""Width of the narrowest sparse program."""

MOST_SETS = 4
"""Methods in one replayed batch; with more of them a step runs eagerly, as there is a graph for each combination."""


def buckets(rows: int) -> list[int]:
    """Batch sizes to prepare for at most ``rows``, ascending: as many rows as in the next one are padding at most.

    1, 2, 4, 8, then steps of 8, of 16 from 64 rows on, and of an eighth from 128 on: a row of padding costs the
    products as much as any other, a graph costs memory and start-up time.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < rows:
        step = 1 << (sizes[-1].bit_length() - 4)
        sizes.append(sizes[-1] + max(step, 16 if sizes[-1] >= 64 else 8))
    return [size for size in sizes if size < rows] + [rows]


@dataclass(frozen=True)
class Variant:
    """Which program: rows of the batch; whether some share a run of their tables; or the sparse method of all rows,
    with the pages that its longest table may have and the digests it reads. Methods of one composition are one.

    ``sets``: or several such, each over a list of so many of the rows. ``places``: or it verifies drafts, and each row
    has so many tokens."""

    rows: int
    shared: bool = False
    composition: str = ""
    pages: int = 0
    method: SparseMethod | None = field(default=None, compare=False)
    digests: DigestStore | None = field(default=None, compare=False)
    sets: tuple[Variant, ...] = ()
    places: int = 0

    @property
    def plain(self) -> bool:
        """Whether it has no news but the drawn tokens."""
        return self.method is None and not self.sets and not self.places


@dataclass(frozen=True)
class RowSet:
    """Rows of a step that are under one method (None: they read all) and have at most ``longest`` pages, whose digests
    are made; or ``runs``, the groups of ``ops.decode_shared`` by place in ``rows``, if some of them share one."""

    rows: list[int]
    method: SparseMethod | None = None
    longest: int = 0
    digests: DigestStore | None = None
    runs: NDArray[np.int32] | None = None


class DecodeProgram:
    """Replays decode steps of up to ``max_seqs`` sequences. ``state`` is moved on by every replay."""

    def __init__(
        self,
        model: HFModel,
        kv: Tensor,
        plan: LayerPlan,
        backend: str,
        tables: DeviceTables,
        max_seqs: int,
        page_tokens: int,
    ) -> None:
        self._model = model
        self._kv = kv
        self._plan = plan
        self._backend = backend
        self._tables = tables
        self._buckets = buckets(max_seqs)
        self.state = DecodeState(max_seqs, model.spec.vocab_size, kv.device)
        self._verify = VerifyProgram(model, kv, plan, backend, tables, self.state)
        self._page_tokens = page_tokens
        self._lists = torch.full((MOST_SETS, max_seqs), -1, dtype=torch.int64, device=kv.device)
        self._groups = torch.zeros((4, max_seqs + 1), dtype=torch.int32, device=kv.device)
        self._last: tuple[Sequential[int], int] = ((), 0)  # rows of the last dense step, and their bucket
        self._told_lists: list[list[int]] = []
        self._told_runs: tuple[NDArray[np.int32] | None, Sequential[int], int] = (None, [], 0)
        self._graphs: dict[Variant, torch.cuda.CUDAGraph] = {}
        self._news: dict[Variant, Tensor] = {}
        self._landings: dict[tuple[int, ...], list[Landing]] = {}
        self._captured: Tensor | None = None
        self._pool: Any = None
        self._mail = StepMail(max_seqs, kv.device) if kv.device.type == "cuda" else None

    def bucket(self, rows: int) -> int:
        """The smallest prepared batch of at least ``rows``."""
        return self._buckets[bisect_left(self._buckets, rows)]

    def launch(self, sets: Sequential[RowSet]) -> Download:
        """Decode one token in each row of the sets, which are all that the state has been told of; see below. Entries
        of the tables that are due are written first."""
        if len(sets) > 1:
            return self.mixed_step(sets)
        (one,) = sets
        return self.step(one.rows, one.runs) if one.method is None else self.sparse_step(one)

    def step(self, rows: Sequential[int], runs: NDArray[np.int32] | None) -> Download:
        """Decode one token in each of the ``rows`` that the state has been told of. Gives news int64 [1, bucket], a
        column a row of the state: the drawn tokens.

        ``runs``: the groups of ``ops.decode_shared``, by place in ``rows``, where there are any.
        """
        if rows is not self._last[0]:
            self._last = rows, self.bucket(max(rows) + 1)
        variant = Variant(self._last[1], runs is not None)
        self._prepare(variant)
        if runs is not None:
            self._tell_runs(runs, rows, variant.rows)
        return self._replay(variant)

    def sparse_step(self, one: RowSet) -> Download:
        """The same where all rows are under one sparse method. News int64 [3, bucket]: the tokens, table entries read
        over all layers and KV heads, and elements read to choose."""
        variant = self._variant(self.bucket(max(one.rows) + 1), one)
        self._prepare(variant)
        return self._replay(variant)

    def mixed_step(self, sets: Sequential[RowSet]) -> Download:
        """The same of rows under several methods, no more than ``MOST_SETS``; news as those of ``sparse_step``."""
        sets = sorted(sets, key=lambda one: "" if one.method is None else one.method.provenance)
        members = tuple(self._variant(self.bucket(len(one.rows)), one) for one in sets)
        variant = Variant(self.bucket(max(max(one.rows) for one in sets) + 1), sets=members)
        self._prepare(variant)
        for one, member in zip(sets, members, strict=True):
            if one.runs is not None:
                self._tell_runs(one.runs, list(range(len(one.rows))), member.rows)
        if self._told_lists != (listed := [one.rows for one in sets]):
            lists = np.full(self._lists.shape, -1, np.int64)
            for number, rows in enumerate(listed):
                lists[number, : len(rows)] = rows
            self._lists.copy_(upload(lists, self._kv.device))
            self._told_lists = listed
        return self._replay(variant)

    def verify_step(self, rows: NDArray[np.int64], drafts: NDArray[np.int64], asked: NDArray[np.int64]) -> Download:
        """Verify the drafts of ``rows``, which are all that the state has been told of (``VerifyProgram.tell``). Gives
        news int64 [2 * places, bucket]. The state stays as it is."""
        variant = Variant(self.bucket(int(rows.max()) + 1), places=asked.shape[1])
        self._verify.tell(rows, drafts, asked)
        self._prepare(variant)
        return self._replay(variant)

    def _tell_runs(self, runs: NDArray[np.int32], rows: Sequential[int], bucket: int) -> None:
        """Let the groups be those of ``runs``, whose sequences are in ``rows``. They stay while the same decode."""
        told, told_rows, told_bucket = self._told_runs
        if runs is not told or rows != told_rows or bucket != told_bucket:
            self._groups[:, : bucket + 1] = upload(spread_groups(runs, rows, bucket), self._kv.device)
            self._told_runs = runs, rows, bucket

    def _variant(self, rows: int, one: RowSet) -> Variant:
        if one.method is None:
            return Variant(rows, one.runs is not None)
        capacity = self._tables.entries.shape[2] // (self._page_tokens // self._kv.shape[4])
        pages = min(max(1 << (one.longest - 1).bit_length(), LEAST_PAGES), capacity)
        return Variant(rows, False, one.method.provenance, pages, one.method, one.digests)

    def _prepare(self, variant: Variant) -> None:
        """Capture what has not been captured."""
        if self._kv.device.type != "cuda":
            return
        if self._captured is not self._tables.entries:  # the first time, or the tables have been widened
            self._graphs.clear()
            self._news.clear()
            self._pool = torch.cuda.graph_pool_handle()  # one that no graph uses any longer is gone
            self._captured = self._tables.entries
            self._capture([Variant(size) for size in reversed(self._buckets)])
        if variant not in self._graphs:
            self._capture([variant])

    def _replay(self, variant: Variant) -> Download:
        tables, mail = self._tables, self._mail
        if mail is None:
            tables.write_due()
            with torch.inference_mode():
                return self.download(self._run(variant))
        if tables.due is not None and len(tables.due.places) <= mail.most:
            mail.tell(tables.due.places, tables.due.entries)
        else:
            tables.write_due()
            mail.tell_nothing()
        self._graphs[variant].replay()
        tables.settle_due()
        drawn = mail.launched(variant.rows)
        return drawn if variant.plain else self.download(self._news[variant])

    def download(self, news: Tensor) -> Download:
        """Begin to bring news to the host."""
        return download(news, self._landings.setdefault(news.shape, []))

    def _run(self, variant: Variant) -> Tensor:
        if self._mail is None:
            return self._compute(variant)
        self._mail.receive(self._tables.entries)
        news = self._compute(variant)
        self._mail.send(news[0] if variant.plain else None)
        return news

    def _compute(self, variant: Variant) -> Tensor:
        if variant.places:
            return self._verify.run(variant.rows, variant.places)
        state, fields, entries, batch = self.state, self.state.fields, self._tables.entries, variant.rows
        rows = state.rows[:batch]
        ids, positions, q_pos, slots, slot_counts = ops.step_decode(
            rows, fields["lengths"], fields["tokens"], entries, self._kv.shape[4], self._backend
        )
        if variant.sets:
            groups = [self._listed(number, one, batch, q_pos, slot_counts) for number, one in enumerate(variant.sets)]
        else:
            groups = [DecodeGroup(0, batch, entries[:, :batch], slot_counts, q_pos, method=variant.method)]
        for group, one in zip(groups, variant.sets or [variant], strict=True):
            if one.shared:
                # Contiguous, as the op wants them: a view of the first columns is not.
                group.runs = self._groups[:, : one.rows + 1].contiguous()
            if one.method is not None:
                self._let_choose(group, one)
        step = PagedStep(self._kv, self._plan, self._backend, slots, groups, q_heads=self._model.spec.q_heads)
        logits = self._model.forward(ids, positions, None, step)
        drawn: Tensor = ops.sample(logits, *state.filters(batch), self._backend)
        ops.scatter_tokens(rows, drawn, fields["tokens"], fields["lengths"], self._backend)
        fields["draws"][:batch] += rows >= 0
        if len(groups) == 1 and groups[0].pages is None:
            return drawn[None]
        read = torch.zeros((2, batch + 1), dtype=torch.int64, device=drawn.device)
        for group in groups:
            places = slice(batch) if group.places is None else group.places
            read[0, places] = group.units_read(self._kv)
            if group.pages is not None:
                read[1, places] = group.pages.elements_read
        return torch.cat([drawn[None], read[:, :batch]])

    def _listed(self, number: int, variant: Variant, batch: int, q_pos: Tensor, slots: Tensor) -> DecodeGroup:
        """The group of list ``number``. Places in the list where nobody is stand for row 0 without any token."""
        listed = self._lists[number, : variant.rows]
        members, is_one = listed.clamp(min=0), listed >= 0
        return DecodeGroup(
            start=0,
            stop=variant.rows,
            tables=self._tables.entries[:, members],
            slots=slots[:, members].where(is_one[:, None], 0),
            q_pos=q_pos[members].where(is_one, 0),
            method=variant.method,
            members=members,
            places=listed.where(is_one, batch),
        )

    def _let_choose(self, group: DecodeGroup, variant: Variant) -> None:
        """Give a group what its method chooses from. A padding row has one page, whatever is in it."""
        page_units = self._page_tokens // self._kv.shape[4]
        group.tables = group.tables[:, :, : variant.pages * page_units]
        group.slots = group.slots.clamp(min=1)
        lengths, seeds = group.slots[0, :, 0], self.state.fields["method_seeds"]
        group.pages = StepPages(
            kv=self._kv,
            backend=self._backend,
            plan=self._plan,
            page_tokens=self._page_tokens,
            tables=group.tables,
            slots=group.slots,
            q_pos=group.q_pos,
            n_pages=(lengths + self._page_tokens - 1) // self._page_tokens,
            max_pages=variant.pages,
            seeds=seeds[: variant.rows] if group.members is None else seeds[group.members],
            first_units=entry_units(group.tables[0, :, ::page_units]),
            parts={} if variant.digests is None else variant.digests.parts,
        )

    def _capture(self, variants: Sequential[Variant]) -> None:
        """Capture graphs, each after one pass that compiles and chooses what it needs. No row decodes meanwhile."""
        began = time.perf_counter()
        decoding = self.state.rows.clone()
        self.state.rows.fill_(-1)
        self._told_lists, self._told_runs = [], (None, [], 0)
        self._lists.fill_(-1)
        self._groups.zero_()
        self._groups[0] = torch.arange(self._groups.shape[1], device=self._groups.device)
        try:
            with torch.inference_mode():
                for variant in variants:
                    with choosing():
                        self._run(variant)
                    assert self._mail is not None
                    self._mail.take_back()
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    # Other threads, which may be encoding images, are none of the capture's business.
                    with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                        self._news[variant] = self._run(variant)
                    self._graphs[variant] = graph
        finally:
            self.state.rows.copy_(decoding)
        seconds = time.perf_counter() - began
        log.info("%d decode graphs for up to %d rows captured in %.1f s", len(variants), variants[0].rows, seconds)


def spread_groups(groups: NDArray[np.int32], rows: Sequential[int], bucket: int) -> NDArray[np.int32]:
    """``groups`` int32 [4, n + 1] of n sequences, as int32 [4, bucket + 1] where sequence i is batch row ``rows[i]``
    and all others are of no group (``kernels/reference/shared.py``)."""
    count = len(rows)
    row = np.asarray(rows, np.int32)
    spread = np.zeros((4, bucket + 1), np.int32)
    members, bounds, shared, own = spread
    members[:count] = row[groups[0, :count]]
    members[count:bucket] = np.setdiff1d(np.arange(bucket), row)
    bounds[: count + 1] = groups[1]
    bounds[count + 1 :] = groups[1, -1]
    shared[: count + 1] = groups[2]
    own[row] = groups[3, :count]
    return spread
