"""Recorded sequences as some page policies lay them out: their pages, keys and waste."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.inspection.trace import Event, Trace
from octavo.core.interfaces import PagePolicy
from octavo.core.memory.page_layout import TEXT, PageLayout, Segment
from octavo.core.memory.prefix_cache import PageKey, page_key, root_key
from octavo.core.policies import FixedPages
from octavo.kernels.layout import unit_tokens_for


class FullPage(NamedTuple):
    """What the prefix cache knows a page by: as ``octavo.core.sequence`` makes it for one span of a method."""

    key: PageKey
    tokens: NDArray[np.int32]
    provenance: str
    start: int
    stop: int


class PagedTrace:
    """A trace as some page policies lay it out: what replays on different pools have in common.

    Args:
        page_policies: a number of tokens or a ``PagePolicy`` by segment kind, "text" among them.
        unit_tokens: slots of a unit; by default what the engine would take.

    Attributes:
        tokens: token ids of each sequence, shared ones included.
        layouts: of each sequence; forks go on in their parent's.
        page_tokens: slots of a text page.

    Raises:
        ValueError: a segment that the policies cannot page.
    """

    def __init__(
        self, trace: Trace, page_policies: Mapping[str, int | PagePolicy], unit_tokens: int | None = None
    ) -> None:
        self.trace = trace
        self.policies: dict[str, PagePolicy] = {
            kind: FixedPages(policy) if isinstance(policy, int) else policy for kind, policy in page_policies.items()
        }
        self.page_tokens = self.policies[TEXT].page_tokens(None)
        self.unit_tokens = unit_tokens or unit_tokens_for([policy.grain for policy in self.policies.values()])
        self.tokens = trace.all_tokens()
        self.layouts: list[PageLayout] = []
        self._roots: list[PageKey] = []
        self._closed: list[list[tuple[int, int]]] = []
        for number, begin in enumerate(trace.begins().tolist()):
            if trace.event[begin] == Event.OPEN:
                segments = trace.segments(number)
                self.layouts.append(PageLayout(segments, self.policies, self.unit_tokens))
                self._closed.append(self._closed_segments(segments))
                self._roots.append(root_key([("namespace", str(trace.a[begin]))]))
            else:
                parent = int(trace.a[begin])
                self.layouts.append(self.layouts[parent])
                self._closed.append(self._closed[parent])
                self._roots.append(self._roots[parent])
        self._pages: list[list[FullPage]] = [[] for _ in range(trace.sequences)]

    def root(self, sequence: int) -> PageKey:
        return self._roots[sequence]

    def pages(self, sequence: int, count: int) -> list[FullPage]:
        """The first ``count`` pages of a sequence, all of them full."""
        known = self._pages[sequence]
        while len(known) < count:
            page = len(known)
            start, stop = self.layouts[sequence].first_token(page), self.layouts[sequence].end_token(page)
            exact, tokens = int(self.trace.exact_tokens[sequence]), self.tokens[sequence][start:stop]
            shaped_from = max(exact - start, 0)
            provenance = "" if stop <= exact else f"{self.trace.provenance[sequence]} from {shaped_from}"
            key = page_key(known[-1].key if known else self._roots[sequence], tokens, provenance)
            known.append(FullPage(key, tokens, provenance, start, stop))
        return known[:count]

    def lookups(self) -> dict[PageKey, list[int]]:
        """The events, ascending, with which sequences that open look for each page. Those that have lost their pages
        look too, but on some pools only."""
        found: dict[PageKey, list[int]] = {}
        for at in np.flatnonzero(self.trace.event == Event.OPEN).tolist():
            sequence, reusable = int(self.trace.sequence[at]), int(self.trace.b[at])
            for page in self.pages(sequence, self.layouts[sequence].full_pages(reusable)):
                found.setdefault(page.key, []).append(at)
        return found

    def predicted_waste(self, sequence: int, tokens: int) -> int:
        """Empty slots of a sequence alone with ``tokens`` computed tokens, in closed form: a stretch of n tokens on
        pages of P leaves ``-n mod P``."""
        waste = 0
        for length, page_tokens in self._closed[sequence]:
            here = min(length, tokens)
            waste += -here % page_tokens
            tokens -= here
        return waste + -tokens % self.page_tokens

    def _closed_segments(self, segments: list[Segment]) -> list[tuple[int, int]]:
        """Length and page of the segments that others follow, and of an image at the end: text at the end is open."""
        closed = segments[:-1] if segments and segments[-1].kind == TEXT else segments
        return [(one.tokens, self.policies[one.kind].page_tokens(one.tokens)) for one in closed]
