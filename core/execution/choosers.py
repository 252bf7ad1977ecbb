"""Which method chooses the pages that a token reads."""

from __future__ import annotations

from bisect import bisect_left

from octavo.core.inspection.probing import AttentionProbe
from octavo.core.interfaces import ModelSpec, SparseMethod
from octavo.core.sequence import Sequence
from octavo.core.step_plan import Chunk


class Choosers:
    """Who chooses for whom, and where the ``probe`` looks on: steps at which it does are not replayed."""

    def __init__(self, spec: ModelSpec, page_tokens: int) -> None:
        self._spec = spec
        self._page_tokens = page_tokens
        self._whole_pages: dict[str, int] = {}
        self.probe: AttentionProbe | None = None

    def of(self, chunk: Chunk) -> SparseMethod | None:
        """Who chooses the pages of a chunk of one token; None if all are read."""
        sequence = chunk.sequence
        if chunk.draft:
            assert sequence.drafts.rule is not None
            return sequence.drafts.rule.method
        method = sequence.request.method
        if method is None or sequence.sparse_span(chunk.start) is None or chunk.end <= self.whole_tokens(method):
            return None
        return method

    def whole_tokens(self, method: SparseMethod) -> int:
        """Tokens of the longest sequence that a method reads whole."""
        name = method.provenance
        if name not in self._whole_pages:  # what reads a number of pages whole reads any less whole
            spec, page = self._spec, self._page_tokens
            self._whole_pages[name] = bisect_left(
                range(1, spec.max_tokens // page + 2), True, key=lambda n: not method.reads_all(n * page, spec, page)
            )
        return self._whole_pages[name] * self._page_tokens

    def probed(self, sequence: Sequence, start: int) -> bool:
        """Whether the probe looks on when the token at ``start`` is computed. It compares with all pages, so it leaves
        out sequences whose pages may be in host memory."""
        if self.probe is None or sequence.request.hosting is not None or (span := sequence.sparse_span(start)) is None:
            return False
        return (start - span.start) % self.probe.every == 0


def composition(method: SparseMethod | None) -> str:
    """What two methods that choose alike have in common; "" is reading all."""
    return "" if method is None else method.provenance
