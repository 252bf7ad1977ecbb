"""``decode.c`` and ``prefill.c``, compiled by the C compiler of this machine the first time a shape needs them.

A compiled file takes about half a second to make and is kept in ``$OCTAVO_CACHE/kernels``, under a name that says what
it was made from: the source, the command, the compiler and the processor. Where there is no compiler, ``attention.py``
works with torch alone, three to six times slower, with the same results up to rounding.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from octavo.kernels.cache_dir import cache_dir
from octavo.kernels.cpu import processor
from octavo.kernels.layout import ID_SHIFT, MAX_UNIT_TOKENS, VALID_MASK

SOURCE = Path(__file__).with_name("decode.c")
PREFILL_SOURCE = Path(__file__).with_name("prefill.c")
HEADER = Path(__file__).with_name("exponential.h")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fPIC", "-shared")
TYPES = (torch.float32, torch.float16, torch.bfloat16)
NO_MEMORY = -1
DIGEST = hashlib.sha256

_log = logging.getLogger(__name__)


class Args(ctypes.Structure):
    """The C struct of the same name in ``decode.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "pool", "table", "lengths", "unit_pos", "q_pos", "sinks")),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "mass")),
        *((name, ctypes.c_int64) for name in ("batch", "units", "layers", "layer", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("unit_tokens", "entries", "window")),
        *((name, ctypes.c_int64) for name in ("table_row", "table_head", "lengths_row", "lengths_head")),
        *((name, ctypes.c_int64) for name in ("unit_pos_row", "unit_pos_head")),
        ("softcap", ctypes.c_double),
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
    batch, q_heads, dim = q.shape
    kv_heads = pool.shape[3]
    function = _function(SOURCE, pool.dtype, dim, q_heads // kv_heads) if _is_plain(q, pool, layer) else None
    if function is None:
        return None
    query = (q.float() * scale).contiguous()  # a product has the strides of q, whatever they are
    out = torch.empty_like(query)
    lse = query.new_empty((batch, q_heads) if want_lse else (0,))
    mass = query.new_zeros((batch, kv_heads, table.shape[3]) if want_mass else (0,))
    sinks = None if sinks is None else sinks.float().contiguous()
    q_pos = q_pos.int().contiguous()
    pages, table, lengths = _pages(pool, layer, table, lengths)
    unit_pos, unit_pos_strides = (None, (0, 0)) if unit_pos is None else _of_layer(unit_pos, layer)
    args = Args(
        q=query.data_ptr(),
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
        softcap=softcap,
        **pages,
    )
    _call(function, args)
    return torch.empty_like(q).copy_(out), lse, mass


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
    if dim % 16 or not _is_plain(q, pool, layer) or not _multiplies_bf16():
        return None
    function = _function(PREFILL_SOURCE, pool.dtype, dim, q_heads // pool.shape[3])
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
    if failed == NO_MEMORY:
        raise MemoryError(f"no memory for the working buffers of attention over {args.batch} sequences on the CPU")
    if failed:
        raise IndexError(
            f"a length past a table of {args.entries} entries, or an entry past a pool of {args.units} units"
        )


def _is_plain(q: Tensor, pool: Tensor, layer: int) -> bool:
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
    source: Path, dtype: torch.dtype, dim: int, group: int
) -> ctypes._CFuncPtr | None:
    """The compiled function that a source is named after, for a pool type, head size and group size; None, said once,
    where it cannot be made."""
    sizes = {"TYPE": TYPES.index(dtype), "DIM": dim, "GROUP": group, "ID_SHIFT": ID_SHIFT, "VALID_MASK": VALID_MASK}
    try:
        compiler = _compiler()
        if not compiler:
            return None
        command = [*compiler, *FLAGS, *(f"-D{name}={value}" for name, value in sizes.items()), str(source)]
        made_from = [
            source.read_text("utf-8"),
            HEADER.read_text("utf-8"),
            *command[1:-1],
            _version(compiler),
            processor.flags(),
        ]
        name = DIGEST("\0".join(made_from).encode(errors="surrogateescape")).hexdigest()[:32] + ".so"
        library = ctypes.CDLL(str(_built(cache_dir() / "kernels" / name, command)))
    except (OSError, ValueError, RuntimeError, subprocess.CalledProcessError) as error:
        # RuntimeError: there is no home folder; ValueError: $CC has an open quote
        said = (error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else "") or error
        _log.warning("the CPU %s kernel was not compiled; torch takes its place, slower: %s", source.stem, said)
        return None
    function = getattr(library, source.stem)
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    return function


def _built(library: Path, command: list[str]) -> Path:
    """``library``, compiled if it is not there: beside its place and moved in, for other processes may want it too.

    A digest of the code, which no loader looks at, follows it: a file that was cut short would end the process.
    """
    if not _is_whole(library):
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            _run([*command, "-o", str(made), "-lm"], check=True)
            code = made.read_bytes()
            made.write_bytes(code + DIGEST(code).digest())
            os.replace(made, library)
    return library


def _is_whole(library: Path) -> bool:
    try:
        code = library.read_bytes()
    except OSError:
        return False
    size = DIGEST().digest_size
    return DIGEST(code[:-size]).digest() == code[-size:]


@cache
def _compiler() -> tuple[str, ...]:
    """``$CC``, which may bring arguments, or the first of cc, gcc and clang on the path; empty where there is none."""
    for candidate in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(candidate)
        if words and (path := shutil.which(words[0])):
            return (path, *words[1:])
    _log.info("no C compiler was found; decoding on the CPU with torch, which is slower")
    return ()


@cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"]).stdout


def _run(command: list[str], check: bool = False) -> subprocess.CompletedProcess[str]:
    """What a compiler says may be in any encoding, as paths are."""
    return subprocess.run(command, check=check, capture_output=True, text=True, errors="replace")


@cache
def _multiplies_bf16() -> bool:
    """Whether the processor has AVX512-BF16, whose instruction ``prefill.c`` is written in."""
    return "avx512_bf16" in processor.flags().split()
