"""Bring a page back over the bus, or compute it again: which is cheaper, in closed form."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.interfaces import ModelSpec
from octavo.kernels import ops


@dataclass(frozen=True)
class TransferCosts:
    """Rates of one machine.

    A page of n tokens that begins at position p, or a chain of pages that is brought back in one copy, costs::

        restore    seconds_per_copy + nbytes / bytes_per_s
        recompute  (2 * parameters * n  +  sum over layers of 4 * q_heads * head_dim * keys) / flops_per_s
                   keys = n * (p + n / 2), the (query, key) pairs of causal attention;
                   in a layer with a window W no query sees more than W keys: at most n * W

    Every parameter that a token meets is one multiplication and one addition; every (query, key) pair of a head is
    ``head_dim`` of both for the score, and again for the weighted value. Restoring costs the same at every position, so
    late pages are the ones worth keeping. FlexGen (Sheng et al. 2023, arXiv 2303.06865) places tensors by such a
    linear cost model; vLLM (Kwon et al. 2023, arXiv 2309.06180, section 7.3) compares swapping with recomputation by
    measurement, and finds that small copies favour recomputation: here, ``seconds_per_copy`` and ``bytes_per_s``
    measured with the unit's real size.

    Attributes:
        bytes_per_s: of a transfer from the host to the device; see ``measure_bytes_per_s``.
        seconds_per_copy: what a transfer costs however small it is.
        flops_per_s: that a prefill reaches.

    Raises:
        ValueError: a rate that is not positive, or a negative time.
    """

    bytes_per_s: float
    seconds_per_copy: float
    flops_per_s: float

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "flops_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be greater than 0")
        if not self.seconds_per_copy >= 0:
            raise ValueError(f"seconds_per_copy={self.seconds_per_copy} must be at least 0")

    def restore_seconds(self, nbytes: int) -> float:
        """Seconds to bring ``nbytes`` back in one copy."""
        return self.seconds_per_copy + nbytes / self.bytes_per_s

    def recompute_seconds(self, tokens: int, position: int, parameters: int, spec: ModelSpec) -> float:
        """Seconds to compute ``tokens`` tokens from ``position`` on, what is before them being there.

        ``parameters`` are those that multiply a token: all but an embedding table that is only looked up.
        """
        keys = sum(tokens * min(position + tokens / 2, window or math.inf) for window in spec.windows)
        return (2 * parameters * tokens + 4 * spec.q_heads * spec.head_dim * keys) / self.flops_per_s

    def restore_is_cheaper(self, nbytes: int, tokens: int, position: int, parameters: int, spec: ModelSpec) -> bool:
        """Whether to bring a page back; also when it makes no difference, since the device computes meanwhile."""
        return self.restore_seconds(nbytes) <= self.recompute_seconds(tokens, position, parameters, spec)


def measure_bytes_per_s(kv: Tensor, backend: str, nbytes: int = 16 << 20) -> float:
    """Bytes a second of a transfer of about ``nbytes`` from host memory to the device, in units like those of ``kv``
    ``[units, layers, 2, kv_heads, unit_tokens, head_dim]``, in memory of its own; the median of five."""
    units = max(1, nbytes // kv[0].nbytes)
    shape = units, *kv.shape[1:]
    host = torch.ones(shape, dtype=kv.dtype, pin_memory=kv.is_cuda)
    device = torch.ones(shape, dtype=kv.dtype, device=kv.device)
    order = torch.randperm(units, generator=torch.Generator().manual_seed(0))
    pairs = torch.stack([torch.arange(units), order], 1).int().to(kv.device)
    seconds = []
    for _ in range(6):
        _synchronize(kv.device)
        start = time.perf_counter()
        ops.transfer(host, device, pairs, backend)
        _synchronize(kv.device)
        seconds.append(time.perf_counter() - start)
    return host.nbytes / statistics.median(seconds[1:])  # the first one compiles


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
