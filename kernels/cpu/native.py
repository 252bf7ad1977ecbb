"""``decode.c`` and ``prefill.c``, compiled the first time a shape needs them (``compiler.py``).

Where there is no compiler, ``attention.py`` works with torch alone, three to six times slower, with the same results up
to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from octavo.kernels.cpu import compiler, processor
from octavo.kernels.layout import ID_SHIFT, MAX_UNIT_TOKENS, VALID_MASK

SOURCE = Path(__file__).with_name("decode.c")
PREFILL_SOURCE = Path(__file__).with_name("prefill.c")
HEADERS = tuple(Path(__file__).with_name(name) for name in ("exponential.h", "decode_args.h"))
TYPES = (torch.float32, torch.float16, torch.bfloat16)
NO_MEMORY = -1


class Args(ctypes.Structure):
    """The C struct of the same name in ``decode_args.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "slots")),
        *((name, ctypes.c_void_p) for name in ("pool", "table", "lengths", "unit_pos", "q_pos", "sinks")),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "mass")),
        *((name, ctypes.c_int64) for name in ("batch", "units", "layers", "layer", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("unit_tokens", "entries", "window")),
        *((name, ctypes.c_int64) for name in ("table_row", "table_head", "lengths_row", "lengths_head")),
        *((name, ctypes.c_int64) for name in ("unit_pos_row", "unit_pos_head")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
    )


class PrefillArgs(ctypes.Structure):
    """``Args`` in ``prefill.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "pool", "table", "lengths", "cu_q", "q_pos", "sinks")),
        *((name, ctypes.c_void_p) for name in ("out", "lse")),
        *((name, ctypes.c_int64) for name in ("batch", "units", "layers", "layer", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("unit_tokens", "entries", "window")),
        *((name, ctypes.c_int64) for name in ("table_row", "table_head", "lengths_row", "lengths_head")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
    )


def decode(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    unit_pos: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    want_mass: bool,
    want_lse: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """``reference.decode``; None where this machine cannot compile it for the pool's type and shape."""
    batch, q_heads, _ = q.shape
    kv_heads = pool.shape[3]
    function = decode_function(q, pool) if is_plain(q, pool, layer) else None
    if function is None:
        return None
    q = side_by_side(q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((batch, q_heads) if want_lse else (0,), dtype=torch.float32)
    mass = q.new_zeros((batch, kv_heads, table.shape[3]) if want_mass else (0,), dtype=torch.float32)
    sinks = None if sinks is None else sinks.float().contiguous()
    q_pos = q_pos.int().contiguous()
    pages, table, lengths = _pages(pool, layer, table, lengths)
    unit_pos, unit_pos_strides = (None, (0, 0)) if unit_pos is None else _of_layer(unit_pos, layer)
    args = Args(
        q=q.data_ptr(),
        q_row=q.stride(0),
        q_head=q.stride(1),
        unit_pos=None if unit_pos is None else unit_pos.data_ptr(),
        q_pos=q_pos.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr() if want_lse else None,
        mass=mass.data_ptr() if want_mass else None,
        batch=batch,
        window=window,
        unit_pos_row=unit_pos_strides[0],
        unit_pos_head=unit_pos_strides[1],
        scale=scale,
        softcap=softcap,
        **pages,
    )
    _call(function, args)
    return out, lse, mass


def prefill(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    cu_q: Tensor,
    q_pos: Tensor,
    unit_pos: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    want_lse: bool,
    q_span: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """``reference.prefill`` of bf16 over sequences in logical order, causally; None for all else, and where this
    machine cannot compile it or its processor multiplies no bf16."""
    tokens, q_heads, dim = q.shape
    if unit_pos is not None or q_span is not None or q.dtype != torch.bfloat16 or pool.dtype != torch.bfloat16:
        return None
    if dim % 16 or not is_plain(q, pool, layer) or not _multiplies_bf16():
        return None
    function = _function(PREFILL_SOURCE, pool.dtype, dim, q_heads // pool.shape[3], q.dtype)
    if function is None:
        return None
    query = q.contiguous()
    out = torch.zeros_like(query)
    lse = torch.full((tokens, q_heads) if want_lse else (0,), -torch.inf)
    sinks = None if sinks is None else sinks.float().contiguous()
    cu_q, q_pos = cu_q.int().contiguous(), q_pos.int().contiguous()
    pages, table, lengths = _pages(pool, layer, table, lengths)
    args = PrefillArgs(
        q=query.data_ptr(),
        cu_q=cu_q.data_ptr(),
        q_pos=q_pos.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr() if want_lse else None,
        batch=len(cu_q) - 1,
        window=window,
        scale=scale,
        softcap=softcap,
        **pages,
    )
    _call(function, args)
    return out, lse


def _pages(pool: Tensor, layer: int, table: Tensor, lengths: Tensor) -> tuple[dict[str, int], Tensor, Tensor]:
    """Where one layer's pages are, as both structs say it, and the tensors of which that holds while they live."""
    units, layers, _, kv_heads, unit_tokens, _ = pool.shape
    table, table_strides = _of_layer(table, layer)
    lengths, lengths_strides = _of_layer(lengths, layer)
    fields = {
        "pool": pool.data_ptr(),
        "table": table.data_ptr(),
        "lengths": lengths.data_ptr(),
        "units": units,
        "layers": layers,
        "layer": layer,
        "kv_heads": kv_heads,
        "unit_tokens": unit_tokens,
        "entries": table.shape[2],
        "table_row": table_strides[0],
        "table_head": table_strides[1],
        "lengths_row": lengths_strides[0],
        "lengths_head": lengths_strides[1],
    }
    return fields, table, lengths


def _call(function: Callable[[object], int], args: Args | PrefillArgs) -> None:
    failed = function(ctypes.byref(args))
    if failed:
        raise failure(failed, args)


def failure(failed: int, args: Args | PrefillArgs) -> Exception:
    """What a function that was compiled here means by its result."""
    if failed == NO_MEMORY:
        return MemoryError(f"no memory for the working buffers of attention over {args.batch} sequences on the CPU")
    return IndexError(
        f"a length past a table of {args.entries} entries, or an entry or a slot past a pool of {args.units} units"
    )


def decode_function(q: Tensor, pool: Tensor) -> Callable[[object], int] | None:
    """``decode.c`` for queries and a pool of these types and shapes; None where it cannot be compiled."""
    if q.dtype not in TYPES:
        return None
    return _function(SOURCE, pool.dtype, q.shape[2], q.shape[1] // pool.shape[3], q.dtype)


def side_by_side(x: Tensor) -> Tensor:
    """``x`` with its last axis side by side, whatever the strides of the others."""
    return x if x.stride(-1) == 1 else x.contiguous()


def is_plain(q: Tensor, pool: Tensor, layer: int) -> bool:
    """Whether C may take these addresses at their word; torch reads the rest, or says what is wrong with it."""
    return (
        pool.is_cpu
        and pool.is_contiguous()
        and pool.dtype in TYPES
        and pool.shape[4] <= MAX_UNIT_TOKENS
        and q.shape[1] % pool.shape[3] == 0
        and q.shape[2] == pool.shape[5]
        and 0 <= layer < pool.shape[1]
    )


def _of_layer(x: Tensor, layer: int) -> tuple[Tensor, tuple[int, int]]:
    """One layer of ``x [1 or L, B, 1 or Hkv, ...]``, entries side by side, and its strides over rows and heads."""
    x = x[min(layer, x.shape[0] - 1)].int()
    if x.dim() == 3 and x.stride(2) != 1:
        x = x.contiguous()
    return x, (x.stride(0), x.stride(1) if x.shape[1] > 1 else 0)


@cache
def _function(  # type: ignore[name-defined]
    source: Path, dtype: torch.dtype, dim: int, group: int, query: torch.dtype
) -> ctypes._CFuncPtr | None:
    """The compiled function that a source is named after, for a pool type, head size, group size and type of queries;
    None where it cannot be made."""
    sizes = {"TYPE": TYPES.index(dtype), "QUERY": TYPES.index(query), "DIM": dim, "GROUP": group}
    sizes |= {"ID_SHIFT": ID_SHIFT, "VALID_MASK": VALID_MASK}
    library = compiler.library(source, HEADERS, tuple(f"-D{name}={value}" for name, value in sizes.items()))
    if library is None:
        return None
    function = getattr(library, source.stem)
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    return function


@cache
def _multiplies_bf16() -> bool:
    """Whether the processor has AVX512-BF16, whose instruction ``prefill.c`` is written in."""
    return "avx512_bf16" in processor.flags().split()
