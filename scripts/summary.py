"""From samples to rows: every number of a row can be computed again from ``samples.jsonl`` alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.scripts.tasks.statistics import Estimate, bootstrap_mean, paired_bootstrap

Sample = Mapping[str, Any]

QUALITIES = ("accuracy", "exact_match", "edit_similarity", "identifier_exact_match", "identifier_f1", "acceptance")

_PROBED = ("page_recall", "captured_mass", "removal_error", "output_error")
"""What samples may have of ``octavo.sparse.probe``, a share a layer and KV head."""
_MEANS = ("prefill_captured_mass", "prefill_captured_mass_least", "prefill_output_error", "predicted_prefill_share")
"""What samples of a method with a prefill pattern say of it; a row has the mean."""

_BYTES = {
    "kv_bytes": "kv_bytes_read",
    "predicted_kv_bytes": "predicted_kv_bytes",
    "digest_bytes": "digest_bytes_read",
    "predicted_digest_bytes": "predicted_digest_bytes",
}
"""What a row gives a token: the key of a sample that has the sum."""


def rows(samples: Sequence[Sample], *, task: str, seed: int = 0, intervals: bool = True) -> list[dict[str, Any]]:
    """One row a method, in the order of the samples.

    Qualities are means over items, in points, with 95 % bootstrap intervals over items in ``<key>_ci``.
    ``perplexity`` is that of the gold line: the exponential of minus the mean over items of
    ``gold_log_likelihood_per_token`` (natural logarithm). ``<key>_vs_dense`` is the mean paired difference to dense
    over the items that both have. ``seconds`` add up, item by item, the time from handing in to the finished line; the
    methods of an item run in one batch, so their times overlap, and the peaks are of the batch. ``resident_bytes`` is
    the mean of what K, V and digests of a request take on the device at its end; ``extra_tokens_mean`` are the tokens
    that methods have computed for their decisions alone, where there are any. What choices left out is the mean over
    measured queries, layers and KV heads. A quality, or bytes, that samples of a method lack, its row lacks too.

    Args:
        intervals: False leaves out what needs resampling, for rows that are rewritten after every item.
    """
    good = [sample for sample in samples if "error" not in sample]
    methods = list(dict.fromkeys(sample["method"] for sample in good))
    by_method = {method: {s["item"]: s for s in good if s["method"] == method} for method in methods}
    dense = by_method.get("dense", {})
    found = []
    for method, own in by_method.items():
        failed = sum("error" in sample and sample["method"] == method for sample in samples)
        row: dict[str, Any] = {"name": "octavo", "method": method, "task": task, "items": len(own), "failed": failed}
        paired = [item for item in own if item in dense and method != "dense"]
        for key in [key for key in QUALITIES if all(key in sample for sample in own.values())]:
            _estimate(row, key, [sample[key] for sample in own.values()], seed, intervals)
            if paired and all(key in dense[item] for item in paired):
                _compare(row, key, [own[i][key] for i in paired], [dense[i][key] for i in paired], seed, intervals)
        if all("gold_logprobs" in sample for sample in own.values()):
            likelihood = [_per_token(sample) for sample in own.values()]
            _estimate(row, "gold_log_likelihood_per_token", likelihood, seed, intervals)
            if paired:
                pair = [_per_token(own[i]) for i in paired], [_per_token(dense[i]) for i in paired]
                _compare(row, "gold_log_likelihood_per_token", *pair, seed, intervals)
            row["perplexity"] = _exp(-row["gold_log_likelihood_per_token"])
            if intervals:
                low, high = row["gold_log_likelihood_per_token_ci"]
                row["perplexity_ci"] = [_exp(-high), _exp(-low)]
        for key in [key for key in _MEANS if all(key in sample for sample in own.values())]:
            row[key] = sum(sample[key] for sample in own.values()) / len(own)
        row.update(_costs(list(own.values())))
        row.update(_probed([sample["probe"] for sample in own.values() if sample.get("probe")]))
        found.append(row)
    return found


def _costs(samples: Sequence[Sample]) -> dict[str, Any]:
    def total(key: str) -> float:
        return float(sum(sample[key] for sample in samples))

    steps, tokens, seconds = total("decode_steps"), total("new_tokens"), total("seconds")
    known = {name: key for name, key in _BYTES.items() if all(key in sample for sample in samples)}
    budgeted = all("budget_tokens" in sample for sample in samples)
    resident = all({"kv_bytes_resident", "digest_bytes_resident"} <= sample.keys() for sample in samples)
    extra = sum(sample.get("extra_tokens", 0) for sample in samples)
    held = total("kv_bytes_resident") + total("digest_bytes_resident") if resident else 0.0
    return {
        **{f"{name}_per_token": total(key) / steps if steps else None for name, key in known.items()},
        **({"budget_tokens": total("budget_tokens") / len(samples)} if budgeted else {}),
        **({"resident_bytes": held / len(samples)} if resident else {}),
        **({"extra_tokens_mean": extra / len(samples)} if extra else {}),
        "units_held_peak": max(sample["units_held_peak"] for sample in samples),
        "device_bytes_peak": max(sample["device_bytes_peak"] for sample in samples),
        "prompt_tokens_mean": total("prompt_tokens") / len(samples),
        "new_tokens": int(tokens),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if seconds else None,
    }


def _probed(probes: Sequence[Sample]) -> dict[str, Any]:
    """Means in percent, and what measuring took."""
    queries = sum(sum(probe["rows"]) for probe in probes)
    if not queries:
        return {}
    means = {}
    for name in _PROBED:
        layers = [(rows, heads) for p in probes for rows, heads in zip(p["rows"], p[name], strict=True) if rows]
        means[f"{name}_percent"] = 100 * sum(rows * sum(heads) / len(heads) for rows, heads in layers) / queries
    return {
        **means,
        "probed_queries": queries,
        "probe_seconds": sum(probe["seconds"] for probe in probes),
        "probe_bytes": sum(probe["bytes_read"] for probe in probes),
    }


def _estimate(row: dict[str, Any], key: str, scores: Sequence[float], seed: int, intervals: bool) -> None:
    if intervals:
        estimate = bootstrap_mean(scores, seed=seed)
        _put(row, key, estimate)
    else:
        row[key] = sum(scores) / len(scores)


def _compare(
    row: dict[str, Any], key: str, own: Sequence[float], dense: Sequence[float], seed: int, intervals: bool
) -> None:
    if intervals:
        _put(row, f"{key}_vs_dense", paired_bootstrap(own, dense, seed=seed))
    else:
        row[f"{key}_vs_dense"] = sum(a - b for a, b in zip(own, dense, strict=True)) / len(own)


def _put(row: dict[str, Any], key: str, estimate: Estimate) -> None:
    row[key] = estimate.mean
    row[f"{key}_ci"] = [estimate.low, estimate.high]


def _per_token(sample: Sample) -> float:
    logprobs: list[float] = sample["gold_logprobs"]
    return sum(logprobs) / len(logprobs)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
