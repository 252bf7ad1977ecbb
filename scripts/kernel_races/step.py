"""Races of K14, step preparation: what a decode step takes from the state of its sequences, and moving the state on.

A step touches some 10 KB that the step before has just written, so it finds them in L2 in a model too; the states that
take turns here differ, but nothing could make so little data cold.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.layout import pack_entries
from octavo.kernels.reference import step as reference
from octavo.scripts.kernel_races.race import Field, Race, Target

ROWS = 256
ENTRIES = 8192
UNIT = 16
STATES = 8


def _state(device: torch.device, slices: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Arguments of ``step_decode``: all rows of a state take part, in random order, at random lengths."""
    units = torch.randint(1, 2**20, (slices, ROWS, ENTRIES), device=device, dtype=torch.int32)
    lengths = torch.randint(ENTRIES * UNIT, (ROWS,), device=device, dtype=torch.int32)
    tokens = torch.randint(2**17, (ROWS,), device=device)
    return torch.randperm(ROWS, device=device).int(), lengths, tokens, pack_entries(units, UNIT), UNIT


def _prepare(slices: int) -> Callable[[torch.device], Field]:
    def build(device: torch.device) -> Field:
        states = [_state(device, slices) for _ in range(STATES)]

        def error() -> float:
            state = _state(device, slices)
            state[0][::7] = -1
            results = zip(ops.step_decode(*state, "triton"), reference.step_decode(*state), strict=True)
            return float(not all(torch.equal(got, want) for got, want in results))

        return Field(
            contenders={
                "octavo": [lambda s=s: ops.step_decode(*s, "triton") for s in states],
                "torch": [lambda s=s: reference.step_decode(*s) for s in states],
            },
            error=error,
            tolerance=0.0,
        )

    return build


def _scatter(device: torch.device) -> Field:
    states = [_state(device, 1)[:3] for _ in range(STATES)]
    by_id = [(rows.long(), lengths.clone(), tokens.clone()) for rows, lengths, tokens in states]
    ids = torch.randint(2**17, (ROWS,), device=device)

    def by_torch(rows: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        """What torch can do in a graph: no padding, which would take a mask whose count the host has to know."""
        tokens.index_copy_(0, rows, ids)
        lengths.index_add_(0, rows, torch.ones_like(lengths))

    def error() -> float:
        rows, lengths, tokens = _state(device, 1)[:3]
        rows[::7] = -1
        want = tokens.clone(), lengths.clone()
        reference.scatter_tokens(rows, ids, *want)
        ops.scatter_tokens(rows, ids, tokens, lengths, "triton")
        return float(not (torch.equal(tokens, want[0]) and torch.equal(lengths, want[1])))

    return Field(
        contenders={
            "octavo": [lambda r=r, n=n, t=t: ops.scatter_tokens(r, ids, t, n, "triton") for r, n, t in states],
            "torch": [lambda r=r, n=n, t=t: by_torch(r, n, t) for r, n, t in by_id],
        },
        error=error,
        tolerance=0.0,
    )


def races() -> list[Race]:
    target = Target("at most 5 us", lambda times: times.us["octavo"] <= 5)
    state_bytes = 4 + 4 + 8  # row, length, token
    prepared = [
        Race(
            kernel="K14 step_decode",
            shape=f"{ROWS} rows, {slices} slice{'s' if slices > 1 else ''}",
            moved_bytes=ROWS * (state_bytes + 4 * slices + 8 + 8 + 4 + 4 + 8 * slices),
            flops=0,
            build=_prepare(slices),
            target=target,
        )
        for slices in (1, 6)
    ]
    moved = ROWS * (4 + 8 + 8 + 2 * 4)
    return [*prepared, Race("K14 scatter_tokens", f"{ROWS} rows", moved, 0, _scatter, target)]
