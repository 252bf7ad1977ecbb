"""Repairs of Triton's interpreter, for tests on machines without a GPU.

Triton stores bf16 as uint16 in the interpreter. Three things go wrong there:

    loop bounds   ``range`` over a run-time bound needs ``tensor.__index__``, which calls ``int()`` on an array of one
                  element; numpy >= 2.4 refuses (Triton < 3.8)
    rounding      fp32 -> bf16 drops the low bits of the significand instead of rounding to nearest even
    products      ``tl.dot`` of bf16 operands multiplies the bit patterns as integers

And two make it slow, half of a kernel's time where it calls device functions:

    calls         every call of a device function looks the whole language up and puts the interpreter's functions in
                  place of Triton's, which the kernel's launch has done already
    dtypes        every load, splat and conversion makes a table of all dtypes to look one up in

``test_interpreter_fix.py`` fails loudly when a repair stops working, and when Triton no longer needs it.
"""

import inspect
from functools import cache

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

INDEX_BROKEN = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8)

_dot = interpreter.InterpreterBuilder.create_dot
_convert = interpreter._convert_float
_patch_tensor = interpreter._patch_lang_tensor
_patch_lang = interpreter._patch_lang
_np_dtype = interpreter._get_np_dtype


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns as fp32 values: the patterns are the upper halves."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """fp32 values as bf16 bit patterns, rounded to nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _dot_of_values(builder, a, b, *rest):  # type: ignore[no-untyped-def]
    def values(operand):  # type: ignore[no-untyped-def]
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return interpreter.TensorHandle(widen(operand.data), tl.float32)

    return _dot(builder, values(a), values(b), *rest)


def _rounding_convert(data, source, target, rounding):  # type: ignore[no-untyped-def]
    if (source, target) == (tl.float32, tl.bfloat16):
        return narrow(data)
    return _convert(data, source, target, rounding)


def _patch_tensor_index(tensor, scope):  # type: ignore[no-untyped-def]
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _patch_lang_once(fn):  # type: ignore[no-untyped-def]
    """The modules of the language that ``fn`` sees are changed together and put back together, so one member of each
    says whether they are as the interpreter wants them."""
    seen = [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]
    if seen and not any(tl.core.is_builtin(module.load) for module in seen):
        return interpreter._LangPatchScope()
    return _patch_lang(fn)


@cache
def _np_dtype_of_scalar(dtype):  # type: ignore[no-untyped-def]
    return _np_dtype(dtype)


def _np_dtype_once(dtype):  # type: ignore[no-untyped-def]
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else _np_dtype_of_scalar(element)


@triton.jit
def probe_loop(out, n):
    total = 0
    for i in range(0, n):
        total += i
    tl.store(out, total)


@triton.jit
def probe_cast(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(tl.bfloat16))


@triton.jit
def double(x):
    return x * 2


@triton.jit
def probe_call(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, double(double(tl.load(x + at))))


@triton.jit
def probe_dot(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def install() -> None:
    """Repair the interpreter; call it before the first kernel runs."""
    interpreter.InterpreterBuilder.create_dot = _dot_of_values
    interpreter._convert_float = _rounding_convert
    interpreter._patch_lang = _patch_lang_once
    interpreter._get_np_dtype = _np_dtype_once
    if INDEX_BROKEN:
        interpreter._patch_lang_tensor = _patch_tensor_index


def uninstall() -> None:
    """Put the interpreter back as Triton ships it."""
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter._convert_float = _convert
    interpreter._patch_lang_tensor = _patch_tensor
    interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = _np_dtype
