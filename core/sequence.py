"""Requests and their sequences: the tokens, how far they are computed, and what is to be reported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.block_table import BlockTable
from octavo.core.config import SamplingParams
from octavo.core.interfaces import SparseMethod
from octavo.core.outputs import TokenLogprobs
from octavo.core.page_pool import PagePool
from octavo.core.prefix_cache import NodeId, PageKey, Parent, PrefixCache, page_key

if TYPE_CHECKING:
    from octavo.core.detokenizer import Detokenizer

NEVER = sys.maxsize

KNOWN_LOGPROB_ROWS = 512
"""Rows of logits that one sequence may ask for in a step: each is a whole vocabulary of fp32."""


class SparseSpan(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) were, or will be, computed under the sparse method; ``seed`` is what a
    method that draws drew from, and 0 for others."""

    start: int
    stop: int
    seed: int = 0


@dataclass(eq=False)
class Request:
    """One prompt and its samples. ``unforked`` samples will branch off the first when the prompt is computed.

    ``keep``, if given, takes the ended sequence over with its pages (a session's turn).
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    method: SparseMethod | None
    priority: int
    arrival: int
    seed: int
    root: PageKey
    unforked: int
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int | None = None
    keep: Callable[[Sequence], None] | None = None

    @property
    def finished(self) -> bool:
        return self.unforked == 0 and all(sequence.finish_reason for sequence in self.sequences)


class Sequence:
    """One stretch of tokens whose KV is being computed.

    ::

        tokens  [ prompt ............ | generated (or, when scoring, forced) ... ]
                0          computed ^               goal ^
                [ dense: any chunk    | sparse: one token a step                 ]

    ``computed`` tokens have their KV in the pool. The scheduler lets it chase ``goal``; when it gets there the next
    token is drawn. ``nodes`` are the prefix-cache nodes of the pages that are findable.

    Under a sparse method the tokens in ``sparse_spans`` are computed one at a time, each with its own selection, so
    that recomputing them after a preemption gives the KV that decoding gave. From the first of them on, the KV is
    shaped by the method, and the keys of its pages say so.
    """

    def __init__(self, request: Request, sample: int, tokens: list[int], pool: PagePool) -> None:
        self.request = request
        self.sample = sample
        self.tokens = tokens
        self.table = BlockTable(pool)
        self.computed = 0
        self.served_at = -1
        self.sparse_spans: list[SparseSpan] = []
        if request.method is not None:
            seed = self.seed if request.method.draws else 0
            self.sparse_spans = [SparseSpan(len(request.prompt), NEVER, seed)]
        self.forced = False
        self.logprobs_from: int | None = None if request.params.prompt_logprobs is None else 1
        self.known_logprobs: dict[int, TokenLogprobs] = {}
        self.sample_logprobs: list[TokenLogprobs] = []
        self.detokenizer: Detokenizer | None = None
        self.finish_reason: str | None = None
        self.decode_steps = 0
        self.kv_bytes_read = 0
        self.digest_bytes_read = 0
        self._keys: list[PageKey] = []
        self.nodes: list[NodeId] = []

    @property
    def seed(self) -> int:
        return self.request.seed + self.sample

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def goal(self) -> int:
        """Tokens to compute: all of them, but for the last one when its successor is not wanted."""
        return len(self.tokens) - 1 if self.forced else len(self.tokens)

    def chunk_limit(self) -> int:
        """Tokens that may be computed in one step."""
        left = self.goal - self.computed
        if self.logprobs_from is not None:
            left = min(left, KNOWN_LOGPROB_ROWS)
        for start, stop, _ in self.sparse_spans:
            if self.computed < start:
                return min(left, start - self.computed)
            if self.computed < stop:
                return min(left, 1)
        return left

    def known_rows(self, start: int, stop: int) -> range:
        """Positions in a chunk whose logits are compared with the token that is known to follow."""
        if self.logprobs_from is None:
            return range(0)
        return range(max(start, self.logprobs_from - 1), min(stop, self.goal, len(self.tokens) - 1))

    def sparse_span(self, position: int) -> SparseSpan | None:
        """The span that a token belongs to; None if it is computed densely."""
        return next((span for span in self.sparse_spans if span.start <= position < span.stop), None)

    def reusable_tokens(self) -> int:
        """Tokens that a prefix hit may cover: never the last one, nor one whose logits are asked for."""
        limit = self.goal - 1
        if self.logprobs_from is not None:
            limit = min(limit, self.logprobs_from - 1)
        return limit

    def provenance(self, page: int, page_tokens: int) -> str:
        """How the KV of a full page came to be: "" is exact, otherwise the method that shaped some of it, and which of
        its tokens it computed (the same tokens may be a prompt here and an output there) from which seed."""
        method, start, stop = self.request.method, page * page_tokens, (page + 1) * page_tokens
        if method is None or stop <= self.sparse_spans[0].start:
            return ""
        spans = [(max(a, start) - start, min(b, stop) - start, seed) for a, b, seed in self.sparse_spans]
        return f"{method.provenance} {[span for span in spans if span[0] < span[1]]}"

    def page_tokens_array(self, page: int, page_tokens: int) -> NDArray[np.int32]:
        return np.asarray(self.tokens[page * page_tokens : (page + 1) * page_tokens], np.int32)

    def keys(self, pages: int, page_tokens: int) -> list[PageKey]:
        """Keys of the first ``pages`` pages; a page's key never changes once it is full."""
        while len(self._keys) < pages:
            page = len(self._keys)
            parent = self._keys[-1] if self._keys else self.request.root
            tokens = self.page_tokens_array(page, page_tokens)
            self._keys.append(page_key(parent, tokens, self.provenance(page, page_tokens)))
        return self._keys[:pages]

    def adopt_prefix(self, parent: Sequence) -> None:
        """Start where ``parent`` is: share its pages, its keys and what is known of its prompt."""
        self.table = parent.table.fork()
        self.computed = parent.computed
        self._keys, self.nodes = parent._keys.copy(), parent.nodes.copy()

    def inherit(self, previous: Sequence) -> None:
        """Take over the pages, and what is known of them, of a sequence that begins like this one."""
        self.table, self.computed, self.nodes = previous.table, previous.computed, previous.nodes
        self._keys = previous._keys[: len(previous.nodes)]
        self.table.stale_from = 0

    def truncate(self, tokens: int, page_tokens: int) -> None:
        """Forget the KV past ``tokens``. A page that was full is let go of whole, since it may be findable or have a
        digest, and must then keep what these say it holds."""
        pages = -(-tokens // page_tokens)
        if tokens % page_tokens and pages * page_tokens <= self.computed:
            tokens, pages = (pages - 1) * page_tokens, pages - 1
        self.table.truncate(pages)
        self.computed = tokens
        self.nodes = self.nodes[:pages]
        self._keys = self._keys[:pages]

    def rewind(self) -> None:
        """Give every page back; the tokens stay and will be computed again, or found in the prefix cache."""
        self.table.release()
        self.computed = 0
        self.nodes = []


class PrefixMatch(NamedTuple):
    """Findable pages at the head of a sequence, their nodes, and the key of the first page that was not found."""

    pages: NDArray[np.int32]
    nodes: list[NodeId]
    missing: PageKey | None


def match_prefix(sequence: Sequence, index: PrefixCache, page_tokens: int) -> PrefixMatch:
    """Look a sequence up in the index. Changes nothing; the pages are not held."""
    wanted = max(0, sequence.reusable_tokens()) // page_tokens
    pages: list[int] = []
    nodes: list[NodeId] = []
    parent: Parent = sequence.request.root
    missing = None
    for number, key in enumerate(sequence.keys(wanted, page_tokens)):
        tokens = sequence.page_tokens_array(number, page_tokens)
        page = index.find(key, parent, tokens, sequence.provenance(number, page_tokens))
        if page is None:
            missing = key
            break
        parent = index.node(page)
        pages.append(page)
        nodes.append(parent)
    return PrefixMatch(np.asarray(pages, np.int32), nodes, missing)
