"""What the card does at best, measured in the run that it is compared with, and the floors that follow.

    floor of a call = max(bytes / rate of its bound, operations / rate of a large bf16 product)

A rate is the best of some settings of a plain stream (``octavo.kernels.triton.streams``) or of torch's own copy, over
memory far larger than the L2. Reading 4 KB pieces in random order, which is what a decode over pages of 16 tokens with
heads of 128 does, is measured too: it is that decode's real ceiling, while its floor stays the streaming rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.scripts.kernel_races.race import Bound, Race
from octavo.scripts.kernel_races.timing import Clock, timed

STREAM_BYTES = 2 << 30
BUS_BYTES = 256 << 20
PIECE_BYTES = 4096
PRODUCT = 8192
ROUNDS = 7


@dataclass(frozen=True)
class Rates:
    """Bytes a second of each bound and of reading 4 KB pieces, and operations a second of a bf16 product."""

    read: float
    read_pieces: float
    copy: float
    product_flop_per_s: float
    to_device: float | None = None
    to_host: float | None = None

    def of(self, bound: Bound) -> float:
        rate = getattr(self, bound)
        assert rate is not None, f"the rate {bound} was not measured"
        return float(rate)


def floor_us(race: Race, rates: Rates) -> float:
    """Microseconds that a call takes at least."""
    return 1e6 * max(race.moved_bytes / rates.of(race.bound), race.flops / rates.product_flop_per_s)


@dataclass(frozen=True)
class Line:
    """Microseconds of a decode as a function of its bytes: a fixed part, and a rate."""

    t0_us: float
    bytes_per_s: float

    def __call__(self, moved_bytes: float) -> float:
        return self.t0_us + 1e6 * moved_bytes / self.bytes_per_s


def fit(points: Sequence[tuple[float, float]]) -> Line | None:
    """The line through (bytes, microseconds) with the least squares of relative errors; None for fewer than two sizes.

    Errors are relative, since otherwise the largest shapes alone would say what the fixed part is.
    """
    if len({size for size, _ in points}) < 2:
        return None
    size, us = np.array(points, dtype=np.float64).T
    slope, t0 = np.polyfit(size, us, 1, w=1 / us)
    return Line(float(t0), float(1e6 / slope))


def measure(device: torch.device, bounds: Iterable[Bound], clock: Clock) -> Rates:
    """All rates of a device; those of the bus only if they are among ``bounds``."""
    from octavo.kernels.triton import streams

    def us(call: Callable[[], object], captured: bool = True) -> float:
        return timed([call], ROUNDS, clock, captured=captured)

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    x = torch.randint(2**31 - 1, (STREAM_BYTES // 4,), device=device, dtype=torch.int32)
    outs = [torch.empty(processors * n, device=device, dtype=torch.int32) for n in (2, 4, 8, 16)]
    read = min(us(partial(streams.read, x, o, b, 8)) for o in outs for b in (2048, 4096, 8192))

    rows = x.view(-1, PIECE_BYTES // 4)
    order = torch.randperm(len(rows), device=device, dtype=torch.int32)
    pieces = min(us(partial(streams.read_pieces, rows, order, o, p, 8)) for o in outs for p in (2, 4, 8))

    one, other = x.chunk(2)
    copies: list[Callable[[], object]] = [partial(other.copy_, one)]
    for block in (2048, 4096):
        for programs in (processors * 4, processors * 8, len(one) // block):
            copies.append(partial(streams.copy, one, other, block, programs, 8))
    copy = min(us(call) for call in copies)

    a, b = torch.randn((2, PRODUCT, PRODUCT), device=device, dtype=torch.bfloat16)
    product = us(lambda: a @ b)
    over_bus = [bound for bound in ("to_device", "to_host") if bound in set(bounds)]
    bus = {bound: BUS_BYTES / us(_bus_copy(bound, x), captured=False) * 1e6 for bound in over_bus}
    return Rates(
        read=x.nbytes / read * 1e6,
        read_pieces=x.nbytes / pieces * 1e6,
        copy=x.nbytes / copy * 1e6,
        product_flop_per_s=2 * PRODUCT**3 / product * 1e6,
        **bus,
    )


def _bus_copy(bound: str, x: Tensor) -> Callable[[], object]:
    """One large copy from or to pinned host memory."""
    near = x[: BUS_BYTES // 4]
    host = torch.empty(near.shape, dtype=near.dtype, pin_memory=True).copy_(near)
    source, target = (host, near) if bound == "to_device" else (near, host)
    return lambda: target.copy_(source, non_blocking=True)
