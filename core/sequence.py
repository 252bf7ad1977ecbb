"""Sequences: the tokens, how far they are computed, in which pages, and what is to be reported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.compression.frames import Frames
from octavo.core.compression.kept_set import KeptSet, Point
from octavo.core.compression.observation import Observation, observed_tokens
from octavo.core.encoding.item import ItemSpan
from octavo.core.encoding.pieces import pieces, reach, reused
from octavo.core.encoding.sources import source_request
from octavo.core.execution.drafts import UNREAD, Drafts
from octavo.core.execution.pace import Paced
from octavo.core.execution.token_list import TokenList
from octavo.core.hosting.shelf import Shelf
from octavo.core.interfaces import PrefillPattern
from octavo.core.memory.block_table import BlockTable
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_layout import PageLayout
from octavo.core.memory.page_pool import PagePool, Pages
from octavo.core.memory.prefix_cache import Node, PageKey, Tags, page_key
from octavo.core.outputs import Sample, TokenLogprobs
from octavo.core.request import Request
from octavo.core.shared_list import SharedList

if TYPE_CHECKING:
    from octavo.core.serving.detokenizer import Detokenizer

NEVER = sys.maxsize

KNOWN_LOGPROB_ROWS = 512
"""Rows of logits that one sequence may ask for in a step: each is a whole vocabulary of fp32."""


class SparseSpan(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) were, or will be, computed under the sparse method; ``seed`` is what a
    method that draws drew from, and 0 for others. ``block`` of them have one choice of pages: 1, or a whole block of
    queries of the method's prefill pattern, at multiples of which the span starts and stops."""

    start: int
    stop: int
    seed: int = 0
    block: int = 1


