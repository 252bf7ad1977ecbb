"""How many tokens a second does a batch of requests get, next to other engines and to the floor of the hardware?"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from octavo.scripts import build, report, step_profile, workloads
from octavo.scripts.machine_load import busy_rounds, watch
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Throughput
from octavo.scripts.serving import Clock
from octavo.scripts.step_profile import Profile
from octavo.scripts.timed_requests import timed
from octavo.scripts.watched_pass import watched_pass
from octavo.scripts.workloads import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core.inspection.page_watch import PageWatch
    from octavo.scripts.rivals import Contender

log = logging.getLogger(__name__)

Row = dict[str, Any]

PROFILED_TOKENS = 48
WATCHED_TOKENS = 48

NOTES = (
    "tokens/s counts the new tokens that requests asked for; medians over the rounds, in which contenders take turns.",
    "linears is the time of the model's Linear layers alone at the same shapes: a floor, on a quiet machine.",
)


def run(config: Throughput, run: Run) -> None:
    """One sample a workload, round and contender; one row a workload and contender.

    For each workload: every contender is warmed up, then they take turns, round after round, in one process, so that
    what disturbs the machine disturbs all. The load is noted before each round.
    """
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
    loads = [workloads.build(name, tokenizer, config.seed, config.limit) for name in config.workloads]
    for workload in loads:
        workloads.refuse_too_long(workload, model)

    notes: list[str] = []
    done = run.done("item", "round", "name")
    rounds = [(workload, number) for workload in loads for number in range(config.repeats)]
    with counting(config.experiment, len(rounds), 0) as advance:
        for workload in loads:
            for line in _race(config, run, model, workload, done, notes):
                run.write_rows(rows(run.samples))
                advance(line)
    found = rows(run.samples)
    if config.profile:
        profile = _profile(config, run, model, loads[0])
        notes += profile.notes
        for row in found:
            if (row["task"], row["name"]) == (loads[0].name, "octavo"):
                row.update(profile.columns)

    if config.text:
        from octavo.scripts.text_stages import NOTE, text_columns

        notes.append(NOTE)
        for workload in loads:
            columns = text_columns(config, model, tokenizer, workload)
            next(row for row in found if (row["task"], row["name"]) == (workload.name, "octavo")).update(columns)

    maps = [_map(config, model, loads[-1])] if config.page_map else []

    notes += busy_rounds(run.samples, "item", "round")
    for line in _ratios(found):
        console.print(line, style="bold", markup=False, highlight=False)
    notes = [*NOTES, *dict.fromkeys(notes)]
    report.publish(run, config, found, plots={"throughput": bars(found)}, notes=notes, maps=maps)


def _race(
    config: Throughput, run: Run, model: Any, workload: Workload, done: set[tuple[Any, ...]], notes: list[str]
) -> Iterable[str]:
    """All rounds of a workload. A round that an interrupted run has finished is not run again."""
    from octavo.scripts.rivals import line_up

    contenders, absent = line_up(config, model, workload)
    notes += absent
    left = [n for n in range(config.repeats) if any((workload.name, n, c.name) not in done for c in contenders)]
    if left:
        with waiting(f"{workload.name}: warming up"):
            for contender in contenders:
                contender.run(workloads.warm_up(workload, model))
            build.spare_collections()
    for number in range(config.repeats):
        if number in left:
            # Handed in together: half a round in one process and half in another would be no comparison.
            for sample in _round(contenders, workload, number):
                if (workload.name, number, sample["name"]) not in done:
                    run.add(sample)
        speeds = [s for s in run.samples if (s["item"], s["round"]) == (workload.name, number)]
        yield f"{workload.name}: " + "  ".join(f"{s['name']} {s['new_tokens'] / s['seconds']:.1f}" for s in speeds)


def _round(contenders: Sequence[Contender], workload: Workload, number: int) -> list[Sample]:
    load = watch()
    if not load.quiet:
        log.warning("the machine is not quiet: %.1f of %d cores are free", load.free_cores, load.cores)
    return [
        {
            "item": workload.name,
            "round": number,
            "name": contender.name,
            "requests": len(workload.prompts),
            "prompt_tokens": sum(map(len, workload.prompts)),
            **dataclasses.asdict(contender.run(workload)),
            **dataclasses.asdict(load),
        }
        for contender in contenders
    ]


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a workload and contender.

    ``tokens_per_s`` is the median over rounds. ``octavo_ratio`` is the median over rounds of octavo's tokens/s over the
    row's own in the same round; ``percent_of_floor`` compares with the Linear layers alone in the same way.
    """
    found = []
    for task, name in dict.fromkeys((sample["item"], sample["name"]) for sample in samples):
        own = {s["round"]: s for s in samples if (s["item"], s["name"]) == (task, name)}
        speed = _speeds(samples, task, name)
        ours, floor = _speeds(samples, task, "octavo"), _speeds(samples, task, "linears")
        ratios = [ours[n] / speed[n] for n in speed if n in ours]
        kv_bytes = [s["kv_bytes"] for s in own.values() if s["kv_bytes"] is not None]
        first = next(iter(own.values()))
        found.append(
            {
                "name": name,
                "task": task,
                "requests": first["requests"],
                "prompt_tokens": first["prompt_tokens"],
                "new_tokens": first["new_tokens"],
                "rounds": len(own),
                "tokens_per_s": median(speed.values()),
                "tokens_per_s_min": min(speed.values()),
                "tokens_per_s_max": max(speed.values()),
                "seconds": median(s["seconds"] for s in own.values()),
                "octavo_ratio": median(ratios) if ratios else None,
                "octavo_ratio_min": min(ratios, default=None),
                "octavo_ratio_max": max(ratios, default=None),
                "percent_of_floor": 100 * median(speed[n] / floor[n] for n in speed if n in floor) if floor else None,
                "kv_bytes_peak": max(kv_bytes, default=None),
                "free_cores_min": min(s["free_cores"] for s in own.values()),
                "load_1m_max": max(s["load_1m"] for s in own.values()),
            }
        )
    return found


