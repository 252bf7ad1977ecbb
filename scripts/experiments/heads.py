"""How many more requests does a pool admit when each layer and head gives back what it does not keep?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import build, report
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Heads
from octavo.scripts.tasks.items import code_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core import Engine
    from octavo.core.interfaces import SparseMethod

Row = dict[str, Any]

DENSE = "dense"

NOTES = (
    "All requests wait from the start, on prompts of real code that share nothing. A prompt is computed densely, one "
    "after another, so one request holds all its pages; decoding ones hold what their method keeps.",
    "decoding at once: requests that were past their prompt, the most in any step, and the mean over the steps in "
    "which some had not begun.",
    "units a request: held by all, less what the prompt in work holds, for each that decodes, where most did. Used: of "
    "the runs of split units, those that hold something.",
)


def run(config: Heads, run: Run) -> None:
    """One sample and one row a method, each on an engine of its own with the same pool and requests."""
    methods = build.methods(config.sparse)
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
    prompts = _prompts(config, tokenizer)
    engines = {name: _engine(config, model, method) for name, method in methods.items()}
    maps = []
    done = run.done("item", "method")
    with counting(config.experiment, len(methods), len(done)) as advance:
        for name in methods:
            if ("requests", name) in done:
                continue
            engine = engines.pop(name)
            if config.page_map:
                engine.watch = PageWatch()
                maps.append((name, engine.watch))
            sample = measure(engine, prompts, config.new_tokens)
            run.add({"item": "requests", "method": name, "pool_requests": config.pool_requests, **sample})
            run.write_rows(rows(run.samples))
            advance(f"{name}: {sample['decoding_peak']} at once")
    found = rows(run.samples)
    for row in found:
        line = f"{row['method']}: {row['decoding_peak']} requests decode at once in a pool for {config.pool_requests}"
        console.print(line, style="bold", markup=False, highlight=False)
    report.publish(run, config, found, plots={"heads": figure(run.samples)}, notes=NOTES, maps=maps)


def measure(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
    """Serve all prompts at once, and look at who decodes and what is held after every step."""
    from octavo.core import SamplingParams

    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    for prompt in prompts:
        engine.submit(list(prompt), params)
    decoding, held, used, begun = [], [], [], []
    while engine.has_work():
        engine.step()
        running = engine._scheduler.running
        past = [s for s in running if s.computed >= len(s.request.prompt)]
        computing = sum(len(s.held) for s in running if s.computed < len(s.request.prompt))
        split = engine._compaction.split
        decoding.append(len(past))
        held.append((engine._pool.held_units - computing) / max(1, len(past)))
        used.append(float(split.used_share(split.units).mean()) if len(split.units) else 1.0)
        begun.append(bool(engine._scheduler.waiting))
    engine.check()
    most = decoding.index(max(decoding))
    waiting_steps = [count for count, others in zip(decoding, begun, strict=True) if others]
    stats = engine.stats()
    return {
        "requests": len(prompts),
        "prompt_tokens": len(prompts[0]),
        "new_tokens": new_tokens,
        "pool_units": stats.units_total,
        "decoding": decoding,
        "decoding_peak": decoding[most],
        "decoding_mean": sum(waiting_steps) / len(waiting_steps) if waiting_steps else float(decoding[most]),
        "units_per_request": held[most],
        "runs_used_percent": 100.0 * used[most],
        "units_held_peak": stats.units_held_peak,
        "preemptions": stats.preemptions,
        "steps": stats.steps,
    }


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a method; ``admission_ratio`` compares with dense, where that has run."""
    dense = next((sample for sample in samples if sample["method"] == DENSE), None)
    shown = (
        "requests", "prompt_tokens", "new_tokens", "pool_units", "decoding_peak", "decoding_mean", "units_per_request",
        "runs_used_percent", "units_held_peak", "preemptions", "steps",
    )  # fmt: skip
    found = []
    for sample in samples:
        row: Row = {"name": "octavo", "method": sample["method"], "task": "admission"}
        row |= {key: sample[key] for key in shown}
        if dense is not None:
            row["admission_ratio"] = sample["decoding_peak"] / dense["decoding_peak"]
            row["steps_ratio"] = sample["steps"] / dense["steps"]
        found.append(row)
    return found


def figure(samples: Sequence[Mapping[str, Any]]) -> Figure:
    """Requests that decode, by step, a line a method."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7, 4), layout="constrained")
    axes = drawn.subplots()
    for sample in samples:
        axes.plot(sample["decoding"], label=sample["method"])
    axes.set(xlabel="step", ylabel="requests that decode", ylim=(0, None))
    axes.legend(fontsize="small")
    return drawn


def _engine(config: Heads, model: Any, method: SparseMethod | None) -> Engine:
    """An engine whose pool holds so many dense requests.

    Raises:
        ConfigError: a method cannot serve the model, or a request is too long.
    """
    from octavo.core import Engine

    settings = build.engine_config(config.engine)
    page = settings.text_page_tokens
    pages = config.pool_requests * -(-(config.prompt_tokens + config.new_tokens) // page)
    try:
        engine = Engine(model, None, dataclasses.replace(settings, pool_tokens=pages * page), method=method)
    except ValueError as error:
        raise ConfigError(f"method {getattr(method, 'name', DENSE)}: {error}") from error
    if config.prompt_tokens + config.new_tokens > engine.max_model_tokens:
        raise ConfigError(
            f"prompt_tokens={config.prompt_tokens} and new_tokens={config.new_tokens}: the model's sequences have at "
            f"most {engine.max_model_tokens} tokens"
        )
    return engine


def _prompts(config: Heads, tokenizer: Any) -> list[list[int]]:
    count = min(config.requests, config.limit or config.requests)
    text = code_tokens(tokenizer, count * config.prompt_tokens, config.seed)
    return [text[at * config.prompt_tokens : (at + 1) * config.prompt_tokens] for at in range(count)]
