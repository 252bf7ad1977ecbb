"""What must be true of an engine between two steps."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from octavo.core.memory.block_table import check_tables

if TYPE_CHECKING:
    from octavo.core.engine import Engine
    from octavo.core.memory.prefix_cache import Node
    from octavo.core.sequence import Sequence


def check_engine(engine: Engine) -> None:
    """Walk pool, host tier, tables, index and queues; see ``Engine.check``."""
    pool, scheduler = engine._pool, engine._scheduler
    pool.check()
    if engine._host is not None:
        engine._host.check()
    scheduler.check()
    engine._items.check()
    holders = [*scheduler.running, *scheduler.parked]
    check_tables((table for sequence in holders for table in sequence.holdings), pool, engine._compaction.split.units)
    engine._compaction.check(holders)
    pins = Counter(page for sequence in holders if sequence.shelf is not None for page in sequence.shelf.pages)
    pins.update(engine._compaction.pins(holders))
    if engine._host is not None and engine._host.pins != pins:
        raise AssertionError(f"host pages count the pins {engine._host.pins}, sequences read {pins} from there")
    for name, hosted in engine._runner.hosted.items():
        hosted.check([s for s in holders if s.request.method is not None and s.request.method.provenance == name])
    live = {s for request in engine._requests.values() for s in request.sequences if s.finish_reason is None}
    queued = {s for s in (*scheduler.waiting, *scheduler.running) if s.serves is None}
    if live != queued:
        raise AssertionError(f"{len(live)} sequences are live, {len(queued)} are queued")
    flying = set() if engine._flight is None else set(engine._flight.batch.sequences)
    if ahead := {s for s in (*scheduler.waiting, *holders) if s.unread} - flying:
        raise AssertionError(f"{len(ahead)} sequences count a token that is not under way")
    if engine._flight is not None and engine._flight.alive() is not engine._flight and not engine._ended:
        raise AssertionError("sequences that have ended are under way, and the next plan would go on with them")
    for sequence in holders:
        name, full = sequence.request.request_id, sequence.layout.full_pages(sequence.computed)
        for table in sequence.tables:
            for number, page in enumerate(table.pages().tolist()):
                node = pool.index.node(page) if page in pool.index else None
                if sequence.layout.lent(number):
                    if node is not None and not _is_of_source(node, number, sequence):
                        raise AssertionError(f"page {page} is lent to {name!r} and holds something else")
                elif node is not None and number >= full:
                    raise AssertionError(f"{name!r} is about to write to a findable page")
                elif node is not None and number < len(sequence.nodes) and node is not sequence.nodes[number]:
                    raise AssertionError(f"page {page} of {name!r} is indexed for another prefix")


def _is_of_source(node: Node, page: int, sequence: Sequence) -> bool:
    """Whether a node is that of the source's page that page ``page`` of a sequence lists."""
    first = sequence.layout.first_token(page)
    (span,) = sequence.layout.items(first, first + 1)
    source = sequence.source(span)
    number = source.layout.page_of(sequence.layout.home(span.item) + first - span.start)
    return node.key == source.keys(number + 1)[number]
