"""From samples of questions about images to rows, with paired statistics against the uncached run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.scripts.schema_multimodal import UNCACHED
from octavo.scripts.tasks.statistics import bootstrap_mean, mcnemar_exact, paired_bootstrap

Row = dict[str, Any]
Sample = Mapping[str, Any]

ALL = "all"
"""The task of the rows on all samples that have an accuracy, where they are of several tasks."""

QUALITIES = ("accuracy", "soft_accuracy", "rouge_l", "things_f1")


def rows(samples: Sequence[Sample], seed: int, *, intervals: bool = True) -> list[Row]:
    """One row a task and method, in the order of the samples, and one a method on ``ALL`` tasks.

    Qualities are means over items in points, ``consistency`` the share of groups that are right as a whole, both with
    95 % bootstrap intervals over items (groups) in ``<key>_ci``; ``<key>_vs_uncached`` is the mean difference over the
    same items, and ``accuracy_p_value`` McNemar's exact test of them. ``agreement_percent``: tokens of the uncached
    answers that come out the same, up to the first that differs. ``kl_nats_mean`` and ``kl_nats_max``: divergence of
    the distributions of next tokens from the uncached ones, up to there.
    """
    found = []
    tasks = {name: [s for s in samples if s["task"] == name] for name in dict.fromkeys(s["task"] for s in samples)}
    accurate = [sample for sample in samples if "accuracy" in sample]
    if len({sample["task"] for sample in accurate}) > 1:
        tasks[ALL] = accurate
    for task, of_task in tasks.items():
        base = {sample["item"]: sample for sample in of_task if sample["method"] == UNCACHED}
        for method in dict.fromkeys(sample["method"] for sample in of_task):
            own = [sample for sample in of_task if sample["method"] == method]
            row: Row = {"name": "octavo", "method": method, "task": task, "items": len(own)}
            for key in [key for key in QUALITIES if all(key in sample for sample in own)]:
                _estimate(row, key, [sample[key] for sample in own], seed, intervals)
                if method != UNCACHED:
                    pair = [s[key] for s in own], [base[s["item"]][key] for s in own]
                    _compare(row, key, *pair, seed, intervals)
            groups = consistent([sample for sample in own if sample["group"] is not None])
            if groups:
                _estimate(row, "consistency", groups, seed, intervals)
            if method != UNCACHED:
                tokens = sum(sample["uncached_tokens"] for sample in own)
                row["agreement_percent"] = 100 * sum(sample["same_tokens"] for sample in own) / tokens
                row["kl_nats_mean"] = sum(sample["kl_nats"] for sample in own) / len(own)
                row["kl_nats_max"] = max(sample["kl_nats_max"] for sample in own)
            row["hit_percent"] = 100 * sum(s["hit_tokens"] for s in own) / sum(s["query_tokens"] for s in own)
            found.append(row)
    return found


def consistent(samples: Sequence[Sample]) -> list[float]:
    """100 for every group whose items are all right, else 0."""
    groups: dict[str, float] = {}
    for sample in samples:
        groups[sample["group"]] = min(groups.get(sample["group"], 100.0), sample["accuracy"])
    return [100.0 * (worst == 100.0) for worst in groups.values()]


def divergence(uncached: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL of two distributions of the next token in nats, from the log-probabilities of some tokens.

    What not both list counts as one more token, so this is the divergence itself where both list the whole vocabulary,
    and else a lower bound of it.
    """
    common = uncached.keys() & other.keys()
    found = sum(math.exp(uncached[token]) * (uncached[token] - other[token]) for token in common)
    rest, others_rest = (max(0.0, 1 - sum(math.exp(p[token]) for token in common)) for p in (uncached, other))
    if rest > 1e-6:
        found += rest * math.log(rest / max(others_rest, 1e-6))
    return max(0.0, found)


def _estimate(row: Row, key: str, scores: Sequence[float], seed: int, intervals: bool) -> None:
    row[key] = sum(scores) / len(scores)
    if intervals:
        estimate = bootstrap_mean(scores, seed=seed)
        row[f"{key}_ci"] = [estimate.low, estimate.high]


def _compare(row: Row, key: str, own: Sequence[float], base: Sequence[float], seed: int, intervals: bool) -> None:
    row[f"{key}_vs_uncached"] = sum(a - b for a, b in zip(own, base, strict=True)) / len(own)
    if intervals:
        estimate = paired_bootstrap(own, base, seed=seed)
        row[f"{key}_vs_uncached_ci"] = [estimate.low, estimate.high]
        if key == "accuracy":
            row["accuracy_p_value"] = mcnemar_exact(own, base).p_value
