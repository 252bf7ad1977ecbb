"""A batch as texts, through all stages of serving: what each takes, and what threads beside the steps bring."""

from __future__ import annotations

import dataclasses
from statistics import median
from typing import TYPE_CHECKING, Any

from octavo.core import SamplingParams
from octavo.core.inspection.stage_clock import StageClock
from octavo.scripts import build
from octavo.scripts.progress import waiting
from octavo.scripts.workloads import Workload

if TYPE_CHECKING:
    from octavo.core import Engine
    from octavo.scripts.schema import Throughput

SPARE = 1.25
"""Slots next to those of the workload: a text may have more tokens than the piece of text that it was cut from."""

NOTE = (
    "As texts: the workload's prompts as strings, tokenised and detokenised, with engine.host_threads and without, in "
    "turns. Shares are of the time of a pass with threads: stages overlap, so they may add up to more than 100 %. "
    "compute: forward passes, on a CPU the device's busy share; of replayed steps their launch, and wait is what the "
    "host then waits for their tokens. On CUDA profile=true has the device's busy share."
)


def text_columns(config: Throughput, model: Any, tokenizer: Any, workload: Workload) -> dict[str, float]:
    """What the passes add to octavo's row: new tokens a second with threads and in one, and the share of each stage."""
    texts = [tokenizer.decode(prompt) for prompt in workload.prompts]
    engines = {threads: _engine(config, model, tokenizer, workload, threads) for threads in {0, _threads(config)}}
    clocks: dict[int, list[StageClock]] = {threads: [] for threads in engines}
    with waiting(f"{workload.name}: as texts, with threads and without"):
        for number in range(config.repeats + 1):  # the first warms up
            for threads, engine in engines.items():
                clock = _pass(engine, texts, workload)
                clocks[threads] += [clock] * (number > 0)
    with_threads, alone = clocks[_threads(config)], clocks[0]
    ratios = [one.wall_s / other.wall_s for one, other in zip(alone, with_threads, strict=True)]
    return {
        "text_tokens_per_s": workload.total_new / median(clock.wall_s for clock in with_threads),
        "text_tokens_per_s_one_thread": workload.total_new / median(clock.wall_s for clock in alone),
        "text_threads_ratio": median(ratios),
        **{f"{stage}_percent": median(c.percent(stage) for c in with_threads) for stage in StageClock.STAGES},
    }


def _threads(config: Throughput) -> int:
    return config.engine.host_threads


def _engine(config: Throughput, model: Any, tokenizer: Any, workload: Workload, threads: int) -> Engine:
    page_tokens = build.engine_config(config.engine).text_page_tokens
    slots = int(SPARE * workload.slots(page_tokens, config.engine.max_seqs))
    pool_tokens = config.engine.pool_tokens or slots
    settings = dataclasses.replace(config.engine, pool_tokens=pool_tokens, host_threads=threads)
    return build.engine(dataclasses.replace(config, engine=settings), model, tokenizer)


def _pass(engine: Engine, texts: list[str], workload: Workload) -> StageClock:
    """All texts from first to last."""
    params = [SamplingParams(max_tokens=new, ignore_eos=True) for new in workload.new_tokens]
    with StageClock(engine).running() as clock:
        completions = engine.generate(texts, params)
    found = [len(completion.samples[0].token_ids) for completion in completions]
    assert found == list(workload.new_tokens), "a request was cut short"
    return clock
