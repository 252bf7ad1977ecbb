"""A few steps of an engine under torch's profiler: a trace for Perfetto, and how busy the device was."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from octavo.scripts.progress import waiting
from octavo.scripts.serving import Clock, Server, serve
from octavo.scripts.timed_requests import TimedRequest

FILE = "trace.json.gz"
PROFILED_STEPS = 8
STEP = "engine: step"
SUBMIT = "engine: submit"

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Profile:
    """steps: how many are in the trace. device_busy_percent: None without a CUDA device."""

    steps: int
    device_busy_percent: float | None

    @property
    def columns(self) -> dict[str, float]:
        """What it adds to the row of the pass that it looked at."""
        return {} if self.device_busy_percent is None else {"device_busy_percent": self.device_busy_percent}

    @property
    def notes(self) -> list[str]:
        """What a reader of the report must know of it, if it says anything about the device."""
        if self.device_busy_percent is None:
            return []
        return [
            f"The device was busy {self.device_busy_percent:.1f} % of {self.steps} steps in the middle ({FILE}): union "
            "of its kernels' intervals over the time of the steps; the profiler slows the host, so it is rather more."
        ]


def profile_middle(server: Server, requests: Sequence[TimedRequest], file: Path, device: str) -> Profile:
    """Serve requests, and write a trace of at most ``PROFILED_STEPS`` steps from where half of the tokens are there."""
    watched = _Profiled(server, sum(request.new_tokens for request in requests) // 2, device)
    with waiting(f"profiling into {file}"):
        serve(watched, requests, Clock())
        watched.end()
        assert watched.profiler is not None
        watched.profiler.export_chrome_trace(str(file))
    with gzip.open(file) as stream:
        events = json.load(stream)["traceEvents"]
    return Profile(watched.steps, device_busy_percent(events))


def device_busy_percent(events: Iterable[Event]) -> float | None:
    """The share of the time from the first profiled step's begin to the last one's end in which a kernel ran; kernels
    of several streams that overlap count once. None if no kernel ran.

    Args:
        events: of a Chrome trace as torch's profiler writes it; ``ts`` and ``dur`` in microseconds.
    """
    spans: dict[str, list[tuple[float, float]]] = {"kernel": [], "user_annotation": []}
    for event in events:
        kind = event.get("cat")
        if kind == "kernel" or (kind == "user_annotation" and event["name"] == STEP):
            spans[kind].append((event["ts"], event["ts"] + event["dur"]))
    if not spans["kernel"]:
        return None
    begin, end = min(spans["user_annotation"])[0], max(spans["user_annotation"])[1]
    busy, reached = 0.0, begin
    for first, last in sorted(spans["kernel"]):
        busy += max(0.0, min(last, end) - max(first, reached))
        reached = max(reached, last)
    return 100 * busy / (end - begin)


class _Profiled:
    """A server some of whose steps are profiled: those after ``after_tokens`` new tokens."""

    def __init__(self, server: Server, after_tokens: int, device: str) -> None:
        self._server = server
        self._left = after_tokens
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
        self._running = False
        self.profiler: profile | None = None
        self.steps = 0

    def submit(self, number: int, request: TimedRequest) -> None:
        with record_function(SUBMIT):
            self._server.submit(number, request)

    def step(self) -> list[tuple[int, int]]:
        if self.profiler is None and self._left <= 0:
            self.profiler = profile(activities=self._activities)
            self.profiler.start()
            self._running = True
        with record_function(STEP):
            news = list(self._server.step())
        self._left -= sum(new_tokens for _, new_tokens in news)
        if self._running:
            self.steps += 1
            if self.steps == PROFILED_STEPS:
                self.end()
        return news

    def end(self) -> None:
        """Stop profiling, if that has not happened yet."""
        if self._running and self.profiler is not None:
            self.profiler.stop()
            self._running = False

    def admitted_at(self, number: int) -> float | None:
        return self._server.admitted_at(number)
