"""Kernels of this folder: from source to what can be launched, by NVRTC and the driver (package ``cuda-bindings``).

A kernel takes a tenth to half a second to compile, the first time that a machine needs it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.cache_dir import cache_dir, code_in, put_code

_log = logging.getLogger(__name__)

HERE = Path(__file__).parent
_OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "-default-device")
SHARED_BYTES = 228 << 10
"""Shared memory of a multiprocessor; of each block on it a kilobyte is the system's."""
BLOCK_BYTES = SHARED_BYTES - 1024
"""Shared memory of a block that is alone on its multiprocessor."""


class HopperError(RuntimeError):
    """A kernel of this folder cannot be compiled or launched."""


@cache
def _bindings() -> tuple[Any, Any]:
    return importlib.import_module("cuda.bindings.driver"), importlib.import_module("cuda.bindings.nvrtc")


@cache
def usable(device: torch.device) -> bool:
    """Whether kernels of this folder run on a device: a Hopper GPU, with ``cuda-bindings`` and NVRTC installed. A GPU
    that might and does not is said once."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        with torch.cuda.device(device):
            _nothing(1024, 1)
    except ImportError as error:
        _log.warning("octavo's kernels for Hopper are left out, slower (%s); install octavo[cuda]", error)
        return False
    except RuntimeError as error:  # no library of NVRTC's, or one that this driver is too old for
        _log.warning("octavo's kernels for Hopper are left out, slower (%s)", error)
        return False
    return True


@cache
def clusters(device: torch.device, blocks: int) -> int:
    """How many clusters of so many blocks, each alone on its multiprocessor, run at the same time: fewer than there are
    multiprocessors for, as a cluster stays within a group of these."""
    with torch.cuda.device(device):
        return _nothing(BLOCK_BYTES, blocks).most_clusters


def _nothing(shared_bytes: int, blocks: int) -> Kernel:
    return Kernel("nothing", _code("nothing", 'extern "C" __global__ void nothing() {}'), 32, shared_bytes, blocks)


def _done(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]):
        raise HopperError(f"{what} failed with {result[0]!r}")
    return result[1] if len(result) > 1 else None


def compiled(name: str, macros: Mapping[str, int], more: str = "") -> bytes:
    """Machine code of ``name.cu`` for compute capability 9.0; ``more`` is source that goes before it.

    Raises:
        HopperError: with the compiler's words.
    """
    given = "".join(f"#define {macro} {int(value)}\n" for macro, value in macros.items())
    try:
        return _code(name, f'{given}#include "hopper.h"\n{more}#line 1\n{(HERE / f"{name}.cu").read_text()}')
    except HopperError as error:
        error.add_note(f"{name}.cu with {dict(macros)}")
        raise


def _code(name: str, source: str) -> bytes:
    """A source, compiled, or found in ``$OCTAVO_CACHE/hopper`` under a name that says what it was made from."""
    _, nvrtc = _bindings()
    headers = {header.name: header.read_text() for header in sorted(HERE.glob("*.h"))}
    made_from = [source, *headers.values(), *_OPTIONS, str(nvrtc.nvrtcVersion())]
    digest = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:32]
    file = cache_dir() / "hopper" / f"{digest}.cubin"
    code = code_in(file)
    if code is None:
        code = _compile(name, source, headers)
        with suppress(OSError):  # a cache that cannot be written is none
            put_code(file, code)
    return code


def _compile(name: str, source: str, headers: Mapping[str, str]) -> bytes:
    _, nvrtc = _bindings()
    texts, names = [text.encode() for text in headers.values()], [header.encode() for header in headers]
    made = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), len(headers), texts, names)
    program = _done(made, "NVRTC")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(_OPTIONS), [option.encode() for option in _OPTIONS])
        if int(status):
            said = bytes(1 + _done(nvrtc.nvrtcGetProgramLogSize(program), "NVRTC"))  # filled in place
            nvrtc.nvrtcGetProgramLog(program, said)
            words = said.decode().rstrip("\0 \n")
            raise HopperError(f"NVRTC does not compile {name}.cu:\n{words}")
        code = bytes(_done(nvrtc.nvrtcGetCUBINSize(program), "NVRTC"))  # filled in place
        _done(nvrtc.nvrtcGetCUBIN(program, code), "NVRTC")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


class Kernel:
    """A kernel on one device, the current one when it is made."""

    def __init__(self, name: str, code: bytes, threads: int, shared_bytes: int, cluster: int = 1) -> None:
        self._driver, _ = _bindings()
        self._threads, self._shared_bytes, self._cluster = threads, shared_bytes, cluster
        self._device = torch.cuda.current_device()
        module = _done(self._driver.cuModuleLoadData(code), "loading a kernel")
        self._function = _done(self._driver.cuModuleGetFunction(module, name.encode()), "loading a kernel")
        most = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _done(self._driver.cuFuncSetAttribute(self._function, most, shared_bytes), "shared memory")

    @property
    def most_clusters(self) -> int:
        """Clusters that run at the same time."""
        return int(
            _done(self._driver.cuOccupancyMaxActiveClusters(self._function, self._config((1024, 1), 0)), "occupancy")
        )

    def launch(self, grid: tuple[int, int], arguments: Sequence[Any]) -> None:
        """On the current stream, at the earliest while the kernel before still runs. ``arguments``: ctypes objects and
        tensor maps, in the kernel's order."""
        places = [a.getPtr() if hasattr(a, "getPtr") else ctypes.addressof(a) for a in arguments]
        listed = (ctypes.c_void_p * len(places))(*places)
        with torch.cuda.device(self._device):
            config = self._config(grid, torch.cuda.current_stream().cuda_stream)
            _done(self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(listed), 0), "launch")

    def _config(self, grid: tuple[int, int], stream: int) -> Any:
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes, config.hStream = self._shared_bytes, stream
        cluster, early = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = self._cluster, 1, 1
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [cluster, early], 2
        return config


def tensor_map(x: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Any:
    """What the copy engine takes a 16-bit tensor for: axes of ``sizes``, the innermost first, ``strides`` in bytes of
    all but that one, of which it copies a ``box`` at a time; zeros where that reaches beyond. Its rows of 128 bytes are
    laid down with their 16-byte pieces swizzled by the row."""
    driver, _ = _bindings()
    kinds = driver.CUtensorMapDataType
    kind = {
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }[x.dtype]
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    return _done(
        driver.cuTensorMapEncodeTiled(
            kind, len(sizes), x.data_ptr(), [wide(size) for size in sizes], [wide(stride) for stride in strides],
            [narrow(size) for size in box], [narrow(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"a tensor map of {tuple(sizes)}",
    )  # fmt: skip
