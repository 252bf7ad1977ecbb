"""The ops as the engine calls them: one torch op each, dispatched by backend name.

They are registered with torch (``torch.ops.octavo.*``) so that ``torch.compile`` and CUDA graphs see one opaque call
that takes the *whole* pool and the layer number. A view of the pool as an argument would be copied on every call by
functionalisation.
"""

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from octavo.kernels import cpu, log, reference

_SHAPE = "Tensor? unit_pos, Tensor? sinks, float scale, int window, float softcap"
_SCHEMAS = {
    "append": "(Tensor k, Tensor v, Tensor(a!) pool, int layer, Tensor slots, str backend) -> ()",
    "copy_units": "(Tensor(a!) pool, Tensor pairs, str backend) -> ()",
    "decode": "(Tensor q, Tensor pool, int layer, Tensor table, Tensor lengths, Tensor q_pos, "
    f"{_SHAPE}, bool want_mass, bool want_lse, str backend) -> (Tensor, Tensor, Tensor)",
    "prefill": "(Tensor q, Tensor pool, int layer, Tensor table, Tensor lengths, Tensor cu_q, Tensor q_pos, "
    f"{_SHAPE}, int max_q, bool want_lse, str backend) -> (Tensor, Tensor)",
    "transfer": "(Tensor source, Tensor(a!) target, Tensor pairs, str backend) -> ()",
}

_KERNELS = {"reference": "torch", "cpu": "torch", "triton": "Triton"}
"""What runs an op of a backend, where there is nothing to choose."""


def backend(name: str) -> ModuleType:
    """The module that implements the ops of a backend: ``reference``, ``cpu`` or ``triton`` (imported on first use)."""
    if name == "triton":
        return import_module("octavo.kernels.triton_ops")
    return {"reference": reference, "cpu": cpu}[name]


def _append(k: Tensor, v: Tensor, pool: Tensor, layer: int, slots: Tensor, name: str) -> None:
    if log.KERNELS:
        log.chosen("append", name, _KERNELS[name], pool)
    backend(name).append(k, v, pool, layer, slots)


def _copy_units(pool: Tensor, pairs: Tensor, name: str) -> None:
    if log.KERNELS:
        log.chosen("copy_units", name, _KERNELS[name], pool)
    backend(name).copy_units(pool, pairs)


def _decode(*args):  # type: ignore[no-untyped-def]
    if log.KERNELS and args[-1] == "reference":  # the others choose among kernels, and say so themselves
        log.chosen("decode", "reference", _KERNELS["reference"], args[1], query_heads=args[0].shape[1])
    return backend(args[-1]).decode(*args[:-1])


def _prefill(*args):  # type: ignore[no-untyped-def]
    if log.KERNELS:
        log.chosen("prefill", args[-1], _KERNELS[args[-1]], args[1], query_heads=args[0].shape[1], window=args[10])
    return backend(args[-1]).prefill(*args[:-1])


def _transfer(source: Tensor, target: Tensor, pairs: Tensor, name: str) -> None:
    if log.KERNELS:
        log.chosen("transfer", name, _KERNELS[name], source)
    backend(name).transfer(source, target, pairs)


def _decode_shapes(q, pool, layer, table, *rest):  # type: ignore[no-untyped-def]
    want_mass, want_lse = rest[-3:-1]
    mass = (q.shape[0], pool.shape[3], table.shape[3]) if want_mass else (0,)
    fp32 = {"dtype": torch.float32}
    return torch.empty_like(q), q.new_empty(q.shape[:2] if want_lse else (0,), **fp32), q.new_empty(mass, **fp32)


def _prefill_shapes(q, *rest):  # type: ignore[no-untyped-def]
    want_lse = rest[-2]
    return torch.empty_like(q), q.new_empty(q.shape[:2] if want_lse else (0,), dtype=torch.float32)


_library = torch.library.Library("octavo", "DEF")
for _name, _implementation in {
    "append": _append,
    "copy_units": _copy_units,
    "decode": _decode,
    "prefill": _prefill,
    "transfer": _transfer,
}.items():
    _library.define(_name + _SCHEMAS[_name])
    _library.impl(_name, _implementation, "CPU")
    _library.impl(_name, _implementation, "CUDA")
torch.library.register_fake("octavo::append", lambda *args: None, lib=_library)
torch.library.register_fake("octavo::copy_units", lambda *args: None, lib=_library)
torch.library.register_fake("octavo::decode", _decode_shapes, lib=_library)
torch.library.register_fake("octavo::prefill", _prefill_shapes, lib=_library)
torch.library.register_fake("octavo::transfer", lambda *args: None, lib=_library)

append = torch.ops.octavo.append
copy_units = torch.ops.octavo.copy_units
decode = torch.ops.octavo.decode
prefill = torch.ops.octavo.prefill
transfer = torch.ops.octavo.transfer
