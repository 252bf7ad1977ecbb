"""Sampling on a CPU: a row at a time, and no sort. The largest logits are found in C, in the dtype that they have."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from octavo.kernels.cpu import compiler
from octavo.kernels.reference.sampling import exponentials, row_keys, scales

SOURCE = Path(__file__).with_name("argmax.c")
TYPES = {torch.float32: 0, torch.bfloat16: 2}


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    draws: Tensor,
) -> Tensor:
    """See ``reference.sample``; how the kept set is found without a sort is told in ``triton/sample.py``."""
    chosen = largest(logits)
    drawn = (temperature > 0).nonzero()[:, 0].tolist()
    if drawn:
        scale, keys = scales(temperature), row_keys(seeds, draws)
    for b in drawn:
        x = _without_nan(logits[b].float())
        chosen[b] = _draw(x, scale[b], int(top_k[b]), top_p[b], min_p[b], keys[b : b + 1])
    return chosen


def largest(logits: Tensor) -> Tensor:
    """The first of the largest of each row of ``[B, V]``, int64 [B]; NaN counts as minus infinity."""
    function = _argmax(logits.dtype) if logits.is_cpu and logits.stride(1) == 1 else None
    if function is None:
        return _without_nan(logits.float()).argmax(1)
    chosen = torch.empty(len(logits), dtype=torch.int64)
    function(logits.data_ptr(), *logits.shape, logits.stride(0), chosen.data_ptr())
    return chosen


def _without_nan(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


@cache
def _argmax(dtype: torch.dtype) -> Callable[..., None] | None:
    """``argmax.c`` for logits of a dtype; None where it cannot be compiled."""
    library = compiler.library(SOURCE, (), (f"-DTYPE={TYPES[dtype]}",)) if dtype in TYPES else None
    if library is None:
        return None
    function = library.argmax
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    function.restype = None
    return function  # type: ignore[no-any-return]


def _draw(x: Tensor, scale: Tensor, k: int, p: Tensor, min_p: Tensor, key: Tensor) -> Tensor:
    """The token drawn from one row, int64 []."""
    top = x.max()
    limited = 0 < k < len(x)
    last = x.topk(k).values[-1] if limited else top.new_tensor(-torch.inf)  # the k-th largest
    least = torch.maximum(last, top + min_p.log2() / scale)
    ids = torch.arange(len(x))
    if least > -torch.inf:
        ids = (x >= least).nonzero()[:, 0]
    few = x[ids]
    scores = few * scale - exponentials(key, ids.int())[0].log2()
    if not limited and p >= 1:
        return ids[scores.argmax()]

    inside = x[x > last]
    weights = torch.exp2((few - top) * scale).double()
    mass = torch.exp2((inside - top) * scale).double().sum()
    if limited:
        mass += (k - len(inside)) * torch.exp2((last - top) * scale)
    while True:
        at = scores.argmax()
        before = (few > few[at]) | ((few == few[at]) & (ids < ids[at]))
        count = int(before.sum())
        cut = (limited and count >= k) or (p < 1 and weights[before].sum() >= p * mass)
        if count == 0 or not cut:
            return ids[at]
        scores = scores.where(before, -torch.inf)
