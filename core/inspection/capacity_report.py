"""What to say when memory does not suffice: what was asked, who holds what, and which knob helps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from octavo.core.config import EngineConfig
from octavo.core.inspection.page_census import units_by_request
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_layout import PageLayout

if TYPE_CHECKING:
    from octavo.core.engine import Engine
    from octavo.core.memory.page_pool import PagePool
    from octavo.core.sequence import Sequence
    from octavo.core.step_plan import StepPlan

TOP_HOLDERS = 3


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was not to be had: by torch on a GPU, by Python, or (as the cause) by the system's mapping."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or isinstance(error.__cause__, OSError | OverflowError)


def too_long(prompt: int, required: int, longest: int) -> str:
    """A sequence of ``prompt`` + ``required`` tokens is longer than one may be."""
    return (
        f"a prompt of {prompt} tokens and {required} new ones are {prompt + required} tokens, and a sequence may have "
        f"{longest}; shorten the prompt by {prompt + required - longest} tokens, lower max_tokens, or raise "
        "max_model_tokens if the model's context allows it"
    )


def never_fits(layout: PageLayout, plan: LayerPlan, prompt: int, required: int, units: int, pool_units: int) -> str:
    """A request needs ``units`` units at once, and the pool can have ``pool_units``, whoever else is served."""
    page_tokens = layout.page_slots(layout.pages_for(prompt + required - 1) - 1)
    slots, there = -(-units * layout.unit_tokens // plan.slices), pool_units * layout.unit_tokens // plan.slices
    return (
        f"a prompt of {prompt} tokens and {required} new ones need {-(-slots // page_tokens)} pages of {page_tokens} "
        f"tokens, and the pool has {there // page_tokens} ({units} and {pool_units} units); raise pool_tokens to at "
        f"least {slots} from {there} (or memory_fraction, which sizes the pool where pool_tokens is not set), shorten "
        "the prompt, or lower max_tokens"
    )


def not_scored(prompt: int, target: int, pool: PagePool) -> str:
    """A score ended early, though its request could fit a pool that holds nothing else."""
    return (
        f"a prompt of {prompt} tokens with a target of {target} could not be scored: the pool has {pool.most_units} "
        f"units, and {pool.pinned_units} of them are pinned"
    )


def pool_memory(
    units: int,
    unit_bytes: int,
    dtype: torch.dtype,
    config: EngineConfig,
    plan: LayerPlan,
    device: torch.device,
    said: str,
) -> str:
    """The memory of a pool of ``units`` units of ``unit_bytes`` bytes, and the scratch unit, was not to be had, and the
    allocator ``said`` so."""
    free = _free_bytes(device)
    token_bytes = unit_bytes * plan.slices // config.unit_tokens
    page_tokens = config.text_page_tokens
    most = max(0, free - unit_bytes) // (token_bytes * page_tokens) * page_tokens
    if config.pool_tokens is not None:
        knob = f"lower pool_tokens from {config.pool_tokens} to at most {most}"
    else:
        share = config.memory_fraction * min(1.0, free / ((units + 1) * unit_bytes)) * 0.9
        knob = (
            f"lower memory_fraction from {config.memory_fraction:g}, to {share:.2f} or so, or max_seqs="
            f"{config.max_seqs} or max_model_tokens, which bound the pool, or set pool_tokens to at most {most}"
        )
    half = f", or kv_dtype='bf16' for {2 / dtype.itemsize:.0%} of the bytes" if dtype.itemsize > 2 else ""
    wanted = units * config.unit_tokens // plan.slices
    return (
        f"the pool's {wanted} tokens of KV in {str(dtype).removeprefix('torch.')} "
        f"need {_size((units + 1) * unit_bytes)} ({token_bytes} bytes a token), and {device} has {_size(free)} free"
        f"{_torch_share(device)}; {knob}{half} ({said.splitlines()[0]})"
    )


@contextmanager
def noted(plan: StepPlan, engine: Engine) -> Iterator[None]:
    """Within the block a plan's chunks are computed: running out of memory is noted."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if plan.chunks:
            error.add_note(_step_memory(plan.tokens, len(plan.chunks), engine))
        raise


