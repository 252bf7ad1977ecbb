"""What the experiments on quality over long contexts share: the costs of a sample, and the way through the items."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.scripts import build, summary
from octavo.scripts.instruments import Instruments
from octavo.scripts.progress import counting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample

if TYPE_CHECKING:
    from octavo.core import Completion, Engine
    from octavo.core.inspection.pattern_watch import PatternWatch
    from octavo.core.interfaces import SparseMethod
    from octavo.scripts.schema import Config

Methods = Mapping[str, "SparseMethod | None"]
Rows = Callable[[Sequence[Sample], bool], list[dict[str, Any]]]


def work_through(
    config: Config,
    run: Run,
    items: Mapping[str, Mapping[str, Any]],
    methods: Methods,
    measure: Callable[[str, Methods], list[Sample]],
    rows: Rows,
    tools: Instruments | None = None,
) -> list[dict[str, Any]]:
    """One sample an item and method, or more: those that an earlier process left are not made again. An item that
    cannot be served is recorded with its error, and the rest goes on.

    Args:
        items: by id, what every sample of an item says.
        measure: samples of an item under some of the methods.
        rows: of samples; the flag asks for intervals.
        tools: what they have measured of a method by the end of an item goes into its sample, and the final rows have
            the contexts from which methods pay.

    Returns:
        The final rows.

    Raises:
        ConfigError: no item could be served.
    """
    done = run.done("item", "method")
    left = {item: {name: m for name, m in methods.items() if (item, name) not in done} for item in items}
    todo = {item: missing for item, missing in left.items() if missing}
    with counting(config.experiment, len(items), len(items) - len(todo)) as advance:
        for item, missing in todo.items():
            start = time.perf_counter()
            about = {"item": item, **items[item]}
            try:
                samples = [{**about, **sample} for sample in measure(item, missing)]
                if tools is not None:
                    samples = [{**sample, **tools.taken(missing[sample["method"]])} for sample in samples]
            except ValueError as error:
                samples = [{**about, "method": name, "error": str(error)} for name in missing]
            for sample in samples:
                run.add(sample)
            run.write_rows(rows(run.samples, False))
            run.tracker.log(len(run.done("item")) - 1, {sample["method"]: _tracked(sample) for sample in samples})
            advance(_line(item, samples, time.perf_counter() - start))
    if all("error" in sample for sample in run.samples):
        raise ConfigError(f"none of the {len(items)} items could be served: {run.samples[0]['error']}")
    final = rows(run.samples, True)
    return final if tools is None else tools.rows(final, methods)


def grouped_rows(samples: Sequence[Sample], keys: Sequence[str], seed: int, intervals: bool) -> list[dict[str, Any]]:
    """``summary.rows`` of each group of samples that agree in ``keys``, the first of which is the task."""
    groups = dict.fromkeys(tuple(sample[key] for key in keys) for sample in samples)
    found = []
    for group in groups:
        members = [sample for sample in samples if tuple(sample[key] for key in keys) == group]
        named = dict(zip(keys, group, strict=True))
        for row in summary.rows(members, task=str(group[0]), seed=seed, intervals=intervals):
            found.append({**row, **named})
    return found


def generated(engine: Engine, completion: Completion, seconds: float) -> Sample:
    """What a sample says of an answer that was decoded."""
    sample = completion.samples[0]
    return {
        "prompt_tokens": len(completion.prompt_token_ids),
        "cached_tokens": completion.cached_tokens,
        "output": sample.text,
        "new_tokens": len(sample.token_ids),
        "decode_steps": sample.decode_steps,
        "kv_bytes_read": sample.kv_bytes_read,
        "digest_bytes_read": sample.digest_bytes_read,
        "extra_tokens": sample.extra_tokens,
        "kv_bytes_resident": sample.kv_bytes_resident,
        **_peaks(engine, seconds),
    }


def forced(
    engine: Engine,
    method: SparseMethod | None,
    prompt_tokens: int,
    new_tokens: int,
    times: int = 1,
    *,
    seconds: float,
) -> Sample:
    """What a sample says of given tokens that were scored after a prompt, ``times`` over. The engine does not count
    their bytes; they are predicted."""
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": times * new_tokens,
        "decode_steps": times * (new_tokens - 1),
        **predicted(engine, method, prompt_tokens, new_tokens, times),
        **_peaks(engine, seconds),
    }


def predicted(
    engine: Engine,
    method: SparseMethod | None,
    prompt_tokens: int,
    new_tokens: int,
    times: int = 1,
    *,
    unseen_tokens: int = 0,
) -> Sample:
    """The bytes that decoding or scoring so many tokens after a prompt reads, and those of the digests that are there
    at its end, in closed form."""
    cost = build.predicted_cost(engine, method, prompt_tokens, new_tokens, unseen_tokens)
    return {
        "predicted_kv_bytes": times * cost.kv_bytes,
        "predicted_digest_bytes": times * cost.digest_bytes,
        "digest_bytes_resident": build.digest_bytes(engine, method, prompt_tokens + new_tokens - 1),
        **build.budget_of(method),
    }


def prefilled(engine: Engine, method: SparseMethod | None, watch: PatternWatch, prompt_tokens: int) -> Sample:
    """What a prefill pattern captured, if the method has one, and the share of pages that it is predicted to read, at
    most, of those that dense blocks would read."""
    from octavo.core import sizing
    from octavo.core.inspection.prefill_cost import predict_prefill

    pattern = getattr(method, "prefill", None)
    if pattern is None:
        return {}
    cost = predict_prefill(
        engine.spec,
        pattern,
        prompt_tokens=prompt_tokens,
        page_tokens=engine.config.text_page_tokens,
        itemsize=sizing.kv_dtype(engine.config, engine.spec).itemsize,
    )
    share = cost.kv_bytes / cost.dense_kv_bytes if cost.dense_kv_bytes else 1.0
    return {**watch.facts(pattern), "predicted_prefill_share": share}


def refuse_longer(key: str, tokens: int, engine: Engine) -> None:
    """Raises ConfigError if the engine's sequences cannot have so many tokens."""
    if tokens > engine.max_model_tokens:
        raise ConfigError(f"{key}={tokens}: the engine's sequences have at most {engine.max_model_tokens} tokens")


