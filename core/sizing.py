"""Everything that is decided once, from the config, the model and the machine."""

from __future__ import annotations

import os
from importlib.util import find_spec
from math import prod

import torch
from torch import Tensor

from octavo.core.config import KV_DTYPES, EngineConfig
from octavo.core.encoding.sources import source_units
from octavo.core.errors import CapacityError
from octavo.core.inspection import capacity_report
from octavo.core.interfaces import ModelSpec
from octavo.core.memory.elastic import PoolMemory, pool_memory
from octavo.core.memory.growth import Growth
from octavo.core.memory.host_tier import HostTier, available_memory, require_memory
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_layout import PageLayout
from octavo.core.memory.page_pool import PagePool
from octavo.core.memory.prefix_cache import PrefixCache
from octavo.core.policies import ALLOCATORS
from octavo.kernels.layout import MAX_UNITS, TRITON_DTYPES, TRITON_HEAD_DIM, pool_shape

CPU_POOL_BYTES = 4 << 30


def max_tokens(config: EngineConfig, spec: ModelSpec) -> int:
    """Longest sequence in tokens."""
    if config.max_model_tokens is None:
        return spec.max_tokens
    if config.max_model_tokens > spec.max_tokens:
        raise ValueError(
            f"max_model_tokens={config.max_model_tokens} is more than the {spec.max_tokens} positions of {spec.name}"
        )
    return config.max_model_tokens


def backend(config: EngineConfig, spec: ModelSpec, device: torch.device) -> str:
    """Name of the kernels for a model on a device."""
    name = config.backend
    if name == "auto":
        name = "triton" if device.type == "cuda" else "cpu"
    if config.backend == "cpu" and device.type != "cpu":
        raise ValueError(f"backend='cpu' cannot serve a model on {device}; use 'triton' or 'reference'")
    if config.backend == "triton" and find_spec("triton") is None:
        raise ValueError("backend='triton' needs the package triton, which is not installed; use backend='cpu'")
    if config.backend == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "backend='triton' needs a CUDA device, and the model is on the CPU; use backend='cpu', or set "
            "TRITON_INTERPRET=1 to run the kernels in Triton's (slow) interpreter"
        )
    if name == "triton" and spec.head_dim > TRITON_HEAD_DIM:
        raise ValueError(
            f"backend='triton' serves heads of at most {TRITON_HEAD_DIM} elements, and those of {spec.name} have "
            f"{spec.head_dim}; use backend='reference'"
        )
    if name == "triton" and kv_dtype(config, spec) not in TRITON_DTYPES:
        raise ValueError(
            f"backend='triton' serves a pool of fp16, bf16 or fp32, and {spec.name} keeps its keys in {spec.kv_dtype}; "
            "set kv_dtype, or use backend='reference'"
        )
    return name


def execution(config: EngineConfig, backend: str, device: torch.device) -> str:
    """How steps are launched: "eager", "graph" or "compiled"."""
    graphs = device.type == "cuda" and backend == "triton"
    if config.execution == "auto":
        return "graph" if graphs else "eager"
    if config.execution != "eager" and device.type == "cuda" and not graphs:
        raise ValueError(
            f"execution={config.execution!r} captures CUDA graphs, which backend={backend!r} does not allow; use "
            "backend='triton', or execution='eager'"
        )
    return config.execution


def kv_dtype(config: EngineConfig, spec: ModelSpec) -> torch.dtype:
    """Element type of the pool."""
    name = KV_DTYPES[config.kv_dtype]
    dtype: torch.dtype = spec.kv_dtype if name is None else getattr(torch, name)
    return dtype


def text_page_units(config: EngineConfig, plan: LayerPlan) -> int:
    """Units of a text page, over all layers."""
    return config.text_page_tokens // config.unit_tokens * plan.slices


