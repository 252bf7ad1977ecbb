"""Which tokens of a sequence are computed: all but those of images whose KV was computed elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from octavo.core.encoding.item import ItemSpan
from octavo.core.memory.page_layout import PageLayout


def reused(layout: PageLayout, start: int = 0, stop: int = sys.maxsize) -> list[ItemSpan]:
    """The reused items that tokens ``start`` to ``stop`` (exclusive) are of."""
    return [span for span in layout.items(start, stop) if span.item.reuse is not None]


def computed_items(layout: PageLayout, start: int, stop: int) -> list[ItemSpan]:
    """The items of which some of the tokens ``start`` to ``stop`` (exclusive) are computed."""
    spans = layout.items(start, stop)
    if all(span.item.reuse is None for span in spans):
        return spans
    found = pieces(layout, start, stop)
    return [span for span in spans if any(a < span.end and span.start < b for a, b in found)]


def pieces(layout: PageLayout, start: int, stop: int) -> list[tuple[int, int]]:
    """What is computed of tokens ``start`` to ``stop`` (exclusive), in stretches; none is empty."""
    found = []
    for first, end in _skipped(layout, start, stop):
        if start < min(first, stop):
            found.append((start, min(first, stop)))
        start = max(start, min(end, stop))
    return [*found, (start, stop)] if start < stop else found


def reach(layout: PageLayout, start: int, work: int) -> int:
    """The end of a chunk from ``start`` on in which ``work`` tokens are computed, the last of them the last one."""
    for first, end in _skipped(layout, start) if work else []:
        if first - start >= work:
            break
        work -= max(first - start, 0)
        start = max(start, end)
    return start + work


def _skipped(layout: PageLayout, start: int, stop: int = sys.maxsize) -> Iterator[tuple[int, int]]:
    """The stretches of the reused items that tokens ``start`` to ``stop`` (exclusive) are of that are not computed."""
    for item, first, end in reused(layout, start, stop):
        at = first
        for begin, past in item.anew:
            if at < first + begin:
                yield at, first + begin
            at = first + past
        if at < end:
            yield at, end


def stretches(tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending tokens as stretches (first, end) that do not touch."""
    found: list[tuple[int, int]] = []
    for token in tokens:
        if found and found[-1][1] == token:
            found[-1] = found[-1][0], token + 1
        else:
            found.append((token, token + 1))
    return tuple(found)
