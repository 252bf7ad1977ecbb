"""Races of the sampler: 128k logits a row, under the filters that people use.

The logits are normal with a standard deviation of 3: at temperature 1 the nucleus of 0.9 is a few thousand tokens. The
floor is one read of the logits. Rivals take the same logits to a token by the means that are usual there: torch sorts;
FlashInfer makes probabilities in fp32 and then samples without a sort. Their random numbers are their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import ceil

import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.scripts.kernel_races.race import Field, Race, Target

VOCABULARY = 131_072
COLD_BYTES = 150e6
"""What the calls of a round read at least: over twice an L2."""

CPU_ROWS, CPU_VOCABULARY = 2, 3000
"""The shape in Triton's interpreter, where a race checks its own code."""


@dataclass(frozen=True)
class Filters:
    """One setting for all rows."""

    name: str
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0


CASES = (
    Filters("top-p 0.9", top_p=0.9),
    Filters("top-k 50, top-p 0.9", top_k=50, top_p=0.9),
    Filters("temperature", temperature=1.0),
    Filters("greedy", temperature=0.0),
)


def races() -> list[Race]:
    at_most_80 = Target("at most 80 µs", lambda times: times.us["octavo"] <= 80)
    return [_race(rows, filters, at_most_80 if rows == 256 else None) for rows in (256, 32, 1) for filters in CASES]


def _race(rows: int, filters: Filters, target: Target | None) -> Race:
    shape = f"{rows} x 128k bf16, {filters.name}"
    return Race("K13 sample", shape, 2 * rows * VOCABULARY, 0, partial(_build, rows, filters), target)


def _build(rows: int, filters: Filters, device: torch.device) -> Field:
    vocabulary = VOCABULARY
    if device.type == "cpu":
        rows, vocabulary = min(rows, CPU_ROWS), CPU_VOCABULARY
    copies = ceil(COLD_BYTES / (2 * rows * VOCABULARY)) if device.type == "cuda" else 1
    settings = _settings(rows, filters, device)

    def logits() -> Tensor:
        return (torch.randn(rows, vocabulary, device=device) * 3).bfloat16()

    inputs = [logits() for _ in range(copies)]
    contenders: dict[str, Callable[[Tensor], object]] = {
        "octavo": lambda x: ops.sample(x, *settings, "triton"),
        "torch": partial(_by_sort, filters),
        **_flashinfer(filters),
    }

    def error() -> float:
        """Share of rows whose token is not the reference's; rounding may decide a near tie now and then."""
        fresh = logits()
        tokens, truth = (ops.sample(fresh, *settings, backend) for backend in ("triton", "reference"))
        return (tokens != truth).float().mean().item()

    calls = {name: [partial(call, x) for x in inputs] for name, call in contenders.items()}
    return Field(calls, error, tolerance=0.005)


def _settings(rows: int, filters: Filters, device: torch.device) -> tuple[Tensor, ...]:
    return (
        torch.full((rows,), filters.temperature, device=device),
        torch.full((rows,), filters.top_k, dtype=torch.int32, device=device),
        torch.full((rows,), filters.top_p, device=device),
        torch.zeros(rows, device=device),
        torch.arange(rows, device=device),
        torch.full((rows,), 17, device=device),
    )


def _by_sort(filters: Filters, logits: Tensor) -> Tensor:
    """As most samplers in torch do it; without a filter nothing needs the sort."""
    if not filters.temperature:
        return logits.argmax(1)
    x = logits.float() / filters.temperature
    if not filters.top_k and filters.top_p == 1:
        return (x.softmax(1) / torch.empty_like(x).exponential_()).argmax(1)
    ordered, ids = x.sort(dim=1, descending=True)
    if filters.top_k:
        ordered[:, filters.top_k :] = -torch.inf
    probs = ordered.softmax(1)
    probs = probs.where(probs.cumsum(1) - probs < filters.top_p, 0.0)
    return ids.gather(1, (probs / torch.empty_like(probs).exponential_()).argmax(1, keepdim=True))


def _flashinfer(filters: Filters) -> dict[str, Callable[[Tensor], object]]:
    """FlashInfer's softmax and sampling; none where it is missing, and nothing to race for the arg-max."""
    if find_spec("flashinfer") is None or not filters.temperature:
        return {}
    random = {"seed": 1, "offset": 0}  # given, so that the state of a generator is not read during capture

    def call(logits: Tensor) -> Tensor:
        from flashinfer import sampling

        probs = sampling.softmax(logits, temperature=filters.temperature)
        if filters.top_k:
            drawn = sampling.top_k_top_p_sampling_from_probs(probs, filters.top_k, filters.top_p, **random)
        elif filters.top_p < 1:
            drawn = sampling.top_p_sampling_from_probs(probs, filters.top_p, **random)
        else:
            drawn = sampling.sampling_from_probs(probs, **random)
        return drawn

    return {"flashinfer": call}
