"""Whom octavo's kernels race: FlashInfer where it is installed, torch's own attention, FlexAttention.

A function gives named contenders, or none where a package is missing. Everything that costs (copies of K and V in a
rival's layout, plans, compilation) happens when a contender's first call runs: whoever is not asked to race costs
nothing, and what goes wrong is that contender's own failure.

FlashInfer reads its own layout: one contiguous tensor a layer, ``[pages, 2, kv_heads, page, head_dim]`` (HND), with the
same pages in the same random order. Its host-side plan is made once, outside of the timed calls, for these lengths.
SDPA and FlexAttention read contiguous K and V, which no paged kernel can. In a decode the query heads of a group stand
as the queries of SDPA, which is its fastest form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo.kernels.layout import entry_units
from octavo.scripts.kernel_races.paged import Paged
from octavo.scripts.schema_kernels import RIVAL_FAMILIES

Calls = list[Callable[[], object]]

SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
WORKSPACE_BYTES = 256 << 20


def family(contender: str) -> str | None:
    """The family of a rival; None for octavo and for what is no rival, as one large copy."""
    word = contender.split()[0]
    return word if word in RIVAL_FAMILIES else None


def installed(package: str) -> bool:
    return find_spec(package) is not None


def lazily(make: Callable[[], Sequence[Callable[[], object]]], count: int) -> Calls:
    """``count`` calls that are made when one of them is first called."""
    made = cache(make)
    return [lambda index=index: made()[index]() for index in range(count)]


def attention(paged: Paged) -> dict[str, Calls]:
    """Everybody who can do what ``decode`` does on a shape; only FlashInfer if it is ragged or has several queries."""
    shape = paged.shape
    found: dict[str, Calls] = {}
    if installed("flashinfer"):
        cu_q = paged.cu_q if shape.queries > 1 else None
        args = (paged.q, paged.pool, paged.table, paged.lengths, paged.scale, cu_q)
        found["flashinfer"] = lazily(partial(flashinfer_attention, *args), paged.layers)
    if shape.queries > 1 or len(set(shape.lengths)) > 1:
        return found
    contiguous = cache(lambda: [paged.contiguous(layer) for layer in range(paged.layers)])
    for name, backend in SDPA_BACKENDS.items():
        found[f"sdpa {name}"] = lazily(partial(_sdpa_decode, paged, contiguous, backend), paged.layers)
    found["flex"] = lazily(partial(_flex_decode, paged, contiguous), paged.layers)
    return found


def flashinfer_attention(
    q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, scale: float, cu_q: Tensor | None = None
) -> Calls:
    """FlashInfer's paged attention, a call a layer of ``pool``: decode, or with ``cu_q`` int32 [B + 1] causal prefill.

    Args:
        table, lengths: int32 [1, B, 1, M] and [1, B, 1]: one table for all layers and heads, whole units.
    """
    import flashinfer

    kv_heads, unit, head_dim = pool.shape[3:]
    pages = _pages(table, lengths, unit)
    heads = (q.shape[1], kv_heads, head_dim, unit)
    options = {"q_data_type": q.dtype, "kv_data_type": pool.dtype, "sm_scale": scale}
    if cu_q is None:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(q), "HND", use_tensor_cores=True)
        wrapper.plan(*pages, *heads, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(q), "HND")
        wrapper.plan(cu_q, *pages, *heads, causal=True, **options)
    return [partial(wrapper.run, q, cache) for cache in _layers(pool)]


def flashinfer_cascade(q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, shared: int, scale: float) -> Calls:
    """FlashInfer's cascade of two levels, a call a layer: all rows of a decode share their first ``shared`` slots."""
    import flashinfer

    kv_heads, unit, head_dim = pool.shape[3:]
    common = _pages(table[:, :1, :, : shared // unit], torch.full_like(lengths[:, :1], shared), unit)
    own = _pages(table[..., shared // unit :], lengths - shared, unit)
    batch = len(q)
    rows = [torch.tensor(bounds, device=q.device, dtype=torch.int32) for bounds in ([0, batch], range(batch + 1))]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, _workspace(q), "HND")
    levels = [list(level) for level in zip(common, own, strict=True)]
    heads = (q.shape[1], kv_heads, head_dim, unit)
    wrapper.plan(rows, *levels, *heads, sm_scale=scale, q_data_type=q.dtype, kv_data_type=pool.dtype)
    return [partial(wrapper.run, q, cache) for cache in _layers(pool)]


def flashinfer_append(k: Sequence[Tensor], v: Sequence[Tensor], slots: Sequence[Tensor], pool: Tensor) -> Calls:
    """FlashInfer's append, a call an entry of ``k``, ``v`` [T, kv_heads, head_dim] and ``slots`` int64 [T].

    Every token counts as a sequence of one page, so that it goes to any slot.
    """
    import flashinfer

    caches = _layers(pool)
    unit = pool.shape[4]
    calls: Calls = []
    for index, where in enumerate(slots):
        tokens = torch.arange(len(where) + 1, device=where.device, dtype=torch.int32)
        pages = (tokens[:-1], (where % unit).int(), caches[index % len(caches)], (where // unit).int(), tokens)
        full = torch.full_like(tokens[:-1], unit)
        calls.append(partial(flashinfer.append_paged_kv_cache, k[index], v[index], *pages, full, "HND"))
    return calls


def flashinfer_top_k(scores: Sequence[Tensor], k: int) -> Calls:
    """FlashInfer's top-k of rows [R, P], a call an entry; neither sorted nor deterministic, which is its fastest."""
    import flashinfer

    return [partial(flashinfer.top_k, rows, k) for rows in scores]


def flashinfer_sampling(logits: Sequence[Tensor], top_k: int, top_p: float) -> Calls:
    """FlashInfer's draw from logits [B, V], a call an entry: its fused filters, or a plain draw with k = 0, p = 1."""
    import flashinfer

    if top_k == 0 and top_p == 1.0:
        return [partial(flashinfer.sampling.sampling_from_logits, rows) for rows in logits]
    most = top_k or logits[0].shape[1]
    draw = flashinfer.sampling.top_k_top_p_sampling_from_logits
    return [partial(draw, rows, most, top_p, filter_apply_order="top_k_first") for rows in logits]


def _sdpa_decode(paged: Paged, contiguous: Callable[[], list[tuple[Tensor, Tensor]]], backend: SDPBackend) -> Calls:
    shape = paged.shape
    q = paged.q.view(len(shape.lengths), shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)

    def attend(k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return [partial(attend, k, v) for k, v in contiguous()]


def _flex_decode(paged: Paged, contiguous: Callable[[], list[tuple[Tensor, Tensor]]]) -> Calls:
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()  # a shape is a compilation, and torch gives up after a few of one function
    attend: Any = torch.compile(flex_attention, dynamic=False)
    q = paged.q[:, :, None]  # [B, heads, 1, head_dim]
    grouped = paged.shape.heads > paged.shape.kv_heads
    return [partial(attend, q, k, v, enable_gqa=grouped) for k, v in contiguous()]


def _layers(pool: Tensor) -> list[Tensor]:
    """A pool as FlashInfer has it: a tensor a layer, [units, 2, kv_heads, unit, head_dim]."""
    return [pool[:, layer].contiguous() for layer in range(pool.shape[1])]


def _pages(table: Tensor, lengths: Tensor, unit: int) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's table, int32: first page of each sequence [B + 1], pages [n], tokens in each last page [B]."""
    length = lengths.view(-1)
    held = (length + unit - 1) // unit
    ids = entry_units(table[0, :, 0])
    used = torch.arange(ids.shape[1], device=ids.device) < held[:, None]
    ends = torch.cat([held.new_zeros(1), held.cumsum(0)]).int()
    return ends, ids[used].int(), ((length - 1) % unit + 1).int()


def _workspace(q: Tensor) -> Tensor:
    """FlashInfer asks for zeros."""
    return torch.zeros(WORKSPACE_BYTES, device=q.device, dtype=torch.uint8)
