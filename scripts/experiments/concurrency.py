"""How many requests run at once in the same memory, with contiguous reservations and with pages?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core.policies import ALLOCATORS
from octavo.scripts import report
from octavo.scripts.arrivals import mix
from octavo.scripts.backlog import Asked, Memory, Pages, Reservations, serve
from octavo.scripts.progress import console, counting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.reservations import RULES
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Concurrency

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

LONGEST = "longest"
PAGED = "paged"

NOTES = (
    "All requests wait from the start; figures are means over the steps in which some still wait. A step gives every "
    "running request a token.",
    "memory used: slots that tokens are in, of all slots. contiguous servers reserve as in experiment=fragmentation.",
    "With pages, a request that finds no page takes those of the one that began last, which is preempted.",
)


def run(config: Concurrency, run: Run) -> None:
    """One sample and one row a mix of lengths, memory and way to hold it."""
    done = run.done("item", "memory_tokens", "policy")
    sizes = config.memory_tokens[: config.limit]
    ways = [*RULES, PAGED]
    with counting(config.experiment, len(config.mixes) * len(sizes) * len(ways), len(done)) as advance:
        for name in config.mixes:
            requests = backlog(name, config)
            for tokens in sizes:
                for policy in ways:
                    if (name, tokens, policy) in done:
                        continue
                    sample = measure(requests, memory(tokens, policy, config), config)
                    run.add({"item": name, "memory_tokens": tokens, "policy": policy, **sample})
                    run.write_rows(rows(run.samples))
                    advance(f"{name}, {tokens} slots, {policy}: {sample['running_mean']:.1f} at once")

    found = rows(run.samples)
    for line in findings(found):
        console.print(line, style="bold", markup=False, highlight=False)
    report.publish(run, config, found, plots={"concurrency": figure(found)}, notes=NOTES)


def backlog(name: str, config: Concurrency) -> list[Asked]:
    random = np.random.default_rng(config.seed)
    prompts, answers = (lengths.draw(random, config.requests).tolist() for lengths in mix(name, config.longest))
    return [Asked(*lengths) for lengths in zip(prompts, answers, strict=True)]


def memory(tokens: int, policy: str, config: Concurrency) -> Memory:
    if policy != PAGED:
        return Reservations(tokens, policy, config.longest)
    page_tokens = config.engine.page_tokens
    return Pages(ALLOCATORS[config.engine.allocator](-(-tokens // page_tokens)), page_tokens)


def measure(requests: Sequence[Asked], held: Memory, config: Concurrency) -> Sample:
    try:
        result = serve(requests, held, config.engine.max_seqs)
    except ValueError as error:
        raise ConfigError(f"requests={config.requests}: {error}") from error
    return {
        "page_tokens": config.engine.page_tokens if isinstance(held, Pages) else None,
        "requests": len(requests),
        "running_mean": result.running_mean,
        "running_peak": result.running_peak,
        "used_percent": 100 * result.used_share,
        "preemptions": result.preemptions,
        "steps": result.steps,
    }


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a sample; ``running_ratio`` compares with reservations for the longest request."""
    base = {(s["item"], s["memory_tokens"]): s["running_mean"] for s in samples if s["policy"] == LONGEST}
    return [
        {
            "name": "octavo" if s["policy"] == PAGED else "contiguous",
            "task": s["item"],
            "policy": s["policy"],
            **{key: s[key] for key in ("memory_tokens", "page_tokens", "requests", "running_mean", "running_peak")},
            "running_ratio": s["running_mean"] / base[s["item"], s["memory_tokens"]],
            **{key: s[key] for key in ("used_percent", "preemptions", "steps")},
        }
        for s in samples
    ]


def findings(found: Sequence[Row]) -> list[str]:
    lines = []
    for row in found:
        if row["policy"] == PAGED:
            where = row["task"], row["memory_tokens"]
            base = next(r for r in found if r["policy"] == LONGEST and (r["task"], r["memory_tokens"]) == where)
            lines.append(
                f"{row['task']}, {row['memory_tokens']:,} slots: {row['running_ratio']:.1f}x as many requests, memory "
                f"used {base['used_percent']:.0f} % -> {row['used_percent']:.0f} % (claimed: 3x, 61 % -> 94 %)"
            )
    return lines


def figure(found: Sequence[Row]) -> Figure:
    """Requests at once by memory, a panel a mix and a line a way to hold memory."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in found))
    drawn = Figure(figsize=(4.5 * len(tasks), 4), layout="constrained")
    for axes, task in zip(drawn.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for policy in dict.fromkeys(row["policy"] for row in found):
            own = [row for row in found if (row["task"], row["policy"]) == (task, policy)]
            line = sorted((row["memory_tokens"], row["running_mean"]) for row in own)
            axes.plot(*zip(*line, strict=True), "o-", label=policy)
        axes.set(title=task, xlabel="slots of memory", ylabel="requests at once", ylim=(0, None))
    drawn.axes[0].legend(fontsize="small")
    return drawn
