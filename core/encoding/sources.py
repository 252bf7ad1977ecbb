"""Images whose KV serves requests that hold them elsewhere: where it comes from, and where it is listed.

Such an image is computed as the end of a prompt of its own: the first few tokens of the request (``context_tokens``,
none perhaps), and the image. That prompt is a *source*, a sequence like any other, so its pages are exact, have keys,
are published, evicted, demoted and verified like others, and do not depend on who asked first::

    source                [ context | image A ]                    positions c ...
    request    [ text ... | image A | text ... | image A | text ]  positions p ..., which is delta = p - c further on

A request is admitted when the pages of all its reused images are there; those that are not are computed first, by
sources that the scheduler runs in front of it. Then the pages are *lent*: its table lists them as they are, and
attention turns its queries by delta (``core/execution/lent_rows.py``). Or they are copied, keys turned by delta on the
way, and some of the image's tokens are computed again, in their place: its head, or those whose KV deviates most where
it stands (``core/execution/deviations.py``).

In the index a lent page belongs to its source's prefix. What comes behind it in the request has a prefix through nodes
of its own, whose pages are the source's: they are listed once something behind them is published.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from octavo.core.config import SamplingParams
from octavo.core.encoding.item import Item, ItemSpan
from octavo.core.encoding.pieces import reused
from octavo.core.memory.block_table import BlockTable
from octavo.core.memory.page_layout import TEXT, PageLayout, Segment
from octavo.core.memory.page_pool import PagePool, Pages, Units
from octavo.core.memory.prefix_cache import Node, Parent, PrefixCache

if TYPE_CHECKING:
    from octavo.core.request import Request
    from octavo.core.sequence import Sequence


@dataclass(frozen=True)
class Loan:
    """The pages of a reused image, in their order. A sequence has the image from page ``first_page`` on, ``delta``
    positions behind those that its keys are stored for; the first ``anew`` of its pages are computed again all over."""

    item: Item
    first_page: int
    delta: int
    anew: int
    pages: Pages


def source_request(sequence: Sequence, span: ItemSpan) -> Request:
    """The prompt whose KV a reused image takes, in the name space of the sequence's request."""
    item, home = span.item, sequence.layout.home(span.item)
    segments = [Segment(TEXT, home)] if home else []
    plain = replace(item, reuse=None, anew=())
    return replace(
        sequence.request,
        request_id=f"{sequence.request.request_id}, image at {span.start}",
        prompt=[*sequence.tokens[:home], *[item.placeholder] * item.tokens],
        params=SamplingParams(max_tokens=1),
        method=None,
        layout=sequence.layout.beside([*segments, Segment(item.kind, item.tokens, plain)]),
        unforked=0,
        sequences=[],
        cached_tokens=None,
        keep=None,
        error=None,
    )


def find_nodes(sequence: Sequence, pages: int, index: PrefixCache) -> list[Node]:
    """The nodes of the first ``pages`` pages, as far as they are known."""
    nodes: list[Node] = []
    parent: Parent = sequence.request.root
    keys = sequence.keys(pages)
    listed = next((number for number, key in enumerate(keys) if not index.lists(key)), pages)
    for key, content in zip(keys[:listed], sequence.contents(0, listed), strict=True):
        node = index.find(key, parent, *content)
        if node is None:
            break
        nodes.append(node)
        parent = node
    return nodes


def find_loans(sequence: Sequence, start: int, index: PrefixCache) -> tuple[list[Loan], list[Sequence]]:
    """The reused images from token ``start`` on whose pages are on the device, and the sources of those of which some
    are not."""
    loans, missing = [], []
    layout = sequence.layout
    for span in reused(layout, start):
        nodes = _nodes_of(sequence, span, index)
        first_page = layout.page_of(span.start)
        if len(nodes) < layout.pages_for(span.end) - first_page or not all(node.page(0) for node in nodes):
            missing.append(sequence.source(span))
            continue
        pages = np.array([node.page(0) for node in nodes], np.int32)
        anew = layout.full_pages(span.start + span.item.head) - first_page if span.item.head else 0
        loans.append(Loan(span.item, first_page, span.start - layout.home(span.item), anew, pages))
    return loans, missing


def lent_nodes(sequence: Sequence, pages: int, index: PrefixCache) -> dict[int, Node]:
    """Of the first ``pages`` pages of a sequence those that are lent, and the nodes whose pages they are, as far as
    these are known."""
    layout = sequence.layout
    spans = reused(layout, 0, layout.first_token(pages)) if pages else []
    found: dict[int, Node] = {}
    for span in spans:
        if span.item.lent:
            first_page = layout.page_of(span.start)
            found |= {first_page + number: node for number, node in enumerate(_nodes_of(sequence, span, index))}
    return found


def lent_entries(layout: PageLayout, start: int) -> int:
    """Table entries of the lent pages of tokens from ``start`` on."""
    spans = [span for span in reused(layout, start) if span.item.lent]
    return sum(layout.entries_for(span.end) - layout.first_entry(layout.page_of(span.start)) for span in spans)


def source_units(layout: PageLayout) -> int:
    """Table entries of the sources of the images that a sequence takes copies of: what there must be beside it."""
    copied = {span.item.name: span for span in reused(layout) if not span.item.lent}
    prompts = {
        layout.beside([Segment(TEXT, home)] if home else []).entries_for(home)
        for home in (layout.home(span.item) for span in copied.values())
    }
    images = [layout.entries_for(s.end) - layout.first_entry(layout.page_of(s.start)) for s in copied.values()]
    return sum(images) + max(prompts, default=0)


def place_loans(loans: list[Loan], table: BlockTable, layout: PageLayout, pool: PagePool) -> list[Units]:
    """Let a table go on to the last of some images: with fresh pages for what is computed, and the images' own pages or
    copies of them. Gives the copies, (source, destination, delta) int32 [k, 3] each. Precondition: as many units are
    available beside the images' pages."""
    for loan in loans:
        pool.retain(loan.pages)
    copies = []
    for loan in loans:
        table.extend(loan.first_page, layout)
        if loan.item.lent:
            table.append(loan.pages)
            continue
        end = loan.first_page + len(loan.pages)
        table.extend(end, layout)
        size = layout.page_entries(loan.first_page) * table.slices
        into = table.pages(loan.first_page + loan.anew, end)
        units = [pool.units_of(pages, size).ravel() for pages in (loan.pages[loan.anew :], into)]
        copies.append(np.stack([*units, np.full(len(units[0]), loan.delta, np.int32)], axis=1))
    for loan in loans:
        if not loan.item.lent:
            pool.release(loan.pages[::-1])  # who takes them over writes after the copies
    return [pairs for pairs in copies if len(pairs)]


def _nodes_of(sequence: Sequence, span: ItemSpan, index: PrefixCache) -> list[Node]:
    """The nodes of a reused image's pages, as far as they are known."""
    source = sequence.source(span)
    before = source.layout.page_of(sequence.layout.home(span.item))
    return find_nodes(source, source.layout.full_pages(source.goal), index)[before:]
