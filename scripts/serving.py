"""Serving requests as they come, in real time or on a clock that a test turns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.scripts.timed_requests import TimedRequest


@dataclass(frozen=True)
class Clock:
    """``now`` in seconds since any moment, and a ``sleep`` of as many."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Journey:
    """What became of a request, in seconds since the start of the serving.

    Attributes:
        arrival_s: when it came, whether or not somebody had time to take it in.
        token_s: when each of its new tokens was there.
        admitted_s: when it was first given a place among those that are computed; None if nobody can tell.
    """

    arrival_s: float
    token_s: list[float] = field(default_factory=list)
    admitted_s: float | None = None


@dataclass(frozen=True)
class Served:
    """journeys: in the order of the requests. preemptions: None if nobody can tell."""

    journeys: list[Journey]
    preemptions: int | None


class Server(Protocol):
    """An engine that works in steps."""

    def submit(self, number: int, request: TimedRequest) -> None:
        """Take a request in, under its number."""
        ...

    def step(self) -> Iterable[tuple[int, int]]:
        """Compute for a while, and say which requests have how many tokens more: (number, new tokens)."""
        ...

    def admitted_at(self, number: int) -> float | None:
        """When a request was first admitted, on the clock; None if it is not known."""
        ...


def serve(server: Server, requests: Sequence[TimedRequest], clock: Clock) -> list[Journey]:
    """Hand requests in at their times, and note when their tokens are there. In each turn:

    1. whoever has come is handed in, in the order of arrival;
    2. the server makes a step if it has work, and all tokens of the step are noted with the time at its end;
       otherwise the clock sleeps until the next request comes.

    A request's time runs from its arrival, also if a step holds up its being handed in: who comes at a rate does not
    wait for the server, and a server that falls behind is to show it.
    """
    start = clock.now()
    journeys = [Journey(request.arrival_s) for request in requests]
    coming = deque(enumerate(requests))
    unfinished = 0
    while coming or unfinished:
        now = clock.now() - start
        while coming and coming[0][1].arrival_s <= now:
            server.submit(*coming.popleft())
            unfinished += 1
        if not unfinished:
            clock.sleep(coming[0][1].arrival_s - now)
            continue
        news = server.step()
        now = clock.now() - start
        for number, new_tokens in news:
            tokens = journeys[number].token_s
            tokens += [now] * new_tokens
            assert len(tokens) <= requests[number].new_tokens, "a request got more tokens than it asked for"
            unfinished -= len(tokens) == requests[number].new_tokens
    for number, journey in enumerate(journeys):
        admitted = server.admitted_at(number)
        journey.admitted_s = None if admitted is None else admitted - start
    return journeys
