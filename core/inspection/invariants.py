"""What must be true of an engine between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.memory.block_table import check_tables

if TYPE_CHECKING:
    from octavo.core.engine import Engine


def check_engine(engine: Engine) -> None:
    """Walk pool, host tier, tables, index and queues; see ``Engine.check``."""
    pool, scheduler = engine._pool, engine._scheduler
    pool.check()
    if engine._host is not None:
        engine._host.check()
    scheduler.check()
    engine._items.check()
    holders = [*scheduler.running, *scheduler.parked]
    check_tables((table for sequence in holders for table in sequence.tables), pool, engine._compaction.split.units)
    engine._compaction.check(holders)
    live = {s for request in engine._requests.values() for s in request.sequences if s.finish_reason is None}
    queued = {*scheduler.waiting, *scheduler.running}
    if live != queued:
        raise AssertionError(f"{len(live)} sequences are live, {len(queued)} are queued")
    for sequence in holders:
        name, full = sequence.request.request_id, sequence.layout.full_pages(sequence.computed)
        if any(page in pool.index for table in sequence.tables for page in table.pages(full).tolist()):
            raise AssertionError(f"{name!r} is about to write to a findable page")
        for table in sequence.tables:
            pages = table.pages(0, len(sequence.nodes)).tolist()
            for page, node in zip(pages, sequence.nodes, strict=True):
                if page in pool.index and pool.index.node(page) is not node:
                    raise AssertionError(f"page {page} of {name!r} is indexed for another prefix")
