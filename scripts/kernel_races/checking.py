"""How far an output is from the truth, with nothing left over from an earlier call in memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of the truth; infinite where ``got`` is not finite and ``want`` is."""
    got, want = got.double(), want.double()
    if not torch.equal(got.isfinite(), want.isfinite()) or got.isnan().any():
        return torch.inf
    difference = torch.where(got.isfinite(), got - want, 0.0)
    return float(difference.norm() / torch.where(want.isfinite(), want, 0.0).norm().clamp(min=1e-3))


def mismatch(got: Tensor, want: Tensor) -> float:
    """For what must be equal bit by bit: 0, or infinity."""
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    return 0.0 if torch.equal(got.view(size), want.view(size)) else torch.inf


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within the block, memory that torch hands out uninitialised holds NaN, or the largest whole number."""
    mode, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill
