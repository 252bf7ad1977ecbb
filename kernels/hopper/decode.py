"""K1 on Hopper: ``decode.cu``, and what it is launched with, where it serves what ``kernels/triton/decode.py`` does."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from octavo.kernels import log
from octavo.kernels.fresh import Fresh
from octavo.kernels.hopper.compiler import Kernel, compiled, tensor_map, usable
from octavo.kernels.layout import ID_SHIFT, VALID_MASK
from octavo.kernels.triton import settings
from octavo.kernels.triton.plan import multiprocessors, programs_a_lane
from octavo.kernels.triton.tiles import axis_strides, score_arguments

TILE = 64
"""Slots of a tile of the plan, 16 for each warp."""

THREADS = 128
MOST_ITEMS = 1 << 14
"""Rows times KV heads."""

STAGES = 2
"""Groups of 16 slots in a warp's ring: 64 KB of each block, two of which a multiprocessor holds, keep the memory busy;
with three a step of many rows takes a little longer (docs/kernels/decode.md)."""


class _Arguments(ctypes.Structure):
    """``Arguments`` of decode.cu."""

    _POINTERS = (
        "q", "k", "v", "pool", "table", "lengths", "q_pos", "slots", "cos", "sin", "sinks", "out", "lse", "part_out",
        "part_lse", "arrivals",
    )  # fmt: skip
    _STRIDES = (
        "t_batch", "t_head", "l_batch", "l_head", "k_batch", "k_head", "v_batch", "v_head", "angle_row", "q_batch",
        "q_head", "out_batch", "out_head", "unit_stride",
    )  # fmt: skip
    _fields_ = [
        *[(name, c_void_p) for name in _POINTERS],
        *[(name, c_int64) for name in _STRIDES],
        *[(name, c_int) for name in ("items", "most", "min_tiles", "unit_rows", "layer_row")],
        *[(name, c_float) for name in ("scale", "cap")],
    ]


def _shared_bytes(head_dim: int, group: int, unit: int) -> int:
    """As decode.cu lays it out: rings, what is joined, queries, barriers, spans, valid counts, the plan."""
    joined = group * (4 * head_dim + 9 + head_dim // 2) + group % 2
    return 4 * STAGES * (4 * 16 * head_dim + 8 + 4 * max(16 // unit, 1)) + 4 * joined + 12 * 64 + 24


def serves(q: Tensor, fresh: Fresh | None, pool: Tensor, sinks: Tensor | None) -> bool:
    """Whether the kernel takes queries ``q [B, Hq, D]``, and new tokens, over a pool."""
    head_dim, group, unit = q.shape[2], q.shape[1] // pool.shape[3], pool.shape[4]
    given = [q] if fresh is None else [q, fresh.k, fresh.v]
    angles = [] if fresh is None or fresh.cos is None or fresh.sin is None else [fresh.cos, fresh.sin]
    return (
        usable(q.device)
        and not settings.in_trial("decode", "combine")  # which are Triton's
        and len(q) > 0
        and pool.dtype in (torch.bfloat16, torch.float16)
        and all(x.dtype == pool.dtype and _in_pairs(x) for x in given)
        and all(x.dtype in (torch.float32, pool.dtype) and _in_pairs(x) and x.shape[1] % 4 == 0 for x in angles)
        and len({x.dtype for x in angles}) <= 1
        and (sinks is None or sinks.dtype in (torch.float32, pool.dtype))
        and head_dim in (64, 128)
        and group <= 8
        and unit in (8, 16, 32, 64)
        and q.shape[0] * pool.shape[3] <= MOST_ITEMS
        and pool.numel() // head_dim < 1 << 31
    )


def _in_pairs(x: Tensor) -> bool:
    """Whether its rows can be read two numbers at a time."""
    return x.data_ptr() % (2 * x.element_size()) == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])


@cache
def _kernel(device: int, shared_bytes: int, macros: tuple[tuple[str, int], ...]) -> Kernel:
    with torch.cuda.device(device):
        return Kernel("decode", compiled("decode", dict(macros)), THREADS, shared_bytes)


def decode(
    q: Tensor,
    fresh: Fresh | None,
    pool: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """``out [B, Hq, D]`` and ``lse`` fp32 ``[B, Hq]`` of ``reference.decode``, or with ``fresh`` tokens of
    ``reference.append_decode``; what ``serves``. All calls over a pool go to one stream. What is captured must have run
    once before, which compiles it."""
    assert table.dtype == lengths.dtype == q_pos.dtype == torch.int32
    assert fresh is None or fresh.slots.dtype == torch.int64
    batch, q_heads, head_dim = q.shape
    units, _, _, kv_heads, unit, _ = pool.shape
    heads, group, entries = lengths.shape[2], q_heads // kv_heads, table.shape[3]
    items, lanes = batch * heads, kv_heads // heads
    tuned = {**settings.launch("decode_hopper", f"{head_dim}", q.device), "BLOCK_N": TILE}
    most, min_tiles = programs_a_lane(items, lanes, entries * unit, multiprocessors(q.device), tuned)
    if log.KERNELS:
        how = f"CUDA for Hopper, at most {most} blocks a KV head" if most else "CUDA for Hopper, a block a row"
        log.chosen("decode", "triton", how, pool, query_heads=q_heads, rows=batch, entries=entries, tile=TILE)

    out, lse = torch.empty_like(q), q.new_empty((batch, q_heads), dtype=torch.float32)
    part_out = q.new_empty((2 * most, q_heads, head_dim), dtype=torch.float32)
    part_lse = q.new_empty((2 * most, q_heads), dtype=torch.float32)
    scale, cap = score_arguments(scale, softcap)
    cos = None if fresh is None else fresh.cos
    constants = {
        "D": head_dim,
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "HEADS": heads,
        "U": unit,
        "STAGES": STAGES,
        "DIRECT": most == 0,
        "WINDOW": window,
        "CAPPED": softcap != 0,
        "SINKS": sinks is not None,
        "WIDE_SINKS": sinks is not None and sinks.dtype == torch.float32,
        "FRESH": fresh is not None,
        "ROTARY": 0 if cos is None else cos.shape[1],
        "WIDE_ANGLES": cos is not None and cos.dtype == torch.float32,
        "BF16": pool.dtype == torch.bfloat16,
        "ID_SHIFT": ID_SHIFT,
        "VALID_MASK": VALID_MASK,
    }
    kernel = _kernel(q.device.index, _shared_bytes(head_dim, group, unit), tuple(constants.items()))
    unit_rows = pool.stride(0) // head_dim
    runs = tensor_map(
        pool,
        (64, head_dim // 64, units * unit_rows),
        (128, head_dim * pool.element_size()),
        (64, head_dim // 64, min(unit, 16)),
    )
    _, t_batch, t_head = axis_strides(table)
    _, l_batch, l_head = axis_strides(lengths)
    new = Fresh(q, q, q, None, None) if fresh is None else fresh  # the first stands for what is left out
    tensors = {"q": q, "pool": pool, "table": _of(table, layer), "lengths": _of(lengths, layer), "q_pos": q_pos}
    tensors |= {"k": new.k, "v": new.v, "slots": new.slots, "out": out, "lse": lse}
    tensors |= {"part_out": part_out, "part_lse": part_lse, "arrivals": _arrivals(pool.data_ptr(), q.device)}
    optional = {"cos": new.cos, "sin": new.sin, "sinks": sinks}
    arguments = _Arguments(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        **{name: tensor.data_ptr() for name, tensor in optional.items() if tensor is not None},
        t_batch=t_batch,
        t_head=t_head,
        l_batch=l_batch,
        l_head=l_head,
        k_batch=new.k.stride(0),
        k_head=new.k.stride(1),
        v_batch=new.v.stride(0),
        v_head=new.v.stride(1),
        angle_row=0 if cos is None else cos.stride(0),
        q_batch=q.stride(0),
        q_head=q.stride(1),
        out_batch=out.stride(0),
        out_head=out.stride(1),
        unit_stride=pool.stride(0),
        items=items,
        most=most,
        min_tiles=min_tiles,
        unit_rows=unit_rows,
        layer_row=layer * 2 * kv_heads * unit,
        scale=scale,
        cap=cap,
    )
    kernel.launch((lanes, most or items), (runs, arguments))
    return out, lse


@cache
def _arrivals(pool: int, device: torch.device) -> Tensor:
    """Zeros that a launch counts in and leaves as it has found them. One a pool, whose launches follow on one another;
    never given back, as captured graphs hold on to it."""
    assert not torch.cuda.is_current_stream_capturing(), "a graph would be alone in setting them to zero"
    return torch.zeros(MOST_ITEMS, dtype=torch.int32, device=device)


def _of(x: Tensor, layer: int) -> Tensor:
    return x[layer if len(x) > 1 else 0]
