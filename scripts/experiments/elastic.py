"""What does a pool that grows and shrinks cost, and what does it give back, next to one allocation of everything?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from octavo.scripts import build, report
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Elastic

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from octavo.core.memory.elastic import PoolMemory
    from octavo.core.memory.growth import PoolSteps

Row = dict[str, Any]

MIB = 1 << 20
WHOLE = "one_allocation"
STEPS = 60
"""Of a run: two waves."""

NOTES = (
    "Demand rises from 30 % of the pool to all of it and falls back, twice; every unit that is asked for is written, "
    "and what is not needed is given back at once. Base and growth steps are whole pages of the model.",
    "Committed is what is really taken: mapped memory on CUDA, resident memory on a CPU, where growing is bookkeeping: "
    "the system commits memory when it is first written.",
)


def run(config: Elastic, run: Run) -> None:
    """One sample a pool and round; one row a pool. The pools, one a chunk size and one that takes everything at once,
    take turns.

    A run asks for memory in waves (``demand``). At each of its steps:

        grow the pool to the units that are needed; write those that were not there a step before
        shrink it to the units that are needed
        note what is committed
    """
    with waiting(f"loading {config.model.path}"):
        shape, dtype, device, pools = _pools(config)
    done = run.done("item", "round")
    turns = [(name, number) for number in range(config.repeats) for name in pools]
    with counting(config.experiment, len(turns), len(turns) - len(set(turns) - done)) as advance:
        for name, number in turns:
            if (name, number) in done:
                continue
            sample = {"item": name, "round": number, **_wave(shape, dtype, device, pools[name])}
            run.add(sample)
            run.write_rows(rows(run.samples))
            advance(f"{name}: {report.format_bytes(fmean(sample['committed_bytes']))} committed on average")

    found = rows(run.samples)
    for line in _findings(found):
        console.print(line, style="bold", markup=False, highlight=False)
    report.publish(run, config, found, plots={"elastic": figure(run.samples)}, notes=(*NOTES, *_fallbacks(run.samples)))


def demand(most: int) -> list[int]:
    """Units that are needed at each step: from 30 % up to all and back, twice."""
    return [math.ceil(most * (0.3 + 0.7 * abs(math.sin(2 * math.pi * step / STEPS)))) for step in range(STEPS + 1)]


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a pool: medians and maxima in microseconds over all calls that changed the pool, bytes over all steps.

    ``committed_ratio`` is the mean of the committed bytes over that of the bytes that were needed.
    """
    found = []
    for name in dict.fromkeys(sample["item"] for sample in samples):
        own = [sample for sample in samples if sample["item"] == name]
        committed = [count for sample in own for count in sample["committed_bytes"]]
        needed = [count for sample in own for count in sample["needed_bytes"]]
        row: Row = {
            "name": WHOLE if name == WHOLE else "octavo",
            "chunk_bytes": None if name == WHOLE else own[0]["chunk_bytes"],
            "base_bytes": own[0]["base_bytes"],
            "pool_bytes": own[0]["pool_bytes"],
            "rounds": len(own),
            "start_us": median(sample["start_us"] for sample in own),
        }
        for call in ("grow", "shrink"):
            taken = [us for sample in own for us in sample[f"{call}_us"]]
            row |= {f"{call}_calls": len(taken)}
            row |= {f"{call}_us": median(taken) if taken else None, f"{call}_us_max": max(taken, default=None)}
        row |= {
            "committed_bytes_mean": fmean(committed),
            "committed_bytes_min": min(committed),
            "committed_bytes_max": max(committed),
            "committed_ratio": fmean(committed) / fmean(needed),
            "elastic": own[0]["reason"] is None,
        }
        found.append(row)
    return found


