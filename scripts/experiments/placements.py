"""One selection, several placements: the same tokens, and what each of them holds where."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.scripts import build, hosted_runs, model_shapes, report
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Placements

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

NOTES = (
    "All requests wait from the start, in a pool with room for pool_requests of them whole. at once: the most that ran "
    "together.",
    "same tokens: requests whose tokens are those of the placement resident, which keeps all pages in the pool. Bits "
    "are the same for one batch; others that run beside a request may turn a near tie.",
    "KV held while decoding: bytes of the pool, and of pinned host pages, before the first request ends.",
)


def run(config: Placements, run: Run) -> None:
    """One sample and one row a placement, each with an engine of its own and the same prompts."""
    model, asked = _model_and_prompts(config)
    done = run.done("placement")
    with counting(config.experiment, len(config.placements), len(done)) as advance:
        for placement in config.placements:
            if (placement,) in done:
                continue
            sample = measure(config, model, asked, placement)
            run.add({"item": "all", "placement": placement, **sample})
            run.write_rows(rows(run.samples))
            advance(f"{placement}: {sample['running_peak']} of {len(asked)} at once, {sample['seconds']:.1f} s")

    found = rows(run.samples)
    for line in findings(found):
        console.print(line, style="bold", markup=False, highlight=False)
    report.publish(run, config, found, plots={"placements": figure(found)}, notes=NOTES)


def _model_and_prompts(config: Placements) -> tuple[Any, list[list[int]]]:
    if config.model.path is None:
        with waiting("making a model of random weights"):
            model = model_shapes.make(config.model)
        return model, hosted_runs.random_prompts(config, model.config.get_text_config().vocab_size)
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
    return model, hosted_runs.prompts(config, tokenizer)


def measure(config: Placements, model: Any, asked: Sequence[list[int]], placement: str) -> Sample:
    method, hosted = hosted_runs.resident(config), placement == "host"
    if hosted:
        method = dataclasses.replace(method, placement=hosted_runs.host(config, config.replacement, config.prefetch))
    page_tokens = config.engine.page_tokens
    engine = hosted_runs.engine(config, model, page_tokens, len(asked), config.pool_requests, hosted=hosted)
    return hosted_runs.serve(engine, asked, method, config.new_tokens)


def rows(samples: Sequence[Sample]) -> list[Row]:
    base = next((sample for sample in samples if sample["placement"] == "resident"), None)
    found = []
    for sample in samples:
        row: Row = {
            "name": "octavo",
            "policy": sample["placement"],
            "requests": len(sample["tokens"]),
            "running_peak": sample["running_peak"],
            "preemptions": sample["preemptions"],
            "kv_bytes_held_decoding": sample["units_held_decoding"] * sample["unit_bytes"],
            "host_bytes_held_decoding": sample["host_units_pinned"] * sample["unit_bytes"],
            "kv_bytes_per_token": sample["kv_bytes_read"] / sample["decode_steps"],
            "fetched_bytes_per_token": sample["host_bytes_read"] / sample["decode_steps"],
            "tokens_per_s": sample["decoded_tokens"] / max(sample["decoding_seconds"], 1e-9),
            "waited_percent": 100 * sample["waited_seconds"] / max(sample["decoding_seconds"], 1e-9),
            "seconds": sample["seconds"],
        }
        if base is not None:
            pairs = list(zip(sample["tokens"], base["tokens"], strict=True))
            row["same_requests"] = sum(own == theirs for own, theirs in pairs)
        found.append(row)
    return found


def findings(found: Sequence[Row]) -> list[str]:
    return [
        f"{row['policy']}: {row['running_peak']} of {row['requests']} requests at once, "
        f"{report.format_bytes(row['kv_bytes_held_decoding'])} on the device and "
        f"{report.format_bytes(row['host_bytes_held_decoding'])} in host memory while decoding"
        + (f"; {row['same_requests']} write the tokens of resident" if "same_requests" in row else "")
        for row in found
    ]


def figure(found: Sequence[Row]) -> Figure:
    """Bytes on the device and in host memory, and requests at once, a bar a placement."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, 3.6), layout="constrained")
    memory, running = drawn.subplots(1, 2)
    names = [row["policy"] for row in found]
    device = [row["kv_bytes_held_decoding"] / 1e6 for row in found]
    memory.bar(names, device, label="device")
    memory.bar(names, [row["host_bytes_held_decoding"] / 1e6 for row in found], bottom=device, label="host")
    memory.set(ylabel="MB of KV while decoding")
    memory.legend(fontsize="small")
    running.bar(names, [row["running_peak"] for row in found])
    running.set(ylabel="requests at once")
    return drawn