def refuse_without_template(tokenizer: Any, chat: bool) -> None:
    """Raises ConfigError if a chat template is wanted and there is none."""
    if chat and not getattr(tokenizer, "chat_template", None):
        raise ConfigError("chat=true: this model's tokenizer has no chat template; give chat=false")


def _peaks(engine: Engine, seconds: float) -> Sample:
    """The peaks are of the engine's whole life, and the seconds of the batch."""
    stats = engine.stats()
    return {
        "units_held_peak": stats.units_held_peak,
        "device_bytes_peak": stats.device_bytes_peak,
        "seconds": seconds,
    }


def _line(item: str, samples: Sequence[Sample], seconds: float) -> str:
    if "error" in samples[0]:
        return f"{item}: {samples[0]['error']}"
    shown = "  ".join(f"{sample['method']} {_quality(sample)}" for sample in samples)
    return f"{item} ({samples[0]['prompt_tokens']} tokens, {seconds:.1f} s)  {shown}"


def _quality(sample: Sample) -> str:
    if "acceptance" in sample:
        return f"{sample['acceptance']:.0f}"
    if "jaccard_percent" in sample:
        return f"{sample['jaccard_percent']:.0f}"
    if "gold_logprobs" not in sample and "accuracy" not in sample:
        return ""
    return f"{sample['accuracy']:.0f}" if "accuracy" in sample else f"{_log_likelihood(sample):.2f}"


def _tracked(sample: Sample) -> Sample:
    """Numbers of a sample that are worth a curve."""
    if "error" in sample:
        return {"failed": 1}
    tracked = {key: sample[key] for key in ("accuracy", "acceptance") if key in sample}
    if "gold_logprobs" in sample:
        tracked["gold_log_likelihood_per_token"] = _log_likelihood(sample)
    return tracked


def _log_likelihood(sample: Sample) -> float:
    """A token, in nats."""
    return float(sum(sample["gold_logprobs"]) / len(sample["gold_logprobs"]))
