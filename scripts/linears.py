"""The floor of a workload's time: what its matrix products alone take, at its own shapes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from octavo.scripts.workloads import Workload

TIMED_PASSES = 3


def seconds(model: Any, workload: Workload, step_tokens: int) -> float:
    """Time that the model's Linear layers need for a workload, one after the other, and nothing else.

    Every prompt token passes once, in steps of at most ``step_tokens``, the output layer for one row a request.
    Then every decode step passes with as many rows as requests still run; each batch size is timed a few times, and its
    median counts once a step. Layers that are no ``nn.Linear`` (fused experts, for instance) are not in it: then it is
    too low, as a floor may be.
    """
    prompt_tokens = sum(map(len, workload.prompts))
    # The first new token comes out of the prompt, so a request of n new tokens is in n - 1 decode steps.
    steps = range(1, max(workload.new_tokens))
    batches = Counter(sum(new > step for new in workload.new_tokens) for step in steps)
    total = 0.0
    for start in range(0, prompt_tokens, step_tokens):
        rows = len(workload.prompts) if start + step_tokens >= prompt_tokens else 0
        total += _median(_pass(model, min(step_tokens, prompt_tokens - start), rows), passes=1)
    for rows, count in batches.items():
        total += count * _median(_pass(model, rows, rows), TIMED_PASSES)
    return total


def _pass(model: Any, tokens: int, rows: int) -> Callable[[], None]:
    """All Linear layers on ``tokens`` tokens, the output layer on ``rows``; inputs are noise of the right shape."""
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    weight = head.weight
    sizes = {layer.in_features for layer in [*layers, head]}
    inputs = {size: torch.randn(tokens, size, dtype=weight.dtype, device=weight.device) for size in sizes}

    def once() -> None:
        with torch.inference_mode():
            for layer in layers:
                layer(inputs[layer.in_features])
            if rows:
                head(inputs[head.in_features][:rows])

    return once if weight.device.type != "cuda" else _captured(once)


def _captured(once: Callable[[], None]) -> Callable[[], None]:
    """``once`` as a CUDA graph: launched layer by layer it would time the host, and be no floor."""
    once()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    replay()
    return replay


def _median(once: Callable[[], None], passes: int) -> float:
    times = []
    for _ in range(passes):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
