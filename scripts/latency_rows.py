"""From passes to rows: what those who wait for tokens have seen. Computed from ``samples.jsonl`` alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from octavo.scripts.serving import Served
from octavo.scripts.timed_requests import TimedRequest

Row = dict[str, Any]
Sample = Mapping[str, Any]

PERCENTILES = (50, 95, 99)
DIGITS = 6  # of seconds: a microsecond is less than any clock here can tell


def passed(requests: Sequence[TimedRequest], served: Served) -> dict[str, Any]:
    """The part of a sample that says what became of the requests."""
    return {
        "preemptions": served.preemptions,
        "requests": [
            {
                "arrival_s": round(journey.arrival_s, DIGITS),
                "admitted_s": None if journey.admitted_s is None else round(journey.admitted_s, DIGITS),
                "token_s": [round(moment, DIGITS) for moment in journey.token_s],
                "prompt_tokens": len(request.prompt),
                "long": request.long,
            }
            for request, journey in zip(requests, served.journeys, strict=True)
        ],
    }


def rows(samples: Iterable[Sample], ttft_limit_s: float, itl_limit_s: float) -> list[Row]:
    """One row a rate and contender, in the order of the samples.

    ========================  =======================================================================================
    ``offered_per_s``         requests over the time in which they came; None if all came at the start
    ``served_per_s``          requests, and ``tokens_per_s`` new tokens, over the time from the start to the last token
    ``goodput_per_s``         requests within both limits, over the same time: first token at most ``ttft_limit_s``
                              after the arrival, and at most ``itl_limit_s`` between tokens in the request's mean (the
                              two objectives of DistServe, arXiv 2401.09670); ``good_percent`` is their share
    ``ttft_*``                time to first token, from the arrival
    ``itl_*``                 inter-token latency: from one token of a request to its next; 0 for tokens of one step
    ``e2e_*``                 from the arrival to the last token
    ``queue_*``               from the arrival to the admission; None if the contender does not tell it
    ``*_while_prefill_ms``    inter-token latency of the others, between whose two tokens some of the long prompt's
                              time passed, from its admission (if that is not known, arrival) to its first token
    ========================  =======================================================================================

    The long request counts in ``served_per_s`` and ``tokens_per_s`` and in nothing else; ``long_ttft_ms`` is its own.
    """
    return [_row(sample, ttft_limit_s, itl_limit_s) for sample in samples]


def gaps(requests: Iterable[Mapping[str, Any]]) -> list[float]:
    """Seconds between the consecutive tokens of each request, over all requests that are not long."""
    return [later - earlier for r in requests if not r["long"] for earlier, later in pairwise(r["token_s"])]


def _row(sample: Sample, ttft_limit_s: float, itl_limit_s: float) -> Row:
    requests = sample["requests"]
    others = [request for request in requests if not request["long"]]
    first = [request["token_s"][0] - request["arrival_s"] for request in others]
    seconds = max(request["token_s"][-1] for request in requests)
    new_tokens = sum(len(request["token_s"]) for request in requests)
    good = sum(
        ttft <= ttft_limit_s and _mean_gap(request) <= itl_limit_s for ttft, request in zip(first, others, strict=True)
    )
    queued = [r["admitted_s"] - r["arrival_s"] for r in others if r["admitted_s"] is not None]
    last_arrival = max(request["arrival_s"] for request in others)
    between = gaps(others)
    row = {
        "name": sample["name"],
        "method": sample["method"],
        "task": sample["item"],
        "rate_per_s": sample["rate_per_s"],
        "requests": len(requests),
        "prompt_tokens": sum(request["prompt_tokens"] for request in requests),
        "new_tokens": new_tokens,
        "offered_per_s": len(others) / last_arrival if last_arrival else None,
        "served_per_s": len(requests) / seconds,
        "goodput_per_s": good / seconds,
        "good_percent": 100 * good / len(others),
        "tokens_per_s": new_tokens / seconds,
        **_percentiles("ttft", "ms", [1e3 * value for value in first]),
        **_percentiles("itl", "ms", [1e3 * gap for gap in between]),
        "itl_max_ms": 1e3 * max(between) if between else None,
        **_percentiles("e2e", "s", [request["token_s"][-1] - request["arrival_s"] for request in others]),
        **_percentiles("queue", "ms", [1e3 * value for value in queued] if len(queued) == len(others) else []),
        "preemptions": sample["preemptions"],
        "free_cores": sample["free_cores"],
        "load_1m": sample["load_1m"],
    }
    for long in [request for request in requests if request["long"]]:
        row["long_ttft_ms"] = 1e3 * (long["token_s"][0] - long["arrival_s"])
        row["itl_p99_while_prefill_ms"] = _itl_p99_while_prefill_ms(long, others)
    return row


def _itl_p99_while_prefill_ms(long: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> float | None:
    begin = long["arrival_s"] if long["admitted_s"] is None else long["admitted_s"]
    end = long["token_s"][0]
    touched = [
        1e3 * (later - earlier)
        for request in others
        for earlier, later in pairwise(request["token_s"])
        if earlier < end and later > begin
    ]
    return float(np.percentile(touched, 99)) if touched else None


def _mean_gap(request: Mapping[str, Any]) -> float:
    tokens: list[float] = request["token_s"]
    return (tokens[-1] - tokens[0]) / (len(tokens) - 1) if len(tokens) > 1 else 0.0


def _percentiles(what: str, unit: str, values: Sequence[float]) -> dict[str, float | None]:
    """Linear between neighbours; None if there are no values."""
    found = np.percentile(values, PERCENTILES).tolist() if values else [None] * len(PERCENTILES)
    return {f"{what}_p{p}_{unit}": value for p, value in zip(PERCENTILES, found, strict=True)}
