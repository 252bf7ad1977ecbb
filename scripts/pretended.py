"""Contexts that nobody has computed: for the speed of decode steps, which does not depend on what K and V are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from octavo.core import Engine


def fill(engine: Engine, seed: int) -> None:
    """Let every page hold random numbers, as random weights would give."""
    kv = engine._runner.kv
    torch.manual_seed(seed)
    for units in kv.split(4096):  # normal_ of fp32 at once would take twice the pool
        units.normal_()


@contextmanager
def prefill(engine: Engine) -> Iterator[None]:
    """Within the block, forward passes compute nothing: prompts get their pages, whatever these hold, and some first
    token. No step is replayed, or read later than it is launched."""
    model, runner, vocabulary = engine._model, engine._runner, engine.spec.vocab_size

    def nothing(ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros((len(wanted), vocabulary), device=ids.device)

    model.forward = nothing  # type: ignore[method-assign, assignment]
    runner.launches = lambda plan: False  # type: ignore[method-assign]
    pieces, runner._pieces = runner._pieces, None  # of a pass that computes nothing, none is to be captured
    try:
        yield
    finally:
        runner._pieces = pieces
        del model.forward, runner.launches  # the methods of their classes again