def pool_units(
    config: EngineConfig, spec: ModelSpec, plan: LayerPlan, dtype: torch.dtype, longest: int, device: torch.device
) -> int:
    """Usable units of the pool: what was asked for, or what the memory share and ``max_seqs`` sequences can use.

    ``pool_tokens`` tokens have room in every layer; where layers let go of what lies behind their window, more fit.
    """
    page_tokens = config.text_page_tokens
    page_units = text_page_units(config, plan)
    if config.pool_tokens is not None:
        return -(-config.pool_tokens // page_tokens) * page_units
    page_bytes = page_tokens * spec.kv_bytes_per_token(dtype.itemsize)
    if device.type == "cuda":
        memory = int(torch.cuda.mem_get_info(device)[0] * config.memory_fraction)
    else:
        memory = min(
            CPU_POOL_BYTES, int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * config.memory_fraction)
        )
    pages = min(
        memory // page_bytes,
        config.max_seqs * -(-longest // page_tokens),
        (MAX_UNITS - 1) // page_units,
    )
    if pages < 1:
        raise ValueError(
            f"a page of {page_tokens} tokens takes {page_bytes} bytes and memory_fraction={config.memory_fraction} "
            f"leaves {memory}; raise memory_fraction, or set pool_tokens"
        )
    return pages * page_units


def allocate_pool(
    config: EngineConfig, spec: ModelSpec, plan: LayerPlan, units: int, dtype: torch.dtype, device: torch.device
) -> PoolMemory:
    """The pool's memory for ``units`` units, or its base share of them; uninitialised.

    Raises:
        CapacityError: there is not so much memory.
    """
    if units >= MAX_UNITS:
        raise ValueError(f"a pool of {units} units is more than the {MAX_UNITS - 1} that a table entry can name")
    unit_shape = pool_shape(units, plan.unit_layers, spec.kv_heads, config.unit_tokens, spec.head_dim)[1:]
    page_tokens = config.text_page_tokens
    page_units = text_page_units(config, plan)
    steps = Growth(config.base_share, config.growth_tokens).steps(
        units // page_units,
        page_units=page_units,
        page_tokens=page_tokens,
        page_bytes=page_tokens * spec.kv_bytes_per_token(dtype.itemsize),
    )
    try:
        return pool_memory(unit_shape, dtype, device, **steps._asdict())
    except (torch.OutOfMemoryError, MemoryError, ValueError) as error:
        if not capacity_report.is_out_of_memory(error):
            raise
        unit_bytes = prod(unit_shape) * dtype.itemsize
        raise CapacityError(
            capacity_report.pool_memory(units, unit_bytes, dtype, config, plan, device, str(error))
        ) from error


def require_tables(config: EngineConfig, plan: LayerPlan, entries: int, device: torch.device) -> None:
    """Refuse block tables of ``entries`` entries for so many sequences that the memory does not hold them."""
    nbytes = config.max_seqs * plan.slices * entries * 4
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if nbytes > available:
        raise ValueError(
            f"the block tables of max_seqs={config.max_seqs} sequences of {entries} entries take {nbytes} bytes, and "
            f"{available} are available; lower max_seqs or max_model_tokens"
        )


def host_tier(config: EngineConfig, plan: LayerPlan, kv: Tensor, backend: str, index: PrefixCache) -> HostTier | None:
    """The host tier that was asked for, in whole text pages."""
    if not config.host_tokens:
        return None
    page_tokens = config.text_page_tokens
    units = -(-config.host_tokens // page_tokens) * text_page_units(config, plan)
    require_memory(units, kv)
    return HostTier(units, kv, backend, ALLOCATORS[config.allocator](units), index)


def check_fits(layout: PageLayout, plan: LayerPlan, prompt: int, required: int, longest: int, pool: PagePool) -> None:
    """Refuse a request of which ``required`` new tokens can never be had, whoever else is served.

    The last token's KV is never stored, so ``prompt + required - 1`` slots are needed: all of them in layers that see
    everything, and what a window can touch in the others. That is most where a page begins, since the window then
    touches the longest stretch in front of it; on pages of one size, where the last page begins. An item that must not
    be split is written as a whole, and of a reused one that is copied there must be the source too.
    """
    if prompt + required > longest:
        raise CapacityError(capacity_report.too_long(prompt, required, longest))
    stored = prompt + required - 1
    pages = layout.pages_for(stored)
    starts = map(layout.first_token, [pages - 1] if layout.uniform else range(pages))
    units = max(_units_seen(layout, plan, start, layout.least_chunk(start)) for start in starts)
    units += 0 if layout.uniform else source_units(layout) * plan.slices
    if units > pool.most_units:
        raise CapacityError(capacity_report.never_fits(layout, plan, prompt, required, units, pool.most_units))


def _units_seen(layout: PageLayout, plan: LayerPlan, position: int, count: int) -> int:
    """Units of the pages that a query at ``position`` sees, and of those that ``count`` tokens from there on are on."""
    end = layout.entries_for(position + count)
    firsts = [layout.first_entry(layout.page_of(group.first_seen(position))) for group in plan.groups]
    return sum((end - first) * group.slices for first, group in zip(firsts, plan.groups, strict=True))
