"""Block statistics: what the pages of an engine are used for, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core.inspection.page_census import ABSENT, CACHED, FREE, STATES, PageCensus
from octavo.core.memory.page_pool import Units

if TYPE_CHECKING:
    from octavo.core.engine import Engine


def block_statistics(engine: Engine) -> list[dict[str, Any]]:
    """One row a pool, state, request and page size, largest first; their units add up to those of both pools.

    Changes nothing, and may be called between any two steps. Cached pages belong to nobody here (a ``PageWatch``
    remembers whose they were).

    ========================  =======================================================================================
    ``pool``                  device, or host: the host tier
    ``state``                 as in ``page_census.STATES``
    ``request``               the request that holds it, of several the earliest; None if nobody does
    ``page_tokens``           slots of a page; None for units that are no pages: free and absent ones
    ``pages``, ``units``      how many; ``pages`` is 0 for free and absent units
    ``slots_used``            slots that hold a token's KV, and ``slots_wasted``, those of held or cached units that do
                              not. Where layers are grouped, a token has a slot in every group
    ``bytes``                 of K and V, empty slots included
    ``mean_run_units``        units, by the number of stretches of neighbours that they make up
    ``references``            block tables that list the pages, summed over the pages
    ``idle_steps``            steps since the pages were last used, mean; None for what is not cached
    ========================  =======================================================================================
    """
    pool, census = engine._pool, PageCensus()
    cells = census.take(engine)[1:]
    units = np.arange(1, 1 + len(cells), dtype=np.int32)
    size = np.bincount(cells["page"], minlength=1 + len(cells))[cells["page"]] // census.slices[cells["page"]]
    size[cells["page"] == 0] = 0
    key = np.stack([units > pool.most_units, cells["state"], cells["request"], size], axis=1).astype(np.int64)
    kinds, kind = np.unique(key, axis=0, return_inverse=True)
    rows = []
    for number, (in_host, state, request, entries) in enumerate(kinds.tolist()):
        own = units[kind.ravel() == number]
        heads = own[cells["page"][own - 1] == own]
        used, in_pages = int(cells["tokens"][own - 1].sum()), state not in (FREE, ABSENT)
        idle = pool.book.clock - pool.book.facts.last_used[heads] if state == CACHED else None
        rows.append(
            {
                "pool": "host" if in_host else "device",
                "state": STATES[state],
                "request": census.requests[request - 1] if request else None,
                "page_tokens": entries * engine.config.unit_tokens or None,
                "pages": len(heads),
                "units": len(own),
                "slots_used": used,
                "slots_wasted": len(own) * engine.config.unit_tokens - used if in_pages else 0,
                "bytes": len(own) * engine._runner.kv[0].nbytes,
                "mean_run_units": len(own) / _runs(own),
                "references": int(census.tables[heads].sum()),
                "idle_steps": None if idle is None else float(idle.mean()),
            }
        )
    return sorted(rows, key=lambda row: -row["units"])


def _runs(units: Units) -> int:
    """Stretches of neighbouring ids in ascending, not empty ``units``."""
    return 1 + int((np.diff(units) > 1).sum())
