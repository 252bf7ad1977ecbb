"""Truth of the ops that write and move pages: slow, obvious, any device."""

import torch
from torch import Tensor

from octavo.kernels.layout import entry_units


def append(k: Tensor, v: Tensor, pool: Tensor, layer: int, slots: Tensor) -> None:
    """Write K and V of T tokens: ``k, v [T, Hkv, D]`` into ``slots`` int64 [T] (unit * u + offset) of one layer."""
    unit_tokens = pool.shape[4]
    unit, offset = slots // unit_tokens, slots % unit_tokens
    pool[unit, layer, 0, :, offset] = k.to(pool.dtype)
    pool[unit, layer, 1, :, offset] = v.to(pool.dtype)


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
    """``append``, and on the way RoPE (if there is ``cos``) and the digests of pages that become full (if there is
    ``digests``).

    Args:
        k, v, pool, layer, slots: as in ``append``; ``k`` before RoPE if there is ``cos``.
        cos, sin: [T, R] in fp32 or the model's dtype, of each token's position, as the model's rotary embedding gives
            them. R is even and at most D; the D - R dimensions after it are not turned. See ``rotated``.
        digests: [units of the pool, layers of the group, Hkv, 2, D] in the pool's dtype, any strides with contiguous
            rows: the minimum and the maximum of the keys, as stored, of each full page. A row goes by the page's first
            unit.
        digest_layer: layer of ``digests`` to write.
        tables: int32 [slices, sequences, M], packed entries (layout.py) of sequences with uniform pages. Slice 0 has
            the first units of the pages; the others are of the same group of layers.
        table_slice: slice of ``layer``.
        rows: int32 [T], the table row of each token; -1: its pages are not digested. The tokens of a row are neighbours
            in the order of their positions.
        q_pos: int32 [T], the position of each token.
        page_tokens: tokens of a page, a multiple of the unit.
    """
    append(k if cos is None else rotated(k, cos, sin), v, pool, layer, slots)
    if digests is not None:
        seal(pool, layer, digests, digest_layer, tables, table_slice, rows, q_pos, page_tokens)


def rotated(k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys [T, Hkv, D] turned by ``cos, sin`` [T, R], fp32: RoPE (arXiv 2104.09864, section 3.4.2) as Hugging Face lays
    it out, "rotate half": dimensions d and d + R / 2 are a pair, for d < R / 2. Rounded once, at the end; a model that
    computes it in bf16 rounds each product."""
    turning, rest = k.float().split([cos.shape[1], k.shape[2] - cos.shape[1]], dim=2)
    first, second = turning.chunk(2, dim=2)
    half = torch.cat([-second, first], dim=2)
    return torch.cat([turning * cos.float()[:, None] + half * sin.float()[:, None], rest], dim=2)


def seal(
    pool: Tensor,
    layer: int,
    digests: Tensor,
    digest_layer: int,
    tables: Tensor | None,
    table_slice: int,
    rows: Tensor | None,
    q_pos: Tensor | None,
    page_tokens: int,
) -> None:
    """Digest the pages whose last token is among these, once the keys are written. Arguments as in ``append_fused``."""
    assert tables is not None and rows is not None and q_pos is not None and page_tokens % pool.shape[4] == 0
    closing = (rows >= 0) & (q_pos % page_tokens == page_tokens - 1)
    row, page = rows[closing].long(), q_pos[closing].long() // page_tokens
    page_units = page_tokens // pool.shape[4]
    entries = page[:, None] * page_units + torch.arange(page_units, device=pool.device)  # [n, page_units]
    keys = pool[entry_units(tables[table_slice, row[:, None], entries]), layer, 0]  # [n, page_units, Hkv, u, D]
    first = entry_units(tables[0, row, page * page_units])
    digests[first, digest_layer, :, 0] = keys.amin((1, 3))
    digests[first, digest_layer, :, 1] = keys.amax((1, 3))


def copy_units(pool: Tensor, pairs: Tensor) -> None:
    """Copy whole units over all layers: ``pairs`` int32 [n, 2] of (source, destination); no destination is a source."""
    pool[pairs[:, 1].long()] = pool[pairs[:, 0].long()]


def transfer(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copy whole units over all layers from one pool to another: ``pairs`` int32 [n, 2] of (source unit, target unit).

    The pools are two tensors ``[units, layers, 2, kv_heads, unit_tokens, head_dim]`` that differ in ``units`` at most,
    both on the CPU, or one on a device and one in host memory; ``pairs`` is where the device is. No target is listed
    twice; a source may be.
    """
    assert source.shape[1:] == target.shape[1:] and source.dtype == target.dtype
    from_units, to_units = pairs.long().unbind(1)
    target[to_units.to(target.device)] = source[from_units.to(source.device)].to(target.device)


def transfer_counted(source: Tensor, target: Tensor, pairs: Tensor, count: Tensor) -> None:
    """``transfer`` of the first ``count`` int32 [1] of ``pairs``, a number that the device has made with the list; what
    stands past it is arbitrary."""
    listed = int(count)
    if listed:
        transfer(source, target, pairs[:listed])
