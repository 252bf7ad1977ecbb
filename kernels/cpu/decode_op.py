"""``decode_op.c``: the op ``octavo::attend_in_step`` of compiled layers, without Python for steps it is told of."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from octavo.kernels.cpu import compiler

SOURCE = Path(__file__).with_name("decode_op.c")
ARGS = Path(__file__).with_name("decode_args.h")


class Told(ctypes.Structure):
    """The C struct of the same name in ``decode_op.c``."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("args", "decode", "tables", "slots", "unit_layers", "slices", "windows")
        ),
        *((name, ctypes.c_int64) for name in ("table_slice", "slots_slice", "count", "q_heads", "dim", "type")),
    )


def begin(told: Told | None) -> None:
    """A forward pass begins, whose step may be told. What it points to stays where it is until the next one begins."""
    library = served()
    if library is not None:
        library.begin(None if told is None else ctypes.byref(told))


@cache
def served() -> ctypes.CDLL | None:
    """The library that serves the op on a CPU from the first call on; None where it cannot be compiled."""
    library = compiler.op_library(SOURCE, (ARGS,))
    if library is not None:
        library.begin.argtypes, library.begin.restype = [ctypes.c_void_p], None
    return library