class Sequence(Paced):
    """One stretch of tokens whose KV is being computed.

    ::

        tokens  [ prompt ............ | generated (or, when scoring, forced) ... ]
                0          computed ^               goal ^
                [ dense: any chunk    | sparse: one token a step                 ]
                [ pattern: whole blocks | less than a block: dense ]

    ``drafts`` are tokens behind these that may not stand (``octavo.core.execution.drafts``); to all but those who
    compute them they do not exist.

    Positions of an image hold its placeholder in ``tokens``, which is no token id (``Item.placeholder``).

    ``computed`` tokens have their KV in the pool. The scheduler lets it chase ``goal``; when it gets there the next
    token is drawn. ``tables`` are its block tables, one for each group of layers; all have the same number of pages.
    ``nodes`` are the prefix-cache nodes of its first pages, as far as they are full. ``shelf`` is what it has in the
    host tier, if its method reads pages from there; ``away`` counts those pages, which are holes of its first table.
    While ``unread`` is 1 there is one more behind its last token: the device draws it, the next step is planned for it,
    and nobody has read it.
    Tokens before ``writable`` have their place in pages that nobody else holds, so far as they are not computed; of
    who decodes in a batch, that knows of more (``DecodeBatch.turns``). With
    ``full_at`` computed tokens the first page is full that has no node yet; 0 is not worked out.

    Where images are reused, ``sources`` are the sequences by which their KV is found or computed, by the image's first
    token; such a sequence ``serves`` this one (``core/encoding/sources.py``). While it ``compares`` it is not known
    which tokens of its images will be computed.

    Under a sparse method the tokens in ``sparse_spans`` are computed one at a time, each with its own selection, so
    that recomputing them after a preemption gives the KV that decoding gave; under its prefill pattern, if it has one,
    in whole blocks of queries. From the first of them on, the KV is shaped by the method, and the keys of its pages say
    so. A block's choice depends on all of its queries, so it is found in the prefix cache as a whole, or not at all.

    A compressor decides at the ``points``, and then at every so many tokens, what is ``kept`` of the full pages; these
    become holes, as behind a window, unless they are only hidden. ``frames`` are for those of images that its decode
    steps ask back (``octavo.core.compression.recall_step``). ``compressed`` tokens were computed when it decided
    last. Pages that come after the first point are never findable.
    """

    def __init__(self, request: Request, sample: int, tokens: TokenList, pool: PagePool, plan: LayerPlan) -> None:
        super().__init__()
        self.request = request
        self.sample = sample
        self.tokens = tokens
        self.tables = [BlockTable(pool, group.slices) for group in plan.groups]
        self._pool, self._plan = pool, plan
        self._groups = plan.groups
        self.writable = self.full_at = self.unread = 0
        self.served_at = -1
        self.shelf: Shelf | None = None
        self.sparse_spans: list[SparseSpan] = []
        if request.method is not None:
            self.sparse_spans = self.method_spans(0)
        self.drafts = Drafts(request.drafting)
        self.points: list[Point] = []
        if request.compressor is not None:
            at = len(request.prompt) - request.unseen_tokens
            self.points = [Point(at, observed_tokens(request.compressor, request.layout, at))]
        self.kept: KeptSet | None = None
        self.frames: Frames | None = None
        self.compressed = 0
        self.observation: Observation | None = None
        self.forced = False
        self.logprobs_from: int | None = None if request.params.prompt_logprobs is None else 1
        self.known_logprobs: dict[int, TokenLogprobs] = {}
        self.sample_logprobs: list[TokenLogprobs] = []
        self.detokenizer: Detokenizer | None = None
        self.finish_reason: str | None = None
        self.decode_steps = 0
        self.kv_bytes_read = 0
        self.digest_bytes_read = 0
        self.kv_bytes_resident = 0
        self.serves: Sequence | None = None
        self.sources: dict[int, Sequence] = {}
        self.lost_sources = self.compares = False
        self.host_bytes_read = 0
        self.resident_lookups = self.resident_misses = 0
        self.pages_prefetched = self.prefetched_read = self.prefetch_scoring_bytes_read = 0
        self.prefill_bytes_read = 0
        self.prefill_scoring_bytes_read = 0
        self.extra_tokens = 0
        self._keys: SharedList[PageKey] = SharedList()
        self.nodes: SharedList[Node] = SharedList()

    @property
    def table(self) -> BlockTable:
        """The table of the first group of layers: those that see farthest."""
        return self.tables[0]

    @property
    def holdings(self) -> list[BlockTable]:
        """All tables that hold pages of the device for it."""
        if self.shelf is None and self.frames is None:
            return self.tables
        more = [] if self.shelf is None else self.shelf.tables
        return [*self.tables, *more, *([] if self.frames is None else [self.frames.table])]

    @property
    def first_whole(self) -> int:
        """The first page that no compressor has taken tokens from: what is kept of those before has other tables."""
        return 0 if self.kept is None else self.layout.page_of(self.kept.end)

    @property
    def away(self) -> int:
        return 0 if self.shelf is None else len(self.shelf.pages)

    @property
    def returns(self) -> bool:
        """Whether it holds nothing any more when its turn ends: the next one finds its whole pages by their keys."""
        compressor = self.request.compressor
        return self.shelf is not None or (compressor is not None and compressor.renews)

    @property
    def frames_due(self) -> int:
        """Units of the frames that its next step takes from the pool."""
        recallable = None if self.kept is None else self.kept.recallable
        if recallable is None or not recallable.host_pages or self.frames is not None:
            return 0
        return recallable.frame_units(self.table.slices)

    @property
    def layout(self) -> PageLayout:
        return self.request.layout

    @property
    def seed(self) -> int:
        return self.request.seed + self.sample

    @property
    def pattern(self) -> PrefillPattern | None:
        """How the prompt is computed, if not densely."""
        return getattr(self.request.method, "prefill", None)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def goal(self) -> int:
        """Tokens to compute: all of them, but for the last one when its successor is not wanted."""
        return len(self.tokens) - 1 if self.forced else self.length

    @property
    def length(self) -> int:
        """Tokens that it has, read or not."""
        return len(self.tokens) + self.unread

    @property
    def drafting(self) -> bool:
        """Whether its next token is a draft. Otherwise its drafts, if there are any, are verified."""
        if self.drafts.rule is None:
            return False
        return (
            len(self.drafts.tokens) < self.drafts.room(len(self.tokens), self.request.limit)
            and self.computed + 1 == len(self.tokens)
            and self.generated > 0
            and not (self.forced or self.request.unforked)
        )

    @property
    def frontier(self) -> int:
        """The next token to compute: the first without exact KV, or while more drafts are wanted, the last of them."""
        return self.computed + len(self.drafts.tokens) if self.drafting else self.computed

    @property
    def turn(self) -> int:
        """The first position at which its tables change: it has no place for the token, or a window has passed a
        page."""
        turns = [self.writable]
        for group, table in zip(self._groups, self.tables, strict=True):
            if group.window and table.first_page < table.n_pages:
                turns.append(self.layout.end_token(table.first_page) + group.window - 1)
        return min(turns)

    @property
    def is_followed(self) -> bool:
        """Whether somebody looks at each of its tokens: at its text, or for a marker."""
        return self.detokenizer is not None or bool(self.request.markers)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens ``start`` to ``stop`` (exclusive), drafts included; ``UNREAD`` where that is one."""
        known, behind = len(self.tokens), [UNREAD] * self.unread + self.drafts.tokens
        return self.tokens[start:stop] + behind[max(0, start - known) : max(0, stop - known)]

    def result(self) -> Sample:
        """What the user gets of it when it has ended."""
        return Sample(
            token_ids=self.tokens[len(self.request.prompt) :],
            text=self.detokenizer.text if self.detokenizer is not None else "",
            finish_reason=self.finish_reason or "",
            logprobs=self.sample_logprobs if self.request.params.logprobs is not None else None,
            decode_steps=self.decode_steps,
            kv_bytes_read=self.kv_bytes_read,
            digest_bytes_read=self.digest_bytes_read,
            kv_bytes_resident=self.kv_bytes_resident,
            host_bytes_read=self.host_bytes_read,
            resident_lookups=self.resident_lookups,
            resident_misses=self.resident_misses,
            pages_prefetched=self.pages_prefetched,
            prefetched_read=self.prefetched_read,
            prefetch_scoring_bytes_read=self.prefetch_scoring_bytes_read,
            drafts=self.drafts.counts,
            prefill_bytes_read=self.prefill_bytes_read,
            prefill_scoring_bytes_read=self.prefill_scoring_bytes_read,
            extra_tokens=self.extra_tokens,
        )

    def method_spans(self, known: int) -> list[SparseSpan]:
        """What the request's method will compute of the tokens from ``known`` on: whole blocks of the prompt if it has
        a prefill pattern, and all that is generated; all behind the decision, where these tokens may ask pages back."""
        method, prompt = self.request.method, len(self.request.prompt)
        assert method is not None
        spans = []
        if self.pattern is not None:
            block = self.pattern.block_tokens
            start, stop = -(-known // block) * block, prompt // block * block
            spans += [SparseSpan(start, stop, 0, block)] if start < stop else []
        compressor = self.request.compressor
        begin = prompt if compressor is None or compressor.recall is None else prompt - self.request.unseen_tokens
        return [*spans, SparseSpan(begin, NEVER, self.seed if method.draws else 0)]

    def chunk(self, room: int) -> int:
        """Tokens that a step with room for so many may compute. An item that must not be split goes whole, or not at
        all, and so does a block of queries; 0 if it does not fit."""
        stop = reach(self.layout, self.computed, min(self.chunk_limit(), room))
        return self.unsplit(min(stop, self.goal + len(self.drafts.tokens))) - self.computed

    def unsplit(self, token: int) -> int:
        """``token``, or the first token of the bidirectional item, or the block of queries, that computing no further
        would split."""
        return self._block_start(self.layout.unsplit(token))

    def whole(self, token: int) -> int:
        """``token``, or the first token of the item (``PageLayout.whole``), or the block of queries, that keeping no
        more would cut in two."""
        return self._block_start(self.layout.whole(token))

    def _block_start(self, token: int) -> int:
        span = self.sparse_span(token)
        return token if span is None else token - (token - span.start) % span.block

    def least_chunk(self, token: int) -> int:
        """The fewest tokens that a step may compute from ``token`` on."""
        span = self.sparse_span(token)
        return max(self.layout.least_chunk(token), 1 if span is None else span.block)

    def fitting(self, tokens: int) -> int:
        """The same where there is room for the pages of so many tokens, computed in this step or not."""
        stop = max((end for _, end in self.pieces(tokens)), default=self.computed)
        return self.unsplit(stop) - self.computed

    def pieces(self, tokens: int) -> list[tuple[int, int]]:
        """What has to be computed of the next ``tokens`` tokens, in stretches."""
        start = self.frontier
        if self.layout.uniform:
            return [(start, start + tokens)] if tokens else []
        return pieces(self.layout, start, start + tokens)

    def work(self, tokens: int) -> int:
        """How many of the next ``tokens`` tokens have to be computed."""
        return sum(stop - start for start, stop in self.pieces(tokens))

    def chunk_limit(self) -> int:
        """Tokens that may be computed in one step."""
        if self.drafting:
            return 1
        left = self.goal + len(self.drafts.tokens) - self.computed
        if self.points:
            left = min(left, self.due.at - self.computed)
        if self.logprobs_from is not None:
            left = min(left, max(KNOWN_LOGPROB_ROWS, self.least_chunk(self.computed)))
        for start, stop, _, block in self.sparse_spans:
            if self.computed < start:
                return min(left, start - self.computed)
            if self.computed < stop:
                return min(left, 1 if block == 1 else stop - self.computed)
        return left

    @property
    def due(self) -> Point:
        """When it is compressed next; precondition: it has a compressor."""
        compressor, at = self.request.compressor, NEVER
        assert compressor is not None
        if compressor.every and self.compressed:
            at = self.compressed + compressor.every
        planned = next((point for point in self.points if point.at > self.compressed), Point(NEVER, 0))
        return planned if planned.at <= at else Point(at, min(compressor.window, compressor.every))

    @property
    def draws_on_device(self) -> bool:
        """Whether its next token can be computed and drawn without the host; see ``Request``."""
        request = self.request
        return (
            (request.drafts_on_device if self.drafting else request.draws_on_device)
            and self._draws_alone
            and self.computed + 1 == self.length
            and (request.method is None or self.sparse_span(self.computed) is not None)
        )

    @property
    def is_plain(self) -> bool:
        """Whether any of its tokens are computed, and the next one drawn, without the host: densely, and no drafts."""
        request = self.request
        return request.method is None and request.drafting is None and request.draws_on_device and self._draws_alone

    @property
    def _draws_alone(self) -> bool:
        """Whether nothing else waits for the logits of its next token, or changes them."""
        request = self.request
        return (
            not request.unforked
            and not self.forced
            and request.compressor is None
            and self.generated >= request.params.min_tokens
        )

    @property
    def is_due(self) -> bool:
        """Whether it is compressed before anything else is computed."""
        return bool(self.points) and self.computed == self.due.at

    def known_rows(self, start: int, stop: int) -> list[int]:
        """Positions in a chunk whose logits are compared with the token that is known to follow, if it is one."""
        if self.logprobs_from is None:
            return []
        first, last = max(start, self.logprobs_from - 1), min(stop, self.goal, len(self.tokens) - 1)
        no_tokens = {at for span in self.layout.items(first + 1, last + 1) for at in range(span.start, span.end)}
        return [at for at in range(first, last) if at + 1 not in no_tokens]

    def sparse_span(self, position: int) -> SparseSpan | None:
        """The span that a token belongs to; None if it is computed densely."""
        return next((span for span in self.sparse_spans if span.start <= position < span.stop), None)

    def reusable_tokens(self) -> int:
        """Tokens that a prefix hit may cover: never the last one, nor one whose logits are asked for."""
        limit = self.goal - 1
        if self.logprobs_from is not None:
            limit = min(limit, self.logprobs_from - 1)
        hidden = (span.start for span in self.layout.items(0, limit) if not span.item.findable)
        return next(hidden, limit)

    def findable_tokens(self) -> int:
        """Tokens that may come out of the prefix cache: those whose queries a compressor wants to see may not."""
        limit = self.reusable_tokens()
        return min(limit, self.points[0].at - max(1, self.points[0].window)) if self.points else limit

    def findable_pages(self, tokens: int) -> int:
        """Pages among those of the first ``tokens`` tokens that are full and may be found by others."""
        return self.layout.full_pages(min(tokens, self.points[0].at) if self.points else tokens)

    @property
    def held(self) -> Pages:
        """All pages that it holds, and the split units that hold what it has kept of others."""
        kept = [] if self.kept is None else [self.kept.units]
        return np.concatenate([*(table.held for table in self.holdings), *kept])

    def first_seen(self, group: int, position: int) -> int:
        """The first page that a query at ``position`` sees in the layers of a group."""
        return self.layout.page_of(self._groups[group].first_seen(position))

    def first_written(self, count: int) -> int:
        """The first page that the next ``count`` tokens are written to."""
        return self.layout.page_of(next((start for start, _ in self.pieces(count)), self.frontier))

    def units_for(self, count: int) -> int:
        """Units that the next ``count`` tokens take from the pool: new pages, one for a copy on write, and frames."""
        layout, first = self.layout, self.first_written(count)
        last = layout.pages_for(self.frontier + count)
        units = self.frames_due
        for table in self.tables:
            if last > table.n_pages:
                units += (layout.first_entry(last) - layout.first_entry(table.n_pages)) * table.slices
            if first < table.n_pages and table.copy_needed(first):
                units += layout.page_entries(first) * table.slices
        return units

    def take_frames(self) -> None:
        """Have the frames that the next step recalls into. Precondition: ``frames_due`` units are available."""
        if self.frames_due:
            assert self.kept is not None and self.kept.recallable is not None
            self.frames = Frames(self.kept.recallable, self._pool, self.table.slices)

    def source(self, span: ItemSpan) -> Sequence:
        """The sequence by which the KV of a reused image is found, or computed if it is not there."""
        if span.start not in self.sources:
            request = source_request(self, span)
            source = Sequence(request, -1, TokenList(request.prompt, [0]), self._pool, self._plan)
            source.forced, source.serves = True, self
            self.sources[span.start] = source
        return self.sources[span.start]

    def drop_unseen(self) -> None:
        """Let go of the pages that no later token sees, since they lie behind a window."""
        for number, table in enumerate(self.tables):
            if self._groups[number].window:
                table.drop_before(self.first_seen(number, self.computed))

    def provenance(self, page: int) -> str:
        """How the KV of a full page came to be: "" is exact, otherwise the way that an image before its end is reused,
        or the method that shaped some of it, or its prefill pattern as long as nothing else has, and which of its
        tokens it computed (the same tokens may be a prompt here and an output there) from which seed."""
        method, start, stop = self.request.method, self.layout.first_token(page), self.layout.end_token(page)
        if shaped := reused(self.layout, 0, stop):
            return shaped[0].item.reuse.provenance  # type: ignore[union-attr]
        if method is None or stop <= self.sparse_spans[0].start:
            return ""
        before = [span for span in self.sparse_spans if span.start < stop]
        by_pattern = self.pattern is not None and all(span.block > 1 for span in before)
        shaped_by = self.pattern.provenance if by_pattern and self.pattern else self.request.shaped_by
        spans = [(max(a, start) - start, min(b, stop) - start, *how) for a, b, *how in before if start < b]
        return f"{shaped_by} {spans}"

    def contents(self, first: int, stop: int) -> Iterator[tuple[NDArray[np.int32], str, Tags]]:
        """What tells each of the full pages ``first`` to ``stop`` (exclusive) from others behind the same prefix: its
        token ids, one a slot (-1 in those that are empty because the page was sealed), its provenance, and its tags."""
        if first >= stop:
            return
        layout, begin, end = self.layout, self.layout.first_token(first), self.layout.end_token(stop - 1)
        if layout.uniform and (self.request.method is None or end <= self.sparse_spans[0].start):
            for tokens in self.tokens.ids(begin, end).reshape(stop - first, -1):
                yield tokens, "", ()
            return
        before, past = (layout.first_entry(page) * layout.unit_tokens for page in (first, stop))
        slots = np.full(past - before, -1, np.int32)
        slots[layout.slots(begin, end) - before] = self.tokens.ids(begin, end)
        at = 0
        for page in range(first, stop):
            tokens = slots[at : at + layout.page_slots(page)]
            at += len(tokens)
            yield tokens, self.provenance(page), layout.tags(page)

    def keys(self, pages: int) -> list[PageKey]:
        """Keys of the first ``pages`` pages; a page's key never changes once it is full."""
        for _ in self.keyed(len(self._keys), pages):
            pass
        return self._keys[:pages]

    def keyed(self, first: int, stop: int) -> Iterator[tuple[PageKey, tuple[NDArray[np.int32], str, Tags]]]:
        """Keys and contents of the full pages ``first`` to ``stop`` (exclusive); those in front have their keys."""
        known = len(self._keys)
        key = self._keys[first - 1] if first else self.request.root
        for page, content in enumerate(self.contents(first, stop), first):
            if page < known:
                key = self._keys[page]
            else:
                key = page_key(key, *content)
                self._keys.append(key)
            yield key, content

    def adopt_prefix(self, parent: Sequence) -> None:
        """Start where ``parent`` is: share its pages, its keys and what is known of its prompt."""
        assert parent.shelf is None, "a sequence whose pages are away is not forked"
        self.tables = [table.fork() for table in parent.tables]
        parent.writable = 0
        self.computed, self.compressed = parent.computed, parent.compressed
        self.kept = None if parent.kept is None else parent.kept.share()
        self.observation = None if parent.observation is None else parent.observation.fork()
        self._keys, self.nodes = parent._keys.fork(), parent.nodes.fork()

    def inherit(self, previous: Sequence) -> None:
        """Take over the pages, and what is known of them, of a sequence that begins like this one."""
        assert previous.shelf is None and previous.frames is None, "a sequence whose pages are away is not taken over"
        self.tables, self.computed, self.nodes = previous.tables, previous.computed, previous.nodes
        self.kept, previous.kept = previous.kept, None
        self.compressed, self.observation = previous.compressed, previous.observation
        self._keys = SharedList(previous._keys[: len(previous.nodes)])
        for table in self.tables:
            table.stale_from = 0

    def truncate(self, tokens: int) -> None:
        """Forget the KV past ``tokens``, of a page that was full all of it (``PageLayout.kept``), and all of an item,
        or block of queries, that must not be split, or of an item that was reused. Where pages behind a window are gone
        that are seen again from there, or tokens that a compressor saw, everything is let go of."""
        if tokens < self.compressed:
            self.rewind()
            return
        if tokens < self.computed:
            tokens = self.whole(tokens)
        pages, tokens = self.layout.kept(tokens, self.computed)
        for number, table in enumerate(self.tables):
            seen = max(self.first_seen(number, tokens), 0 if number else self.first_whole)
            if tokens and table.first_page > seen:
                self.rewind()
                return
        for table in self.tables:
            table.truncate(pages)
        self.drafts.begin()
        self.computed, self.writable, self.full_at = tokens, 0, 0
        self.nodes = SharedList(self.nodes[:pages])
        self._keys = SharedList(self._keys[:pages])

    def rewind(self) -> None:
        """Give every page back; the tokens stay and will be computed again, or found in the prefix cache."""
        for table in self.tables:
            table.release()
        if self.kept is not None:
            self.kept.release()
        if self.shelf is not None:
            self.shelf.release()
        if self.frames is not None:
            self.frames.table.release()
        self.kept = self.observation = self.shelf = self.frames = None
        self.computed = self.compressed = self.writable = self.full_at = self.unread = 0
        self.nodes = SharedList()
        self.drafts.begin()
