"""Requests that come at their times: a workload and a rate of arrival."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.scripts.arrivals import Poisson
from octavo.scripts.workloads import Workload


@dataclass(frozen=True)
class TimedRequest:
    """``prompt`` comes ``arrival_s`` seconds after the start and gets ``new_tokens`` tokens, no fewer and no more.
    ``long``: it is there to disturb the others."""

    arrival_s: float
    prompt: list[int]
    new_tokens: int
    long: bool = False


def timed(workload: Workload, rate_per_s: float | None, seed: int, *, last_is_long: bool = False) -> list[TimedRequest]:
    """The requests of a workload in their order, with Poisson arrivals; without a rate, all come at the start.

    A seed draws the same pattern at every rate, drawn out or pressed together.

    Args:
        last_is_long: the last request is the long one; it comes together with the middle one of the others, before it.
    """
    requests = list(zip(workload.prompts, workload.new_tokens, strict=True))
    long = requests.pop() if last_is_long else None
    times = [0.0] * len(requests)
    if rate_per_s is not None:
        times = Poisson(rate_per_s).draw(np.random.default_rng(seed), len(requests)).tolist()
    found = [TimedRequest(time_s, *request) for time_s, request in zip(times, requests, strict=True)]
    if long is not None:
        middle = len(found) // 2
        found.insert(middle, TimedRequest(times[middle], *long, long=True))
    return found
