"""What is measured in the race of decode steps, and of whom."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from typing import Protocol

import torch

from octavo.scripts.workloads import Workload

TEMPERATURE = 0.6
"""Of the batch ``mixed``, as is customary."""


@dataclass(frozen=True)
class StepShape:
    """A batch whose sequences have ``context`` tokens each when the first of ``new_tokens`` timed steps begins, or a
    few more: whose prompt is computed first decodes while the others' are."""

    batch: int
    context: int
    new_tokens: int

    @property
    def name(self) -> str:
        return f"batch {self.batch}, context {self.context}"

    @property
    def kv_tokens(self) -> float:
        """Tokens of KV that a timed step reads, all sequences together, in the mean."""
        return self.batch * (self.context + self.new_tokens / 2)

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        random = Random(seed)
        return [random.choices(range(vocab_size), k=self.context) for _ in range(self.batch)]


@dataclass(frozen=True)
class Stretch:
    """One measurement of a shape.

    Attributes:
        step_s: of one decode step, the mean over the timed ones.
        prefill_s: until all prompts are computed and each sequence has a token.
        host_s: of a step, what the host takes in it outside of waiting for tokens; None if nobody can tell.
        wait_s: of a step, what it waits for tokens; None if nobody can tell.
        device_bytes_peak: of the device's memory that torch gave; None on a CPU.
    """

    step_s: float
    prefill_s: float
    host_s: float | None
    wait_s: float | None
    device_bytes_peak: int | None


class Stepper(Protocol):
    """Who decodes batches of one length."""

    def warm_up(self, shape: StepShape) -> None:
        """Allocate, compile and capture what the shape needs."""
        ...

    def stretch(self, shape: StepShape, seed: int) -> Stretch: ...


class Server(Stepper, Protocol):
    """Who serves requests of several lengths, too."""

    def serve(self, workload: Workload) -> float:
        """Seconds of all requests from first to last."""
        ...


def now(device: torch.device) -> float:
    """Seconds since any moment, once the device has no work left."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def forget_peak(device: torch.device) -> None:
    """Let ``device_bytes_peak`` count from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def device_bytes_peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
