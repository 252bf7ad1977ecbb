"""Where the tokens of one sequence lie in its block table, when pages differ in size and do not straddle segments."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.encoding.item import Item, ItemSpan
from octavo.core.errors import closest
from octavo.core.interfaces import PagePolicy
from octavo.core.memory.prefix_cache import Tags

TEXT = "text"


@dataclass(frozen=True)
class Segment:
    """A stretch of a prompt: its kind ("text", "image"), how many tokens it has, and the item that its tokens stand
    for, if they are no token ids."""

    kind: str
    tokens: int
    item: Item | None = None


class Run(NamedTuple):
    """Tokens ``start`` to ``end`` (exclusive), from table entry ``entry`` on; their keys are stored for positions that
    are ``delta`` in front of their own."""

    start: int
    end: int
    entry: int
    delta: int


@dataclass(frozen=True, slots=True)
class _Extent:
    """A segment as it lies: from token ``start`` up to ``end`` (None: open), on pages of ``page_tokens`` slots. The
    first of them is page ``page`` of the sequence and begins at table entry ``entry``."""

    kind: str
    start: int
    end: int | None
    page_tokens: int
    page: int
    entry: int
    item: Item | None = None

    def pages(self, tokens: int) -> int:
        """Pages that hold the segment's tokens in front of token ``tokens`` of the sequence."""
        return -(-(tokens - self.start) // self.page_tokens)


class PageLayout:
    """The arithmetic between tokens, pages, table entries and stored slots of a sequence. Immutable.

    Every segment begins a page. A segment that another follows is closed, and its last page *sealed*: partly filled
    perhaps, but complete. Text at the end is open and grows by decoding; after an image an open text begins of itself.
    A text of 20 tokens on pages of 16, an image of 25 on pages of 24, and text, with units of 8::

        segment   | text, 20                       | image, 25                                      | text, open
        page      | 0             | 1 (sealed)     | 2                     | 3 (sealed)             | 4 ...
        entry     | 0      1      | 2       3      | 4      5      6       | 7      8       9       | 10     11 ...
        tokens    | 0-7    8-15   | 16-19   -      | 20-27  28-35  36-43   | 44     -       -       | 45-52  53-60
        valid     | 8      8      | 4       0      | 8      8      8       | 1      0       0       | 8      8
        unit_pos  | 0      8      | 16      20     | 20     28     36      | 44     45      45      | 45     53
        slots     | 0-7    8-15   | 16-23   24-31  | 32-39  40-47  48-55   | 56-63  64-71   72-79   | 80-87  88-95

    A *slot* here counts along the table, holes included: slot s is in entry ``s // unit_tokens``. Look-ups bisect the
    segments' starts and are plain arithmetic within one, so that a single open text costs no more than a division.

    Args:
        segments: in their order; adjacent texts stay apart.
        policies: page policy by kind, "text" among them.
        unit_tokens: slots of a table entry; divides every page.
        aligned: False lays all tokens out as one open text, whatever the segments.

    Raises:
        ValueError: a kind without a policy, a segment without tokens, a page that is no whole number of units, or a
            length that its policy cannot page.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        policies: Mapping[str, PagePolicy],
        unit_tokens: int,
        *,
        aligned: bool = True,
    ) -> None:
        self.unit_tokens = unit_tokens
        self.aligned = aligned
        self._policies = policies
        self._extents: list[_Extent] = []
        for segment in _closed(segments) if aligned else []:
            self._append(segment, _page_tokens(segment, policies))
        self._open()

    def extended(self, tokens: int, segments: Sequence[Segment]) -> PageLayout:
        """The layout of a sequence that has ``tokens`` tokens by now, and gets more segments.

        What lies stays where it is, so the text that was open keeps its pages. Text at the front of ``segments``
        continues it; anything else seals it.
        """
        last = self._extents[-1]
        assert tokens >= last.start, f"{tokens} tokens end before the open text, which begins at {last.start}"
        if segments and segments[0].kind == TEXT:
            tokens, segments = tokens + segments[0].tokens, segments[1:]
        if not segments or not self.aligned:
            return self
        longer = copy(self)
        longer._extents = self._extents[:-1]
        longer._append(Segment(TEXT, tokens - last.start), last.page_tokens)
        for segment in _closed(segments):
            longer._append(segment, _page_tokens(segment, self._policies))
        longer._open()
        return longer

    @property
    def uniform(self) -> bool:
        """Whether it is all one open text: slot s holds token s, and no kernel needs ``unit_pos``."""
        return len(self._extents) == 1

    def pages_for(self, tokens: int) -> int:
        """Pages that hold the first ``tokens`` tokens."""
        if tokens == 0:
            return 0
        extent = self._at_token(tokens - 1)
        return extent.page + extent.pages(tokens)

    def page_of(self, token: int) -> int:
        extent = self._at_token(token)
        return extent.page + (token - extent.start) // extent.page_tokens

    def first_token(self, page: int) -> int:
        extent = self._at_page(page)
        return extent.start + (page - extent.page) * extent.page_tokens

    def end_token(self, page: int) -> int:
        """The first token of the next page, once this one is full or sealed."""
        extent = self._at_page(page)
        full = extent.start + (page + 1 - extent.page) * extent.page_tokens
        return full if extent.end is None else min(full, extent.end)

    def kind(self, page: int) -> str:
        """The kind of the segment that a page is of."""
        return self._at_page(page).kind

    def page_slots(self, page: int) -> int:
        return self._at_page(page).page_tokens

    def page_entries(self, page: int) -> int:
        """Table entries of a page, which are its units."""
        return self._at_page(page).page_tokens // self.unit_tokens

    def first_entry(self, page: int) -> int:
        extent = self._at_page(page)
        return extent.entry + (page - extent.page) * (extent.page_tokens // self.unit_tokens)

    def entries_for(self, tokens: int) -> int:
        """Table entries of the pages that hold the first ``tokens`` tokens."""
        return self.first_entry(self.pages_for(tokens))

    def stored_slots(self, tokens: int) -> int:
        """Slots from the table's start to token ``tokens - 1``, holes included: a kernel's ``lengths``."""
        if tokens == 0:
            return 0
        extent = self._at_token(tokens - 1)
        return extent.entry * self.unit_tokens + tokens - extent.start

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """The slot of each token from ``start`` to ``stop`` (exclusive), int64 [stop - start]."""
        slots = np.arange(start, stop, dtype=np.int64)
        for extent in self._between(start, stop):
            shift = extent.entry * self.unit_tokens - extent.start
            slots[max(extent.start - start, 0) : None if extent.end is None else extent.end - start] += shift
        return slots

    def valid(self, tokens: int) -> NDArray[np.int32]:
        """Valid counts of the first ``entries_for(tokens)`` entries, int32.

        A unit counts as full unless its page is sealed with fewer tokens, or none, in it; the row's length
        (``stored_slots``) cuts what is not stored yet. So an entry's count never changes.
        """
        valid = np.full(self.entries_for(tokens), self.unit_tokens, np.int32)
        for extent in self._between(0, tokens):
            if extent.end is not None:
                full, rest = divmod(extent.end - extent.start, self.unit_tokens)
                valid[extent.entry + full : self._end_entry(extent)] = 0
                if rest:
                    valid[extent.entry + full : extent.entry + full + 1] = rest  # a slice, as it may not be held yet
        return valid

    def unit_pos(self, tokens: int) -> NDArray[np.int32]:
        """Position of the first slot of the first ``entries_for(tokens)`` entries, int32; never falling. A unit without
        tokens has that of the segment's end."""
        positions = np.arange(self.entries_for(tokens), dtype=np.int32) * np.int32(self.unit_tokens)
        for extent in self._between(0, tokens):
            own = positions[extent.entry : None if extent.end is None else self._end_entry(extent)]
            own += extent.start - extent.entry * self.unit_tokens
            if extent.end is not None:
                np.minimum(own, extent.end, out=own)
        return positions

    def items(self, start: int, stop: int) -> list[ItemSpan]:
        """The items that tokens ``start`` to ``stop`` (exclusive) are of, with all their tokens."""
        spans = self._between(start, stop) if start < stop and not self.uniform else []
        return [ItemSpan(e.item, e.start, e.end) for e in spans if e.item is not None and e.end is not None]

    def tags(self, page: int) -> Tags:
        """What a page's key says besides its tokens: of an item's page, which item, and where in it the page begins."""
        extent = self._at_page(page)
        if extent.item is None:
            return ()
        offset = self.first_token(page) - extent.start
        return *extent.item.name, ("offset", offset.to_bytes(8, "little"))

    def beside(self, segments: Sequence[Segment]) -> PageLayout:
        """The layout of another sequence, under the same policies."""
        return PageLayout(segments, self._policies, self.unit_tokens)

    def changed(self, items: Mapping[int, Item]) -> PageLayout:
        """The same layout with other items where those of these first tokens were."""
        other = copy(self)
        other._extents = [replace(extent, item=items.get(extent.start, extent.item)) for extent in self._extents]
        return other

    @property
    def lends(self) -> bool:
        """Whether it has pages that are listed for other positions than they are stored for."""
        return any(extent.item is not None and extent.item.lent for extent in self._extents)

    def lent(self, page: int) -> bool:
        item = self._at_page(page).item
        return item is not None and item.lent

    def home(self, item: Item) -> int:
        """The position that the KV of a reused item is stored for: behind as many of the sequence's first tokens, all
        in front of any item, as it may see."""
        first = next(extent.start for extent in self._extents if extent.item is not None)
        return min(item.reuse.context_tokens, first) if item.reuse is not None else 0

    def runs(self, tokens: int) -> list[Run]:
        """The first ``tokens`` tokens in stretches that are stored one after another, for positions of one delta."""
        runs = []
        for extent in self._between(0, tokens):
            end = tokens if extent.end is None else min(tokens, extent.end)
            delta = extent.start - self.home(extent.item) if extent.item is not None and extent.item.lent else 0
            runs.append(Run(extent.start, end, extent.entry, delta))
        return runs

    def whole(self, token: int) -> int:
        """``token``, or the first token of the item that keeping no more would cut in two: one that sees both ways, or
        whose KV is not that of its place."""
        extent = self._at_token(token)
        return extent.start if extent.item is not None and extent.item.reuse is not None else self.unsplit(token)

    def unsplit(self, token: int) -> int:
        """``token``, or the first token of the bidirectional item that computing no further would split."""
        extent = self._at_token(token)
        return extent.start if extent.item is not None and extent.item.bidirectional else token

    def least_chunk(self, token: int) -> int:
        """The fewest tokens that a step may compute from ``token`` on: one, or the rest of a bidirectional item."""
        extent = self._at_token(token)
        if extent.item is None or not extent.item.bidirectional:
            return 1
        return extent.start + extent.item.tokens - token

    def is_sealed_full(self, page: int, computed: int) -> bool:
        """Whether the first ``computed`` tokens include all that a page can ever hold: it may be published."""
        return self.end_token(page) <= computed

    def kept(self, tokens: int, computed: int) -> tuple[int, int]:
        """Pages and tokens that stay when ``computed`` tokens are cut to the first ``tokens``: a page that was full and
        is cut goes whole, since it may be findable or have a digest, and must then keep what these say it holds."""
        pages = self.pages_for(tokens)
        if pages and tokens < self.end_token(pages - 1) and self.is_sealed_full(pages - 1, computed):
            return pages - 1, self.first_token(pages - 1)
        return pages, tokens

    def full_pages(self, tokens: int) -> int:
        """Pages of which all tokens are among the first ``tokens``: those that may be published."""
        return self.page_of(tokens)  # the page of the next token is the first that is not full

    def waste(self, tokens: int) -> int:
        """Slots of the pages that hold the first ``tokens`` tokens, less the tokens."""
        return self.entries_for(tokens) * self.unit_tokens - tokens

    def _append(self, segment: Segment, page_tokens: int) -> None:
        """Close a segment at the end."""
        start, page, entry = self._end()
        end, page_tokens = start + segment.tokens, self._whole_units(page_tokens)
        self._extents.append(_Extent(segment.kind, start, end, page_tokens, page, entry, segment.item))

    def _open(self) -> None:
        """Let open text follow."""
        start, page, entry = self._end()
        page_tokens = self._whole_units(_policy(TEXT, self._policies).page_tokens(None))
        self._extents.append(_Extent(TEXT, start, None, page_tokens, page, entry))
        self._starts = [extent.start for extent in self._extents]
        self._pages = [extent.page for extent in self._extents]

    def _end(self) -> tuple[int, int, int]:
        """First token, page and entry behind the closed segments."""
        if not self._extents:
            return 0, 0, 0
        last = self._extents[-1]
        assert last.end is not None
        return last.end, last.page + last.pages(last.end), self._end_entry(last)

    def _end_entry(self, extent: _Extent) -> int:
        """First entry behind a closed segment."""
        assert extent.end is not None
        return extent.entry + extent.pages(extent.end) * (extent.page_tokens // self.unit_tokens)

    def _at_token(self, token: int) -> _Extent:
        return self._extents[bisect_right(self._starts, token) - 1]

    def _at_page(self, page: int) -> _Extent:
        return self._extents[bisect_right(self._pages, page) - 1]

    def _between(self, start: int, stop: int) -> list[_Extent]:
        """The segments that hold tokens ``start`` to ``stop``."""
        return self._extents[bisect_right(self._starts, start) - 1 : bisect_right(self._starts, stop - 1)]

    def _whole_units(self, page_tokens: int) -> int:
        if page_tokens % self.unit_tokens:
            raise ValueError(
                f"a page of {page_tokens} tokens is no whole number of units of {self.unit_tokens}; "
                f"the policy's grain must divide every size that it gives, and the unit divides every grain"
            )
        return page_tokens


def predicted_waste(segments: Sequence[Segment], policies: Mapping[str, PagePolicy], *, aligned: bool = True) -> int:
    """Empty slots of a sequence of all these tokens: each segment of n tokens on pages of P leaves ``-n mod P``.

    ``PageLayout.waste`` counts the same from where the pages lie.
    """
    text = _policy(TEXT, policies).page_tokens(None)
    if not aligned:
        return -sum(segment.tokens for segment in segments) % text
    closed = _closed(segments)
    holes = sum(-segment.tokens % _page_tokens(segment, policies) for segment in closed)
    return holes + sum(-segment.tokens % text for segment in segments[len(closed) :])


def _closed(segments: Sequence[Segment]) -> Sequence[Segment]:
    """All but a text at the end, which is open."""
    return segments[:-1] if segments and segments[-1].kind == TEXT else segments


def _page_tokens(segment: Segment, policies: Mapping[str, PagePolicy]) -> int:
    if segment.tokens < 1:
        raise ValueError(f"a segment of kind {segment.kind!r} has {segment.tokens} tokens; the least is 1")
    return _policy(segment.kind, policies).page_tokens(segment.tokens)


def _policy(kind: str, policies: Mapping[str, PagePolicy]) -> PagePolicy:
    if kind not in policies:
        raise ValueError(f"segment kind {kind!r} has no page policy; {closest(kind, list(policies))}")
    return policies[kind]
