"""Races of what writes and moves pages: K9 append, K11 copy, K12 transfer between the device and pinned host memory.

Append and copy read and write every byte once; their floor is both over the copy rate. A transfer's floor is its bytes
over the rate of one large pinned copy, which runs beside it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.layout import pool_shape
from octavo.kernels.reference import backend as reference
from octavo.scripts.kernel_races import rivals
from octavo.scripts.kernel_races.checking import mismatch
from octavo.scripts.kernel_races.race import Bound, Field, Race, Target

APPEND, COPY, TRANSFER = "K9 append", "K11 copy", "K12 transfer"
COLD_BYTES = 150e6
"""What the calls of a round move at least: over twice an L2."""

KV_HEADS, UNIT, DIM, LAYERS = 8, 16, 128, 16
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
CALL_BYTES = 256 << 20
"""What a call of transfer moves."""

CPU_CALL_BYTES = 1 << 17
"""The same in Triton's interpreter, where a race checks its own code."""


def races() -> list[Race]:
    at_most_4 = Target("at most 4 µs", lambda times: times.us["octavo"] <= 4)
    return [
        _append(256, at_most_4),
        _append(8192, _of_copy(80)),
        _copy("1 unit of 64 KB", 1, 1, None),
        _copy("1 unit of 2 MB", 32, 1, Target("at most 6 µs", lambda times: times.us["octavo"] <= 6)),
        _copy("32 MB", 32, 16, _of_copy(85)),
        _copy("256 MB", 32, 128, _of_copy(85)),
        *(
            _transfer(name, heads, way)
            for name, heads in (("8 KB", 1), ("64 KB", 8))
            for way in ("to_device", "to_host")
        ),
    ]


def _of_copy(percent: float) -> Target:
    return Target(f"{percent} % of the copy rate", lambda times: times.us["octavo"] <= 100 * times.floor_us / percent)


def _append(tokens: int, target: Target) -> Race:
    return Race(
        APPEND, f"{tokens:,} tokens", 2 * tokens * TOKEN_BYTES, 0, partial(_build_append, tokens), target, bound="copy"
    )


def _build_append(tokens: int, device: torch.device) -> Field:
    """Up to 256 tokens are a decode step, each in a unit of its own; more are a prefill of whole units."""
    calls = math.ceil(COLD_BYTES / (2 * tokens * TOKEN_BYTES))
    if device.type == "cpu":
        tokens, calls = min(tokens, 40), 2
    units = 64 if device.type == "cpu" else 2048
    pool = torch.empty(pool_shape(units, LAYERS, KV_HEADS, UNIT, DIM), device=device, dtype=torch.bfloat16).normal_()
    k, v = torch.randn((2, calls, tokens, KV_HEADS, DIM), device=device, dtype=torch.bfloat16)

    def slots() -> Tensor:
        order = torch.randperm(units, device=device) + 1
        if tokens <= 256:
            return order[:tokens] * UNIT + torch.randint(UNIT, (tokens,), device=device)
        return (order[: math.ceil(tokens / UNIT), None] * UNIT + torch.arange(UNIT, device=device)).flatten()[:tokens]

    where = [slots() for _ in range(calls)]

    def error() -> float:
        got, want = pool[:, :2].clone(), pool[:, :2].clone()
        ops.append(k[0], v[0], got, 1, where[0], "triton")
        reference.append(k[0], v[0], want, 1, where[0])
        return mismatch(got, want)

    def run(append: Callable[..., object], i: int) -> object:
        return append(k[i], v[i], pool, i % LAYERS, where[i])

    contenders: dict[str, list[Callable[[], object]]] = {
        "octavo": [partial(run, partial(ops.append, backend="triton"), i) for i in range(calls)],
        "torch": [partial(run, reference.append, i) for i in range(calls)],
    }
    if rivals.installed("flashinfer"):
        make = partial(rivals.flashinfer_append, list(k), list(v), where, pool)
        contenders["flashinfer"] = rivals.lazily(make, calls)
    return Field(contenders, error, 0.0)


def _copy(name: str, layers: int, units: int, target: Target | None) -> Race:
    """``units`` of 64 KB a layer in one call."""
    moved = 2 * units * layers * UNIT * TOKEN_BYTES
    return Race(COPY, name, moved, 0, partial(_build_copy, layers, units), target, bound="copy")


def _build_copy(layers: int, units: int, device: torch.device) -> Field:
    calls = max(math.ceil(COLD_BYTES / (2 * units * layers * UNIT * TOKEN_BYTES)), 2)
    if device.type == "cpu":
        layers, units, calls = min(layers, 2), min(units, 2), 2
    shape = pool_shape(2 * units * calls, layers, KV_HEADS, UNIT, DIM)
    pool = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_()
    order = torch.randperm(2 * units * calls, device=device, dtype=torch.int32) + 1
    pairs = [piece.view(units, 2).contiguous() for piece in order.chunk(calls)]

    def error() -> float:
        want = pool[pairs[0][:, 0].long()]
        ops.copy_units(pool, pairs[0], "triton")
        return mismatch(pool[pairs[0][:, 1].long()], want)

    def by_torch(sources: Tensor, targets: Tensor) -> None:
        pool.index_copy_(0, targets, pool.index_select(0, sources))

    return Field(
        {
            "octavo": [partial(ops.copy_units, pool, pair, "triton") for pair in pairs],
            "torch": [partial(by_torch, *pair.long().T.contiguous()) for pair in pairs],
        },
        error,
        0.0,
    )


def _transfer(name: str, kv_heads: int, way: Bound) -> Race:
    target = Target(
        "95 % of one large pinned copy", lambda times: times.us["octavo"] <= times.us["one large copy"] / 0.95
    )
    shape = f"{name} {way.replace('_', ' ')}"
    return Race(TRANSFER, shape, CALL_BYTES, 0, partial(_build_transfer, kv_heads, way), target, bound=way)


def _build_transfer(kv_heads: int, way: Bound, device: torch.device) -> Field:
    """Half of the units of two pools, in random order on both sides."""
    call_bytes = CPU_CALL_BYTES if device.type == "cpu" else CALL_BYTES
    shape = (1, kv_heads, UNIT, DIM)
    units = 2 * call_bytes // (torch.Size(pool_shape(0, *shape)).numel() * 2)
    near = torch.empty(pool_shape(units, *shape), device=device, dtype=torch.bfloat16).normal_()
    host = torch.empty(near.shape, dtype=near.dtype, pin_memory=device.type == "cuda")
    host.copy_(torch.empty_like(near).normal_())
    source, target = (host, near) if way == "to_device" else (near, host)
    pairs = torch.stack([torch.randperm(units) + 1, torch.randperm(units) + 1], 1)[: units // 2].int()
    pairs = pairs.contiguous().to(device)

    def error() -> float:
        sources, targets = pairs.long().cpu().unbind(1)
        target[targets.to(target.device)] = torch.nan
        ops.transfer(source, target, pairs, "triton")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        got, want = target[targets.to(target.device)], source[sources.to(source.device)]
        return mismatch(got.to(device), want.to(device))

    count = call_bytes // 2
    one, other = source.view(-1)[:count], target.view(-1)[:count]
    return Field(
        {
            "octavo": [partial(ops.transfer, source, target, pairs, "triton")],
            "one large copy": [lambda: other.copy_(one, non_blocking=True)],
        },
        error,
        0.0,
    )
