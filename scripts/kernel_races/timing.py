"""How calls are timed: as CUDA graphs, in turns.

1. A contender's calls run twice each: what has to be compiled or planned is, and whoever cannot run says so.
2. They are captured in a CUDA graph, in turn, as often as gives at least 20 launches. The inputs of one round of calls
   exceed twice the L2, so that each call finds its own cold.
3. All contenders' graphs take turns, A-B-A-B, over some rounds; a lap is one replay between two device events.
   Medians, minima and maxima are over a contender's laps.

Calls over the bus take milliseconds, which hides what a launch costs, and torch's own copies from pinned memory note
events that a capture forbids: those are launched one by one instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Protocol

import torch

Calls = Sequence[Callable[[], object]]
Lap = Callable[[], float]
"""One replay of a contender; microseconds a call."""

LAUNCHES = 20


class Clock(Protocol):
    """Makes laps of calls. Tests have one of their own."""

    def prepare(self, calls: Calls, captured: bool) -> Lap:
        """Compile, warm up and capture; raises whatever a call raises."""
        ...


class GraphClock:
    """Times replays of CUDA graphs between device events."""

    def prepare(self, calls: Calls, captured: bool) -> Lap:
        repeats = math.ceil(LAUNCHES / len(calls))

        def launch_all() -> None:
            for _ in range(repeats):
                for call in calls:
                    call()

        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # as torch asks of what is about to be captured
            for _ in range(2):
                for call in calls:
                    call()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        play = launch_all
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch_all()
            play = graph.replay

        def lap() -> float:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            play()
            stop.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(stop)) * 1e3 / (repeats * len(calls))

        return lap


def interleave(laps: Mapping[str, Lap], rounds: int) -> dict[str, list[float]]:
    """Microseconds a call of every contender and round. All take turns, after one lap each that does not count."""
    for lap in laps.values():
        lap()
    taken: dict[str, list[float]] = {name: [] for name in laps}
    for _ in range(rounds):
        for name, lap in laps.items():
            taken[name].append(lap())
    return taken


def timed(calls: Calls, rounds: int = 15, clock: Clock | None = None, captured: bool = True) -> float:
    """Median microseconds a call of one contender alone."""
    return median(interleave({"alone": (clock or GraphClock()).prepare(calls, captured)}, rounds)["alone"])
