"""K1 on Hopper: what ``decode.cu`` is launched with, in place of the kernel of ``kernels/triton/decode.py``."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from octavo.kernels.hopper.compiler import Kernel, compiled, tensor_map, usable

TILE = 64
"""Slots of a tile of the plan, 16 for each warp."""

THREADS = 128
STAGES = 2
"""Groups of 16 slots in a warp's ring: with 64 KB asked for by each of a multiprocessor's two blocks, the memory has all
that it can do; three are a little slower (docs/results.md)."""


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


def _shared_bytes(head_dim: int, group: int, unit: int, stages: int) -> int:
    """As decode.cu lays it out: rings, what is joined, queries, barriers, spans, valid counts, the plan."""
    joined = group * (4 * head_dim + 9 + head_dim // 2) + group % 2
    return 4 * stages * (4 * 16 * head_dim + 8 + 4 * max(16 // unit, 1)) + 4 * joined + 12 * 64 + 24


def serves(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, cos: Tensor | None, sinks: Tensor | None) -> bool:
    """Whether the kernel takes queries ``q [B, Hq, D]``, and ``k, v [B, Hkv, D]`` of new tokens, over a pool."""
    head_dim, group, unit = q.shape[2], q.shape[1] // pool.shape[3], pool.shape[4]
    aligned = all(x.dtype == pool.dtype and _in_pairs(x) for x in (q, k, v))
    return (
        usable(q.device)
        and aligned
        and pool.dtype in (torch.bfloat16, torch.float16)
        and (cos is None or (cos.shape[1] % 4 == 0 and cos.dtype in (torch.float32, pool.dtype) and _in_pairs(cos)))
        and (sinks is None or sinks.dtype in (torch.float32, pool.dtype))
        and head_dim in (64, 128)
        and group <= 8
        and unit in (8, 16, 32, 64)
        and pool.numel() // head_dim < 1 << 31
    )


def _in_pairs(x: Tensor) -> bool:
    """Whether its rows can be read two numbers at a time."""
    return x.data_ptr() % (2 * x.element_size()) == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])


@cache
def _kernel(device: int, shared_bytes: int, macros: tuple[tuple[str, int], ...]) -> Kernel:
    with torch.cuda.device(device):
        return Kernel("decode", compiled("decode", dict(macros)), THREADS, shared_bytes)


def attend(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    sinks: Tensor | None,
    scale: float,
    cap: float,
    window: int,
    k: Tensor | None,
    v: Tensor | None,
    slots: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    most: int,
    min_tiles: int,
    out: Tensor,
    lse: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
) -> None:
    """The kernel of ``kernels/triton/decode.py``, by the same names: ``scale`` and ``cap`` as of ``score_arguments``,
    ``k, v, slots, cos, sin`` of the new tokens, if there are any, ``most`` and ``min_tiles`` of a plan in tiles of
    TILE, and where outputs and parts go."""
    batch, q_heads, head_dim = q.shape
    units, _, _, kv_heads, unit, _ = pool.shape
    heads, group = lengths.shape[2], q_heads // kv_heads
    items, unit_rows = batch * heads, pool.stride(0) // head_dim
    constants = {
        "D": head_dim,
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "HEADS": heads,
        "U": unit,
        "STAGES": STAGES,
        "DIRECT": most == 0,
        "WINDOW": window,
        "CAPPED": cap != 0,
        "SINKS": sinks is not None,
        "WIDE_SINKS": sinks is not None and sinks.dtype == torch.float32,
        "FRESH": k is not None,
        "ROTARY": 0 if cos is None else cos.shape[1],
        "WIDE_ANGLES": cos is not None and cos.dtype == torch.float32,
        "BF16": pool.dtype == torch.bfloat16,
    }
    kernel = _kernel(q.device.index, _shared_bytes(head_dim, group, unit, STAGES), tuple(constants.items()))
    runs = tensor_map(
        pool,
        (64, head_dim // 64, units * unit_rows),
        (128, head_dim * pool.element_size()),
        (64, head_dim // 64, min(unit, 16)),
    )
    of_layer = {"table": _of(table, layer), "lengths": _of(lengths, layer)}
    tensors = {"q": q, "k": k, "v": v, "pool": pool, **of_layer, "q_pos": q_pos, "slots": slots, "cos": cos, "sin": sin}
    tensors |= {"sinks": sinks, "out": out, "lse": lse, "part_out": part_out, "part_lse": part_lse}
    tensors["arrivals"] = _arrivals(pool.data_ptr(), q.device, items * (kv_heads // heads))
    arguments = _Arguments(
        **{name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
        t_batch=_stride(table, 1),
        t_head=_stride(table, 2),
        l_batch=_stride(lengths, 1),
        l_head=_stride(lengths, 2),
        k_batch=0 if k is None else k.stride(0),
        k_head=0 if k is None else k.stride(1),
        v_batch=0 if v is None else v.stride(0),
        v_head=0 if v is None else v.stride(1),
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
    kernel.launch((kv_heads // heads, most or items), (runs, arguments))


@cache
def _arrivals(pool: int, device: torch.device, count: int) -> Tensor:
    """Zeros that a launch counts in and leaves as it has found them. One a pool, whose launches follow on one another;
    never given back, as captured graphs hold on to it."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def _of(x: Tensor, layer: int) -> Tensor:
    return x[layer if len(x) > 1 else 0]


def _stride(x: Tensor, axis: int) -> int:
    return 0 if x.shape[axis] == 1 else x.stride(axis)
