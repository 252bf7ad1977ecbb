"""Traces in the making: event by event by number, or from a running engine."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from octavo.core.inspection.trace import ALL_EXACT, Event, Trace
from octavo.core.memory.page_layout import TEXT, Segment

if TYPE_CHECKING:
    from octavo.core.sequence import Sequence


class TraceBuilder:
    """Collects events; ``at`` dates those that follow. ``Trace`` says what each of them means."""

    def __init__(self) -> None:
        self._step = 0
        self._time_s = 0.0
        self._rows: list[tuple[int, float, int, int, int, int]] = []
        self._own: list[list[int]] = []
        self._shared: list[int] = []
        self._computed: list[int] = []
        self._segments: list[list[Segment]] = []
        self._kinds: dict[str, int] = {}
        self._facts: list[tuple[int, int, int]] = []

    def at(self, step: int, time_s: float) -> None:
        self._step, self._time_s = step, time_s

    def tokens(self, sequence: int) -> int:
        """Tokens that are known of a sequence, shared ones included."""
        return self._shared[sequence] + len(self._own[sequence])

    def computed(self, sequence: int) -> int:
        """Tokens of a sequence that are computed, as far as was told."""
        return self._computed[sequence]

    def open(
        self,
        tokens: SequenceOf[int],
        *,
        segments: SequenceOf[Segment] | None = None,
        namespace: int = 0,
        reusable: int | None = None,
        priority: int = 0,
        exact_tokens: int = ALL_EXACT,
        provenance: int = 0,
    ) -> int:
        """A sequence begins, and gets this number.

        ``segments`` are one text by default. ``reusable`` tokens, all but one by default, may be found in the cache.
        """
        reusable = max(0, len(tokens) - 1) if reusable is None else reusable
        number = self._begin(tokens, 0, (priority, exact_tokens, provenance))
        self._segments[number] = [Segment(TEXT, len(tokens))] if segments is None else list(segments)
        for segment in self._segments[number]:
            self._kinds.setdefault(segment.kind, len(self._kinds))
        self._add(Event.OPEN, number, namespace, reusable)
        return number

    def fork(
        self,
        parent: int,
        shared: int,
        own: SequenceOf[int] = (),
        *,
        priority: int = 0,
        exact_tokens: int = ALL_EXACT,
        provenance: int = 0,
    ) -> int:
        """A sequence begins with the first ``shared`` tokens of ``parent`` and goes on with ``own`` ones."""
        number = self._begin(own, shared, (priority, exact_tokens, provenance))
        self._computed[number] = shared
        self._add(Event.FORK, number, parent, shared)
        return number

    def grow(self, sequence: int, computed: int, new_tokens: SequenceOf[int] = ()) -> None:
        """``new_tokens`` become known, and ``computed`` tokens of the sequence are computed once this step is done."""
        self._own[sequence] += new_tokens
        self._add(Event.GROW, sequence, computed, max(0, computed - self._computed[sequence]))
        self._computed[sequence] = max(computed, self._computed[sequence])

    def park(self, sequence: int) -> None:
        self._add(Event.PARK, sequence)

    def close(self, sequence: int) -> None:
        self._add(Event.CLOSE, sequence)

    def hit(self, sequence: int, found: int, asked: int) -> None:
        self._add(Event.HIT, sequence, found, asked)

    def preempt(self, sequence: int) -> None:
        self._add(Event.PREEMPT, sequence)

    def evict(self, pages: int) -> None:
        self._add(Event.EVICT, -1, pages)

    def build(self) -> Trace:
        rows = list(zip(*self._rows, strict=True)) if self._rows else [()] * 6
        facts = np.array(self._facts, np.int32).reshape(-1, 3)
        segments = [segment for own in self._segments for segment in own]
        return Trace(
            step=np.array(rows[0], np.int32),
            time_s=np.array(rows[1], np.float32),
            event=np.array(rows[2], np.int8),
            sequence=np.array(rows[3], np.int32),
            a=np.array(rows[4], np.int32),
            b=np.array(rows[5], np.int32),
            token_starts=_starts(self._own),
            tokens=np.array([token for own in self._own for token in own], np.int32),
            segment_starts=_starts(self._segments),
            segment_kind=np.array([self._kinds[segment.kind] for segment in segments], np.int8),
            segment_tokens=np.array([segment.tokens for segment in segments], np.int32),
            kinds=np.array(list(self._kinds), np.str_),
            priority=facts[:, 0].copy(),
            exact_tokens=facts[:, 1].copy(),
            provenance=facts[:, 2].copy(),
        )

    def _begin(self, tokens: SequenceOf[int], shared: int, facts: tuple[int, int, int]) -> int:
        self._own.append(list(tokens))
        self._shared.append(shared)
        self._computed.append(0)
        self._segments.append([])
        self._facts.append(facts)
        return len(self._own) - 1

    def _add(self, event: Event, sequence: int, a: int = 0, b: int = 0) -> None:
        self._rows.append((self._step, self._time_s, int(event), sequence, a, b))


class TraceRecorder:
    """Takes down what an engine does with its pages. The engine calls it; it holds on to no part of the engine.

    Who calls what::

        a step begins to be planned  stepping     with the pages that the pool has evicted until now
        a sequence is admitted       admitted     its prefix hit included; again after a preemption
        a chunk gets its pages       placed
        the step is planned          planned      likewise
        a sample branches off        forked       so does a session
        a session's turn goes on     continued    whether the pages of the last turn are still there or not
        a turn ends                  parked
        pages were taken             preempted
        a sequence ends              closed       those that were never admitted too

    Layers with a window are recorded as if they kept everything. Drafts are not recorded; what they came to is, with
    the next chunk.
    """

    reads_tokens = True
    """Planning waits until the tokens of the step before are known. Whoever does not need that may be told of a step
    twice, once ahead of these tokens and, if they turned out to matter, once behind them."""

    def __init__(self) -> None:
        self._builder = TraceBuilder()
        self._numbers: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._namespaces: dict[bytes, int] = {}
        self._provenances: dict[tuple[str, int], int] = {}
        self._evictions = 0
        self._start = time.perf_counter()

    def trace(self) -> Trace:
        """What has been taken down until now."""
        return self._builder.build()

    def stepping(self, step: int, evictions: int) -> None:
        self._builder.at(step, time.perf_counter() - self._start)
        self._evictions = evictions

    def planned(self, evictions: int) -> None:
        if evictions > self._evictions:
            self._builder.evict(evictions - self._evictions)

    def admitted(self, sequence: Sequence, hit_tokens: int, segments: SequenceOf[Segment] | None = None) -> None:
        """``segments`` of the tokens that are known by now; one text by default."""
        if sequence not in self._numbers:
            root = bytes(sequence.request.root)
            self._numbers[sequence] = self._builder.open(
                sequence.tokens,
                segments=segments,
                namespace=self._namespaces.setdefault(root, len(self._namespaces)),
                reusable=max(0, sequence.reusable_tokens()),
                **self._facts(sequence),
            )
        self._builder.hit(self._numbers[sequence], hit_tokens, len(sequence.tokens))

    def placed(self, sequence: Sequence, end: int) -> None:
        """Tokens up to ``end`` (exclusive) are being computed."""
        number = self._numbers[sequence]
        self._builder.grow(number, end, sequence.tokens[self._builder.tokens(number) : end])

    def forked(self, sequence: Sequence, parent: Sequence) -> None:
        """``sequence`` shares all that ``parent`` has computed."""
        self._fork(sequence, self._numbers[parent], sequence.computed)

    def continued(self, sequence: Sequence, previous: Sequence) -> None:
        """``sequence`` takes over what it has in common with ``previous``, which ends."""
        number = self._numbers.get(previous)
        if number is None:
            return
        shared = min(self._builder.computed(number), sequence.reusable_tokens())
        known, wanted = np.array(previous.tokens[:shared]), np.array(sequence.tokens[:shared])
        differing = np.flatnonzero(known != wanted[: len(known)])
        shared = int(differing[0]) if len(differing) else len(known)
        self._fork(sequence, number, shared)
        self.closed(previous)

    def parked(self, sequence: Sequence) -> None:
        self._builder.park(self._numbers[sequence])

    def preempted(self, sequence: Sequence) -> None:
        self._builder.preempt(self._numbers[sequence])

    def closed(self, sequence: Sequence) -> None:
        number = self._numbers.pop(sequence, None)
        if number is not None:
            self._builder.close(number)

    def _fork(self, sequence: Sequence, parent: int, shared: int) -> None:
        own = sequence.tokens[shared:]
        self._numbers[sequence] = self._builder.fork(parent, shared, own, **self._facts(sequence))

    def _facts(self, sequence: Sequence) -> dict[str, int]:
        request = sequence.request
        facts = {"priority": request.priority}
        if request.method is not None:
            span = sequence.sparse_spans[0]
            name = request.method.provenance, span.seed
            facts["exact_tokens"] = span.start
            facts["provenance"] = self._provenances.setdefault(name, len(self._provenances) + 1)
        return facts


def _starts(lists: SequenceOf[SequenceOf[Any]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.cumsum([0, *map(len, lists)], dtype=np.int64)