def _step_memory(tokens: int, sequences: int, engine: Engine) -> str:
    """A forward pass over ``tokens`` tokens of ``sequences`` sequences ran out of memory."""
    config, device, kv = engine.config, engine._model.device, engine._runner.kv
    return (
        f"the step was over {tokens} tokens of {sequences} sequences; {device} has {_size(_free_bytes(device))} free"
        f"{_torch_share(device)}, of which the pool is {_size(kv.nbytes)}. A step's activations grow with its tokens: "
        f"lower step_tokens from {config.step_tokens} to, say, {max(1, tokens // 2)}, or max_seqs from "
        f"{config.max_seqs}; or leave more beside the pool: lower "
        + (
            f"memory_fraction from {config.memory_fraction:g}"
            if config.pool_tokens is None
            else f"pool_tokens from {config.pool_tokens}"
        )
    )


def stranded(sequence: Sequence, engine: Engine) -> str:
    """Nobody else runs, and the pool cannot hold one more token of a sequence, or the first chunk of one that waits."""
    pool, plan, layout, request = engine._pool, engine._plan, sequence.layout, sequence.request
    count = 1 if sequence.computed else min(sequence.chunk_limit(), engine.config.step_tokens)
    what = "token needs" if count == 1 else f"{count} tokens need"
    wanted = min(len(request.prompt) + request.params.max_tokens - 1, engine.max_model_tokens)
    pool_tokens, pinned_tokens = (
        units * layout.unit_tokens // plan.slices for units in (pool.most_units, _pinned(pool))
    )
    enough = layout.entries_for(wanted) * layout.unit_tokens + pinned_tokens
    return (
        f"request {request.request_id!r}, sample {sequence.sample}, ends with finish_reason='capacity' after "
        f"{sequence.generated} new tokens: its next {what} {sequence.units_for(count)} more units, and "
        f"{pool.available + pool.growable} of {pool.most_units} can be had. {holders(engine)}. Raise pool_tokens from "
        f"{pool_tokens} to {enough} for all of its max_tokens={request.params.max_tokens} (or memory_fraction, which "
        "sizes the pool where pool_tokens is not set), or lower max_tokens"
        + (", or pin fewer requests' pages by their priority" if pinned_tokens else "")
        + (f", or lower page_tokens from {layout.page_slots(0)}" if layout.page_slots(0) > pool_tokens // 8 else "")
    )


def queues(engine: Engine) -> str:
    """Who runs, waits and is parked, and what could be had for them."""
    scheduler, pool = engine._scheduler, engine._pool
    return (
        f"{len(scheduler.running)} sequences running, {len(scheduler.waiting)} waiting, {len(scheduler.parked)} "
        f"parked; {pool.available} of {pool.most_units} units available, {pool.pinned_units} pinned"
    )


def holders(engine: Engine) -> str:
    """Who holds the pool now: the requests that hold most, and what is cached and free."""
    pool = engine._pool
    held, pinned = units_by_request(engine), _pinned(pool)
    parked = {s.request.request_id for s in engine._scheduler.parked}
    said = [
        f"{name!r}{' (an idle session)' if name in parked else ''} {units} units ({units / pool.total_units:.0%})"
        for name, units in list(held.items())[:TOP_HOLDERS]
    ]
    rest = list(held.values())[TOP_HOLDERS:]
    said += [f"{len(rest)} more requests {sum(rest)}"] if rest else []
    return (
        f"Of {pool.total_units} units are held {pool.held_units}"
        + (f" ({', '.join(said)})" if said else "")
        + f", cached {pool.cached_units}{f' ({pinned} of them pinned)' if pinned else ''}, free {pool.free_units}"
    )


def _pinned(pool: PagePool) -> int:
    """Units of idle pages that are never evicted, or not before one that is pinned."""
    return pool.pinned_units


def _free_bytes(device: torch.device) -> int:
    """What a new allocation could get: of the device, or of this machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _torch_share(device: torch.device) -> str:
    """Where the rest of a GPU is, as far as this process knows."""
    if device.type != "cuda":
        return ""
    total = torch.cuda.mem_get_info(device)[1]
    return f" of {_size(total)} ({_size(torch.cuda.memory_reserved(device))} are this process's, by torch)"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10**7 else f"{count} bytes"