def bars(rows: Sequence[Row]) -> Figure:
    """Tokens/s of every contender, workloads side by side in panels of their own; whiskers reach from the slowest round
    to the fastest."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(1 + 4 * len(tasks), 4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        own = [row for row in rows if row["task"] == task]
        heights = [row["tokens_per_s"] for row in own]
        below = [row["tokens_per_s"] - row["tokens_per_s_min"] for row in own]
        above = [row["tokens_per_s_max"] - row["tokens_per_s"] for row in own]
        colours = ["0.8" if row["name"] == "linears" else f"C{number}" for number, row in enumerate(own)]
        drawn = axes.bar([row["name"] for row in own], heights, yerr=[below, above], color=colours, capsize=4)
        axes.bar_label(drawn, fmt="%.0f", label_type="center")
        axes.set_title(f"{task}: {own[0]['requests']} requests, {own[0]['new_tokens']:,} new tokens", fontsize="medium")
        axes.set_ylabel("new tokens a second")
    return figure


def _speeds(samples: Sequence[Sample], task: str, name: str) -> dict[int, float]:
    """Tokens/s by round."""
    own = [sample for sample in samples if (sample["item"], sample["name"]) == (task, name)]
    return {sample["round"]: sample["new_tokens"] / sample["seconds"] for sample in own}


def _ratios(rows: Sequence[Row]) -> list[str]:
    """What a reader wants to know first."""
    ours = [row for row in rows if row["name"] == "octavo"]
    rivals = [row for row in rows if row["name"] not in ("octavo", "linears")]
    ratios = [
        f"{row['task']}: octavo is {row['octavo_ratio']:.2f}x as fast as {row['name']} "
        f"({row['octavo_ratio_min']:.2f} to {row['octavo_ratio_max']:.2f} over {row['rounds']} rounds)"
        for row in rivals
    ]
    return ratios + [
        f"{r['task']}: octavo reaches {r['percent_of_floor']:.0f} % of the linears-only floor" for r in ours
    ]


def _map(config: Throughput, model: Any, workload: Workload) -> tuple[str, PageWatch]:
    """The pool during a pass of octavo over a workload, its outputs cut short."""
    from octavo.scripts.rivals import Octavo

    short = workload.cut(len(workload.prompts), workload.longest, WATCHED_TOKENS)
    contender = Octavo(config, model, short)
    shows = f"octavo on workload {workload.name}, outputs of at most {WATCHED_TOKENS} tokens"
    return shows, watched_pass(contender.engine, lambda: contender.run(short))


def _profile(config: Throughput, run: Run, model: Any, workload: Workload) -> Profile:
    """A pass of octavo over a workload, its outputs cut short."""
    from octavo.scripts.octavo_server import OctavoService
    from octavo.scripts.rivals import engine_for

    short = workload.cut(len(workload.prompts), workload.longest, PROFILED_TOKENS)
    service = OctavoService(engine_for(config, model, short), "dense", None)
    service.serve(timed(workloads.warm_up(short, model), None, 0), Clock())
    return step_profile.profile_middle(
        service.server(Clock()), timed(short, None, 0), run.folder / step_profile.FILE, model.device.type
    )
