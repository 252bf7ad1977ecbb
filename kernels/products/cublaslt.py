"""The part of cuBLASLt that torch does not hand on: all algorithms that it proposes for a product, to be tried.

torch has loaded the library already, and takes the first of its proposals. Names, numbers and layouts of the C
interface are those of NVIDIA's cuBLAS documentation, chapter "Using the cuBLASLt API".
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

DTYPES = {torch.bfloat16: 14, torch.float16: 2}  # CUDA_R_16BF, CUDA_R_16F
WORKSPACE_BYTES = 32 << 20
ALIGNMENT = 256  # of every pointer, as the library assumes when it proposes

_COMPUTE_32F, _R_32F = 68, 0
_TRANSPOSED = 1
_DESCRIPTION_TRANSPOSE_A = 3
_PREFERENCE_WORKSPACE = 1
_MOST_PROPOSALS = 32


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Proposal(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@cache
def library() -> Any:
    """Raises OSError where there is no cuBLASLt of torch's CUDA version."""
    if torch.version.cuda is None:
        raise OSError("this torch has no CUDA")
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")


@cache
def version() -> int:
    return int(library().cublasLtGetVersion())


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _done(library().cublasLtCreate(byref(handle)), "cublasLtCreate")
    return handle


@cache
def _workspace(device: int) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")


def _done(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} failed with cuBLAS status {status}")


@dataclass(frozen=True)
class Shape:
    """``out [rows, outputs] = x [rows, inputs] @ weight [outputs, inputs].T``, and ``+ residual`` if it ``adds``; all
    of one type, contiguous, with sums in fp32. With a ``gate``, an activation, ``out [rows, outputs / 2]`` is that of
    the first half of the outputs, times the second half: no product that the library has."""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    adds: bool
    gate: str = ""

    @property
    def given(self) -> int:
        """Columns of ``out``."""
        return self.outputs // 2 if self.gate else self.outputs


class Product:
    """A product of one shape on one device. All calls go to the current stream and share one workspace, so that of one
    device only one stream may run them at a time."""

    def __init__(self, shape: Shape, device: int) -> None:
        self._lib, self._handle, self._workspace = library(), _handle(device), _workspace(device)
        self._one, self._beta = c_float(1), c_float(shape.adds)
        kind = DTYPES[shape.dtype]
        self._description = c_void_p()
        _done(
            self._lib.cublasLtMatmulDescCreate(byref(self._description), c_int(_COMPUTE_32F), c_int(_R_32F)),
            "cublasLtMatmulDescCreate",
        )
        turned = c_int32(_TRANSPOSED)
        _done(
            self._lib.cublasLtMatmulDescSetAttribute(
                self._description, c_int(_DESCRIPTION_TRANSPOSE_A), byref(turned), c_size_t(4)
            ),
            "cublasLtMatmulDescSetAttribute",
        )
        # The library counts down columns: a row-major [m, n] is its [n, m], so the product is out.T = weight @ x.T.
        self._weight = _layout(self._lib, kind, shape.inputs, shape.outputs)
        self._x = _layout(self._lib, kind, shape.inputs, shape.rows)
        self._out = _layout(self._lib, kind, shape.outputs, shape.rows)
        weakref.finalize(self, _destroy, self._lib, self._description, (self._weight, self._x, self._out))

    def proposals(self) -> list[bytes]:
        """Algorithms that can run, the library's favourite first; they hold for this version of the library.

        Raises:
            RuntimeError: there is none.
        """
        preference, count = c_void_p(), c_int()
        _done(self._lib.cublasLtMatmulPreferenceCreate(byref(preference)), "cublasLtMatmulPreferenceCreate")
        room = c_uint64(WORKSPACE_BYTES)
        _done(
            self._lib.cublasLtMatmulPreferenceSetAttribute(
                preference, c_int(_PREFERENCE_WORKSPACE), byref(room), c_size_t(8)
            ),
            "cublasLtMatmulPreferenceSetAttribute",
        )
        found = (_Proposal * _MOST_PROPOSALS)()
        _done(
            self._lib.cublasLtMatmulAlgoGetHeuristic(
                self._handle, self._description, self._weight, self._x, self._out, self._out, preference,
                c_int(_MOST_PROPOSALS), found, byref(count),
            ),
            "cublasLtMatmulAlgoGetHeuristic",
        )  # fmt: skip
        self._lib.cublasLtMatmulPreferenceDestroy(preference)
        listed = [bytes(found[i].algorithm) for i in range(count.value) if found[i].state == 0]
        if not listed:
            raise RuntimeError("cuBLASLt proposes no algorithm")
        return listed

    def run(self, algorithm: bytes, x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """Raises RuntimeError where the algorithm cannot run."""
        added = out if residual is None else residual
        with torch.cuda.device(x.device):
            status = self._lib.cublasLtMatmul(
                self._handle, self._description, byref(self._one), c_void_p(weight.data_ptr()), self._weight,
                c_void_p(x.data_ptr()), self._x, byref(self._beta), c_void_p(added.data_ptr()), self._out,
                c_void_p(out.data_ptr()), self._out, byref(_Algorithm.from_buffer_copy(algorithm)),
                c_void_p(self._workspace.data_ptr()), c_size_t(WORKSPACE_BYTES),
                c_void_p(torch.cuda.current_stream().cuda_stream),
            )  # fmt: skip
        _done(status, "cublasLtMatmul")


def _layout(lib: Any, kind: int, rows: int, columns: int) -> c_void_p:
    """Of a matrix that lies column by column, without gaps."""
    layout = c_void_p()
    _done(
        lib.cublasLtMatrixLayoutCreate(byref(layout), c_int(kind), c_uint64(rows), c_uint64(columns), c_int64(rows)),
        "cublasLtMatrixLayoutCreate",
    )
    return layout


def _destroy(lib: Any, description: c_void_p, layouts: Iterable[c_void_p]) -> None:
    lib.cublasLtMatmulDescDestroy(description)
    for layout in layouts:
        lib.cublasLtMatrixLayoutDestroy(layout)
