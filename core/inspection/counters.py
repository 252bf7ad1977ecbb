"""The counters of an engine, gathered from the parts that keep them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.core.outputs import EngineStats
from octavo.core.sizing import text_page_units

if TYPE_CHECKING:
    from octavo.core.engine import Engine


def engine_stats(engine: Engine) -> EngineStats:
    """See ``Engine.stats``."""
    pool, scheduler, runner, host = engine._pool, engine._scheduler, engine._runner, engine._host
    page_units = text_page_units(engine.config, engine._plan)
    device = runner.kv.device
    return EngineStats(
        units_total=pool.total_units,
        units_free=pool.free_units,
        units_cached=pool.cached_units,
        units_held=pool.held_units,
        units_held_peak=pool.held_peak,
        pages_total=pool.total_units // page_units,
        pages_free=pool.free_units // page_units,
        pages_cached=pool.cached_units // page_units,
        pages_held=pool.held_units // page_units,
        host_units_total=0 if host is None else host.units_total,
        host_units_free=0 if host is None else host.units_free,
        host_units_held=0 if host is None else host.units_held,
        host_units_pinned=0 if host is None else host.units_pinned,
        host_wait_s=sum(hosted.wait_s for hosted in runner.hosted.values()),
        hit_tokens=scheduler.hit_tokens,
        query_tokens=scheduler.query_tokens,
        evictions=pool.evictions,
        preemptions=scheduler.preemptions,
        copies=runner.copies.made,
        steps=engine._steps,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        running_peak=scheduler.running_peak,
        device_bytes_peak=torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else pool.held_peak * runner.kv[0].nbytes + runner.digest_bytes,
    )
