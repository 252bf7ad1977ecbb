"""Writing and moving pages on a CPU (semantics and shapes as in ``reference/pages.py``)."""

import torch
from torch import Tensor

from octavo.kernels.reference.pages import rotated, seal


def append(k: Tensor, v: Tensor, pool: Tensor, layer: int, slots: Tensor) -> None:
    _, layers, _, heads, unit_tokens, dim = pool.shape
    unit = torch.div(slots, unit_tokens, rounding_mode="floor")
    first = (unit * (2 * layers * heads - 1) + 2 * layer * heads) * unit_tokens + slots  # slots holds one unit already
    rows = (first[:, None] + torch.arange(0, heads * unit_tokens, unit_tokens)).flatten()  # [T * Hkv]
    flat = pool.view(-1, dim)
    flat.index_copy_(0, rows, k.reshape(-1, dim).to(pool.dtype))
    flat.index_copy_(0, rows + heads * unit_tokens, v.reshape(-1, dim).to(pool.dtype))


def append_fused(
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    layer: int,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    digests: Tensor | None,
    digest_layer: int,
    tables: Tensor | None,
    table_slice: int,
    rows: Tensor | None,
    q_pos: Tensor | None,
    page_tokens: int,
) -> None:
    append(k if cos is None else rotated(k, cos, sin), v, pool, layer, slots)
    if digests is not None:
        seal(pool, layer, digests, digest_layer, tables, table_slice, rows, q_pos, page_tokens)


def transfer(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    assert source.shape[1:] == target.shape[1:] and source.dtype == target.dtype
    # Units of real models take 100 KB and more: a plain copy of each is ten times as fast as gathering them first.
    for from_unit, to_unit in pairs.tolist():
        target[to_unit].copy_(source[from_unit])