def figure(samples: Sequence[Sample]) -> Figure:
    """Left: committed and needed memory over the first round of each pool. Right: the time of a growth; the whisker
    reaches to the slowest."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 4), layout="constrained")
    over_time, calls = drawn.subplots(1, 2, width_ratios=(2, 1))
    first = [sample for sample in samples if sample["round"] == 0]
    for sample in first:
        megabytes = [count / 1e6 for count in sample["committed_bytes"]]
        over_time.step(range(len(megabytes)), megabytes, where="post", label=_label(sample))
    needed = [count / 1e6 for count in first[0]["needed_bytes"]]
    over_time.step(range(len(needed)), needed, where="post", color="black", linestyle=":", label="needed")
    over_time.set_xlabel("step")
    over_time.set_ylabel("MB committed")
    over_time.set_ylim(bottom=0)
    over_time.legend(fontsize="small", loc="lower right")
    growing = [sample for sample in first if sample["grow_us"]]
    for number, sample in enumerate(growing):
        taken = [us for s in samples if s["item"] == sample["item"] for us in s["grow_us"]]
        middle = median(taken)
        calls.bar(number, middle, yerr=[[0], [max(taken) - middle]], capsize=4)
    calls.set_xticks(range(len(growing)), [report.format_bytes(sample["chunk_bytes"]) for sample in growing])
    calls.set_xlabel("growth step")
    calls.set_ylabel("microseconds a growth")
    return drawn


def _pools(config: Elastic) -> tuple[tuple[int, ...], torch.dtype, torch.device, dict[str, PoolSteps]]:
    """Shape, type and device of the model's units, and the steps of every pool by its name.

    Raises:
        ConfigError: the pool is smaller than a page of the model.
    """
    from octavo.core import sizing
    from octavo.core.hf_model import HFModel
    from octavo.core.memory.growth import Growth, PoolSteps
    from octavo.kernels.layout import pool_shape

    engine = build.engine_config(config.engine)
    model = HFModel(build.load_model(config.model)[0])
    spec, unit_tokens, page_tokens = model.spec, engine.unit_tokens, engine.text_page_tokens
    dtype = sizing.kv_dtype(engine, spec)
    page_bytes = page_tokens * spec.kv_bytes_per_token(dtype.itemsize)
    pages = config.pool_mib * MIB // page_bytes
    if pages < 1:
        raise ConfigError(f"pool_mib={config.pool_mib}: less than a page of this model, which takes {page_bytes} bytes")
    page = {"page_units": page_tokens // unit_tokens, "page_tokens": page_tokens, "page_bytes": page_bytes}
    steps = {}
    for size in config.chunk_mib[: config.limit]:
        chunk_tokens = max(size * MIB // page_bytes, 1) * page_tokens
        steps[f"chunks of {size} MiB"] = Growth(config.base_share, chunk_tokens).steps(pages, **page)
    most = pages * page["page_units"]
    steps[WHOLE] = PoolSteps(most, most, most)
    shape = pool_shape(1, spec.layers, spec.kv_heads, unit_tokens, spec.head_dim)[1:]
    return shape, dtype, model.device, steps


def _wave(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, steps: PoolSteps) -> dict[str, Any]:
    """One pool's way through the waves."""
    from octavo.core.memory.elastic import pool_memory

    start_us, memory = _timed(device, lambda: pool_memory(shape, dtype, device, **steps._asdict()))
    with closing(memory):
        unit_bytes = memory.tensor[0].nbytes
        needed = demand(steps.max_units)
        taken: dict[str, list[float]] = {"grow": [], "shrink": []}
        committed = []
        for before, units in zip([0, *needed], needed, strict=False):
            _change(memory, "grow", units, device, taken)
            memory.tensor[before + 1 : units + 1] = 1
            _change(memory, "shrink", units, device, taken)
            committed.append(memory.committed_bytes)
        return {
            "chunk_bytes": steps.chunk_units * unit_bytes,
            "base_bytes": steps.base_units * unit_bytes,
            "pool_bytes": steps.max_units * unit_bytes,
            "start_us": start_us,
            "grow_us": taken["grow"],
            "shrink_us": taken["shrink"],
            "needed_bytes": [units * unit_bytes for units in needed],
            "committed_bytes": committed,
            "reason": memory.reason,
        }


def _change(memory: PoolMemory, call: str, units: int, device: torch.device, taken: dict[str, list[float]]) -> None:
    """Grow or shrink; calls that change nothing are not counted."""
    before = memory.units
    us, after = _timed(device, lambda: getattr(memory, call)(units))
    if after != before:
        taken[call].append(us)


def _timed(device: torch.device, call: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds on the host's clock, the device being idle before, and what the call returned."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    result = call()
    return (time.perf_counter() - begin) * 1e6, result


def _label(sample: Sample) -> str:
    return str(sample["item"]).replace("_", " ")


def _findings(found: Sequence[Row]) -> Iterator[str]:
    """What a reader wants to know first."""
    whole = next(row for row in found if row["name"] == WHOLE)
    for row in found:
        if row is not whole:
            share = 100 * row["committed_bytes_mean"] / whole["committed_bytes_mean"]
            grown = "never grew" if row["grow_us"] is None else f"a growth takes {row['grow_us'] / 1e3:.3f} ms"
            yield (
                f"chunks of {report.format_bytes(row['chunk_bytes'])}: {grown}, {share:.0f} % of the memory of one "
                "allocation on average"
            )


def _fallbacks(samples: Sequence[Sample]) -> list[str]:
    reasons = dict.fromkeys(sample["reason"] for sample in samples if sample["reason"])
    return [f"Not elastic here, everything was allocated at once: {reason}." for reason in reasons]
