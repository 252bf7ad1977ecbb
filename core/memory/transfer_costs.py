"""Bring a page back over the bus, or compute it again: which is cheaper, in closed form."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo.core.interfaces import ModelSpec
from octavo.kernels import ops

Count = TypeVar("Count", float, NDArray[np.float64])


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

    def recompute_seconds(self, tokens: Count, position: Count, parameters: int, spec: ModelSpec) -> Count:
        """Seconds to compute ``tokens`` tokens from ``position`` on, what is before them being there: numbers, or of
        many pages fp64 [n].

        ``parameters`` are those that multiply a token: all but an embedding table that is only looked up.
        """
        reach = position + tokens / 2
        keys = 0 * tokens
        for bound, layers in _bounds(spec.windows):
            keys += layers * tokens * np.minimum(reach, bound)
        return (2 * parameters * tokens + 4 * spec.q_heads * spec.head_dim * keys) / self.flops_per_s

    def restore_is_cheaper(self, nbytes: int, tokens: int, position: int, parameters: int, spec: ModelSpec) -> bool:
        """Whether to bring a page back; also when it makes no difference, since the device computes meanwhile."""
        return bool(self.restore_seconds(nbytes) <= self.recompute_seconds(tokens, position, parameters, spec))


@lru_cache
def _bounds(windows: tuple[int, ...]) -> list[tuple[float, int]]:
    """The most keys that a query sees, and in how many layers: once a model, since every page that is filled asks."""
    return [(window or math.inf, layers) for window, layers in Counter(windows).items()]


NOMINAL_FLOPS_PER_S = {"cpu": 1e11, "cuda": 1e14}
"""Taken for granted until the first longer prefill has been timed."""

TIMED_TOKENS = 128
"""Tokens of a step that is long enough to say how fast the device computes."""


class PageCosts:
    """What a model's pages cost on this machine: ``rates`` are measured, ``parameters`` those that multiply a token."""

    def __init__(self, rates: TransferCosts, parameters: int, spec: ModelSpec) -> None:
        self.rates = rates
        self._parameters = parameters
        self._spec = spec
        self._timed = False

    @classmethod
    def of(cls, model: nn.Module, spec: ModelSpec, kv: Tensor, backend: str, host: bool) -> PageCosts:
        """For a model whose pages lie in ``kv``; the bus is measured if there is a ``host`` tier."""
        looked_up = model.get_input_embeddings().weight.numel()  # type: ignore[operator]
        parameters = sum(parameter.numel() for parameter in model.parameters()) - looked_up
        bytes_per_s = measure_bytes_per_s(kv, backend) if host else 1e10
        return cls(TransferCosts(bytes_per_s, 0.0, NOMINAL_FLOPS_PER_S[kv.device.type]), parameters, spec)

    def recompute_seconds(self, tokens: Count, position: Count) -> Count:
        """Predicted seconds to compute ``tokens`` tokens from ``position`` on, of one page or of many (fp64 [n])."""
        return self.rates.recompute_seconds(tokens, position, self._parameters, self._spec)

    def restore_is_cheaper(self, nbytes: int, tokens: int, position: int) -> bool:
        """Whether a page had better be brought back from the host than computed again."""
        return self.rates.restore_is_cheaper(nbytes, tokens, position, self._parameters, self._spec)

    def observe(self, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """A step computed these (tokens, position) in so many seconds; the fastest one says what the device can do."""
        chunks = list(chunks)
        if sum(tokens for tokens, _ in chunks) < TIMED_TOKENS:
            return
        flops = sum(self.recompute_seconds(*chunk) for chunk in chunks) * self.rates.flops_per_s
        reached = flops / seconds
        if not self._timed or reached > self.rates.flops_per_s:
            self.rates, self._timed = replace(self.rates, flops_per_s=reached), True


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
