"""Races of decode attention: K1 on uniform and ragged batches, the shapes where published kernels fall off, and K4.

The floor is the bytes of K and V over the streaming read rate. Heads are 32 and 8 of 128 unless a shape says otherwise.
Pages lie in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from octavo.kernels import ops
from octavo.scripts.kernel_races import rivals
from octavo.scripts.kernel_races.checking import relative_error
from octavo.scripts.kernel_races.paged import Paged, Shape
from octavo.scripts.kernel_races.race import Field, Race, Target, Times

K = 1024
DECODE, MIXED = "K1 decode", "K4 pages"
TOLERANCE = 8e-3
"""Relative error in norm: in bf16 the probabilities are rounded before they meet the values."""

LARGE = {"32 x 8k": (8 * K,) * 32, "8 x 32k": (32 * K,) * 8, "128 x 2k": (2 * K,) * 128}
SMALL = {"1 x 1k": (K,), "1 x 32k": (32 * K,), "8 x 8k": (8 * K,) * 8, "1 x 128k": (128 * K,)}
RAGGED = tuple(round(256 * 128 ** (i * 13 % 32 / 31)) for i in range(32))
"""Log-uniform from 256 to 32k, in no order."""

CLIFFS = {
    "12 x 128k": Shape((128 * K,) * 12),
    # What a device holds of the same layer when eight share it.
    "36 x 220k, 4 heads on 1": Shape((220_000,) * 36, heads=4, kv_heads=1),
    "8 x 8k, 2 queries": Shape((8 * K,) * 8, queries=2),
    "8 x 8k, 8 queries": Shape((8 * K,) * 8, queries=8),
    "1 x 100 pages": Shape((1600,)),
}
"""Where a split that knows the batch alone, or the heads of a whole model, or one query, leaves the card idle: vLLM's
reports 48076, 54191 and 51995, SGLang's 27786."""


def races() -> list[Race]:
    return [
        *(_decode(name, Shape(lengths), _large_target(), fit="point") for name, lengths in LARGE.items()),
        *(_decode(name, Shape(lengths), _small_target(), fit="point") for name, lengths in SMALL.items()),
        _decode("1 x 1k, table for 128k", Shape((K,), capacity=128 * K), _small_target()),
        _decode("256 x 1k", Shape((K,) * 256), None),
        _decode("32, ragged 256-32k", Shape(RAGGED), _of_read(92)),
        _mixed("32 x 8k, pages of 8", Shape((8 * K,) * 32, unit=8, pages=(8,))),
        _mixed("32 x 8k, pages of 16 and 24", Shape((8 * K,) * 32, unit=8, pages=(16, 24))),
        *(_decode(name, shape, _fitted_target(shape), fit="judged") for name, shape in CLIFFS.items()),
    ]


def _decode(name: str, shape: Shape, target: Target | None, **more: Any) -> Race:
    return Race(DECODE, name, shape.kv_bytes, 0, partial(_build, shape), target, **more)


def _mixed(name: str, shape: Shape) -> Race:
    """Against the same lengths in pages of 16: what units of 8 cost."""
    target = Target(
        "at least 98 % of the rate with pages of 16",
        lambda times: times.us["octavo page 16"] >= 0.98 * times.us["octavo"],
    )
    return Race(MIXED, name, shape.kv_bytes, 0, partial(_build_mixed, shape), target)


def _build(shape: Shape, device: torch.device) -> Field:
    paged = Paged(shape, device)
    return Field({"octavo": _calls(paged), **rivals.attention(paged)}, partial(_error, paged), TOLERANCE)


def _build_mixed(shape: Shape, device: torch.device) -> Field:
    paged, plain = Paged(shape, device), Paged(Shape(shape.lengths), device)
    return Field({"octavo": _calls(paged), "octavo page 16": _calls(plain)}, partial(_error, paged), TOLERANCE)


def _calls(paged: Paged) -> list[Callable[[], object]]:
    return [partial(_attend, paged, layer, "triton") for layer in range(paged.layers)]


def _attend(paged: Paged, layer: int, backend: str) -> torch.Tensor:
    """Several queries of a sequence are a prefill of its last tokens."""
    if paged.shape.queries > 1:
        return ops.prefill(*paged.prefill_args(layer), backend)[0]
    return ops.decode(*paged.decode_args(layer), backend)[0]


def _error(paged: Paged) -> float:
    last = paged.layers - 1
    return relative_error(_attend(paged, last, "triton"), _attend(paged, last, "reference"))


def _large_target() -> Target:
    def reached(times: Times) -> bool:
        full = times.us["octavo"] <= times.floor_us / 0.98
        return full and _not_behind(times, ("flashinfer",), slack=1.01)

    return Target("98 % of the read rate, within 1 % of FlashInfer", reached)


def _small_target() -> Target:
    def reached(times: Times) -> bool:
        return times.us["octavo"] <= 10 + times.floor_us and _not_behind(times, ("flashinfer", "sdpa flash"), slack=1.0)

    return Target("at most 10 µs + bytes / read rate, faster than FlashInfer and SDPA flash", reached)


def _of_read(percent: float) -> Target:
    return Target(f"{percent} % of the read rate", lambda times: times.us["octavo"] <= 100 * times.floor_us / percent)


def _fitted_target(shape: Shape) -> Target:
    def reached(times: Times) -> bool:
        assert times.fit is not None, "the frame judges these after the uniform shapes"
        return times.us["octavo"] <= 1.1 * times.fit(shape.kv_bytes)

    return Target("within 10 % of t0 + bytes / rate as fitted on the uniform shapes", reached)


def _not_behind(times: Times, names: Sequence[str], slack: float) -> bool:
    """Whether octavo takes at most ``slack`` times as long as each of these rivals that raced."""
    return all(times.us["octavo"] <= slack * times.us[name] for name in names if name in times.us)
