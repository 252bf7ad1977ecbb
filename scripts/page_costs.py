"""What pages of one size waste and cost on a running engine, seen from outside."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.scripts.run import Sample
from octavo.scripts.workloads import Workload

if TYPE_CHECKING:
    from octavo.core import Engine

PAGE_METADATA_BYTES = 32 + 4  # a prefix key, and at least one table entry


@dataclass(frozen=True)
class Facts:
    """What the formulas are given: mean tokens L and number N of the sequences, b bytes a token, and m bytes a page,
    of which ``page_seconds`` of the host's time are the larger part."""

    mean_tokens: float
    sequences: int
    token_bytes: int
    page_bytes: float
    page_seconds: float


def serve(engine: Engine, model: Any, workload: Workload, salt: str) -> dict[str, Any]:
    """All requests of a workload, step by step. Passes of one engine with different salts find no pages of another.

    Steps count as decode steps, and their waste is summed, once every prompt is computed: then the tokens that are
    stored are known from outside, all of a request but the one drawn last.
    """
    from octavo.core import SamplingParams
    from octavo.core.memory.page_layout import PageLayout

    layout = PageLayout([], engine.config.policies, engine.config.unit_tokens)
    stored: dict[str, int] = {}
    seconds: list[float] = []
    cpu_seconds = 0.0
    decode_seconds: list[float] = []
    slots = waste = predicted = 0
    start = time.perf_counter()
    ids = [
        engine.submit(prompt, SamplingParams(max_tokens=new, ignore_eos=True), salt=salt)
        for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True)
    ]
    prompts = dict(zip(ids, map(len, workload.prompts), strict=True))
    unstarted = set(ids)
    with _ForwardClock(model) as clock:
        while engine.has_work():
            decoding = not unstarted
            begun, cpu_begun = time.perf_counter(), time.thread_time()
            news = engine.step()
            seconds.append(time.perf_counter() - begun)
            cpu_seconds += time.thread_time() - cpu_begun
            for output in news:
                unstarted.discard(output.request_id)
                stored[output.request_id] = stored.get(output.request_id, prompts[output.request_id] - 1) + 1
                if output.completion is not None:
                    del stored[output.request_id]
            if decoding:
                decode_seconds.append(seconds[-1])
                held = engine.stats().units_held * engine.config.unit_tokens
                slots += held
                waste += held - sum(stored.values())
                predicted += sum(map(layout.waste, stored.values()))
    sizes = [len(prompt) + new - 1 for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True)]
    return {
        "requests": len(ids),
        "prompt_tokens": sum(prompts.values()),
        "new_tokens": workload.total_new,
        "pages": sum(map(layout.pages_for, sizes)),
        "seconds": time.perf_counter() - start,
        "steps": len(seconds),
        "host_seconds": cpu_seconds - clock.cpu_seconds,
        "step_p99_seconds": float(np.percentile(decode_seconds or seconds, 99)),
        "held_slot_steps": slots,
        "waste_slot_steps": waste,
        "predicted_waste_slot_steps": predicted,
    }


class _ForwardClock:
    """CPU time that this thread spends inside the model's forward pass, until the device has finished. CPU time, since
    others on the machine would add to the time of a clock."""

    def __init__(self, model: Any) -> None:
        self.cpu_seconds = 0.0
        self._model = model
        self._begun = 0.0

    def __enter__(self) -> _ForwardClock:
        self._hooks = [
            self._model.register_forward_pre_hook(self._begin),
            self._model.register_forward_hook(self._end),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: object) -> None:
        self._begun = time.thread_time()

    def _end(self, *_: object) -> None:
        import torch

        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        self.cpu_seconds += time.thread_time() - self._begun


def memory(engine: Engine, model: Any) -> dict[str, Any]:
    """Bytes of a token's KV, and the rate at which the device reads its memory: the best of three sums of 64 MB."""
    import torch

    from octavo.core.sizing import kv_dtype

    spec = engine.spec
    data = torch.ones(64_000_000 // 4, device=model.device)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        data.sum().item()  # waits for the device
        times.append(time.perf_counter() - start)
    token_bytes = spec.kv_bytes_per_token(kv_dtype(engine.config, spec).itemsize)
    return {"token_bytes": token_bytes, "read_bytes_per_s": data.nbytes / min(times)}


def measure(samples: Sequence[Sample], workload: Workload) -> Facts:
    """What a sweep says of the workload and of a page's cost. A slope that noise has made negative counts as none."""
    own = [s for s in samples if s["item"] == "sweep"]
    lengths = [len(prompt) + new - 1 for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True)]
    pages, seconds = zip(*host_seconds(own), strict=True)
    slope = float(np.polyfit(pages, seconds, 1)[0]) if len(set(pages)) > 1 else 0.0
    page_seconds = max(slope, 0.0)
    page_bytes = page_seconds * median(s["read_bytes_per_s"] for s in own) + PAGE_METADATA_BYTES
    return Facts(mean(lengths), len(lengths), own[0]["token_bytes"], page_bytes, page_seconds)


def host_seconds(samples: Sequence[Sample]) -> list[tuple[int, float]]:
    """(pages, least host seconds) of each page size: whatever disturbs a round adds to its time."""
    by_pages: dict[int, list[float]] = {}
    for sample in samples:
        by_pages.setdefault(sample["pages"], []).append(sample["host_seconds"])
    return [(pages, min(seconds)) for pages, seconds in sorted(by_pages.items())]
