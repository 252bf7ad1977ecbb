"""Which knob of the engine moves what?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.scripts import build, report, workloads
from octavo.scripts.machine_load import busy_rounds, watch
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Config, EngineSettings, Knobs
from octavo.scripts.schema_memory import KNOB_NAMES
from octavo.scripts.watched_pass import watched_pass
from octavo.scripts.workloads import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from octavo.core import Engine
    from octavo.core.inspection.page_watch import PageWatch

Row = dict[str, Any]

DEFAULT = "default"
SHARED_TOKENS = 256
"""What every second prompt has in common with the others of its kind, as far as it reaches."""

MEASURES = {
    "tokens_per_s_ratio": "tokens/s (x default)",
    "step_p99_ratio": "p99 step (x default)",
    "slots_held_ratio": "slots held at peak (x default)",
    "waste_percent": "empty slots (%)",
    "preemptions": "preemptions",
    "hit_percent": "prompt tokens found (%)",
}
"""What a knob may move, and what it is called in the figure."""

NOTES = (
    "x default: against the default's pass of the same round, median over the rounds; all settings take turns in each.",
    "waste: empty slots in % of slots held, over all steps in which every running request drew a token. hits: prompt "
    "tokens found in the prefix cache, those found again after a preemption included.",
    "pool_percent: of the slots that all requests take at once if they share nothing; max_model_percent: of the "
    "model's positions; it changes no pool whose size is given.",
)

ONE_ROUND = "One round: speeds and p99 are of one pass each and may be noise; counts are exact. repeats=3 says more."


def run(config: Knobs, run: Run) -> None:
    """One sample a round and setting; one row a setting.

    A setting is the default, or one knob at another value with all others at their default. All requests of the
    workload are there from the start, so that admission, preemption and the prefix cache are all at work. Settings take
    turns, round after round, back and forth. Each has an engine of its own, warmed up with two short requests.
    """
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
    workload = mixed(workloads.build("ragged", tokenizer, config.seed, config.limit), config.requests)
    positions = model.config.get_text_config().max_position_embeddings
    tried = settings(config, workload, positions)
    _refuse_too_small(tried, workload, positions)

    repeats = config.repeats if config.limit is None else 1  # a smoke test
    done = run.done("item", "round")
    with counting(config.experiment, repeats * len(tried), len(done)) as advance:
        for number in range(repeats):
            load = dataclasses.asdict(watch())
            for name in list(tried)[:: -1 if number % 2 else 1]:
                if (name, number) in done:
                    continue
                engine = _engine(config, model, tried[name])
                serve(engine, workload.cut(requests=2, prompt=64, new=4), salt="warm-up")
                served = serve(engine, workload, salt="timed")
                knob, _, value = name.partition("=")
                setting = {"item": name, "round": number, "knob": knob, "value": int(value) if value else None}
                run.add({**setting, **served, **load})
                run.write_rows(rows(run.samples))
                advance(f"{name}: {served['new_tokens'] / served['seconds']:.1f} tokens/s")

    found = rows(run.samples)
    for line in _findings(found):
        console.print(line, style="bold", markup=False, highlight=False)
    figures = {"knobs": small_multiples(found, _defaults(config, positions))}
    maps = [_map(config, model, workload, tried, run.samples)] if config.page_map else []
    notes = (*NOTES, *([ONE_ROUND] if repeats == 1 else []), *busy_rounds(run.samples, "round"))
    report.publish(run, config, found, plots=figures, notes=notes, maps=maps)


def _engine(config: Knobs, model: Any, settings: EngineSettings) -> Engine:
    # Not a changed copy of ``config``, which refuses a pool, as it is not the user's to set there.
    return build.engine(Config(config.experiment, engine=settings), model, None)


def _map(
    config: Knobs, model: Any, workload: Workload, tried: Mapping[str, EngineSettings], samples: Sequence[Sample]
) -> tuple[str, PageWatch]:
    """The pool under the setting that preempted most; the first of them, which is the default, if none did."""
    most = max(samples, key=lambda sample: sample["preemptions"])
    engine = _engine(config, model, tried[most["item"]])
    shows = f"{most['item']}, {most['preemptions']} preemptions"
    return shows, watched_pass(engine, lambda: serve(engine, workload, salt="watched"))


def mixed(workload: Workload, requests: int) -> Workload:
    """The first requests, of which every second one begins with the same tokens: those of the first prompt."""
    shared = workload.prompts[0][:SHARED_TOKENS]
    prompts = [
        (shared + ids[len(shared) :])[: len(ids)] if number % 2 == 0 else ids
        for number, ids in enumerate(workload.prompts[:requests])
    ]
    return Workload("mixed", tuple(prompts), workload.new_tokens[:requests])


def settings(config: Knobs, workload: Workload, positions: int) -> dict[str, EngineSettings]:
    """Name -> settings of the engine: the default, then ``knob=value``. ``positions`` are those of the model."""

    def with_pool(engine: EngineSettings, percent: int) -> EngineSettings:
        return dataclasses.replace(engine, pool_tokens=-(-workload.slots(engine.page_tokens) * percent // 100))

    found = {DEFAULT: with_pool(config.engine, config.default_pool_percent)}
    for knob in KNOB_NAMES:
        for value in getattr(config, knob)[: config.limit]:
            if knob == "pool_percent":
                found[f"{knob}={value}"] = with_pool(config.engine, value)
                continue
            key, setting = (
                ("max_model_tokens", positions * value // 100) if knob == "max_model_percent" else (knob, value)
            )
            changed = dataclasses.replace(config.engine, **{key: setting})
            found[f"{knob}={value}"] = with_pool(changed, config.default_pool_percent)
    return found


def serve(engine: Engine, workload: Workload, salt: str) -> dict[str, Any]:
    """All requests of a workload, step by step.

    Waste is summed in steps in which every running request drew a token: then each has stored all its tokens but that
    one, and since only full pages are shared, what is empty is at the end of each request's last page.
    """
    from octavo.core import SamplingParams
    from octavo.core.memory.page_layout import PageLayout

    layout = PageLayout([], engine.config.policies, engine.config.unit_tokens)
    before = engine.stats()
    seconds: list[float] = []
    held_slots = waste = 0
    start = time.perf_counter()
    ids = [
        engine.submit(prompt, SamplingParams(max_tokens=new, ignore_eos=True), salt=salt)
        for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True)
    ]
    stored = {request_id: len(prompt) - 1 for request_id, prompt in zip(ids, workload.prompts, strict=True)}
    while engine.has_work():
        begun = time.perf_counter()
        news = engine.step()
        seconds.append(time.perf_counter() - begun)
        for output in news:
            stored[output.request_id] += len(output.new_token_ids)
        going_on = [output.request_id for output in news if output.completion is None]
        stats = engine.stats()
        if going_on and len(going_on) == stats.running:
            held_slots += stats.units_held * engine.config.unit_tokens
            waste += sum(layout.waste(stored[request_id]) for request_id in going_on)
    taken, stats = time.perf_counter() - start, engine.stats()
    return {
        "requests": len(ids),
        "prompt_tokens": sum(map(len, workload.prompts)),
        "new_tokens": workload.total_new,
        "seconds": taken,
        "steps": len(seconds),
        "step_p99_seconds": float(np.percentile(seconds, 99)),
        "units_held_peak": stats.units_held_peak,
        "unit_tokens": engine.config.unit_tokens,
        "units_total": stats.units_total,
        "held_slot_steps": held_slots,
        "waste_slot_steps": waste,
        "preemptions": stats.preemptions - before.preemptions,
        "evictions": stats.evictions - before.evictions,
        "hit_tokens": stats.hit_tokens - before.hit_tokens,
        "query_tokens": stats.query_tokens - before.query_tokens,
    }


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a setting: times are medians over rounds, ratios medians of ratios within a round, and counts those of
    the first round; greedy decoding makes them the same in each."""
    default = {s["round"]: s for s in samples if s["item"] == DEFAULT}
    found = []
    for item in dict.fromkeys(sample["item"] for sample in samples):
        own = [sample for sample in samples if sample["item"] == item]
        first = own[0]
        pairs = [(s, default[s["round"]]) for s in own if s["round"] in default]
        found.append(
            {
                "name": "octavo",
                "task": "mixed",
                "knob": first["knob"],
                "value": first["value"],
                "requests": first["requests"],
                "rounds": len(own),
                "tokens_per_s": median(s["new_tokens"] / s["seconds"] for s in own),
                "tokens_per_s_ratio": _ratio([(base["seconds"], s["seconds"]) for s, base in pairs]),
                "step_p99_ms": 1e3 * median(s["step_p99_seconds"] for s in own),
                "step_p99_ratio": _ratio([(s["step_p99_seconds"], base["step_p99_seconds"]) for s, base in pairs]),
                "units_held_peak": first["units_held_peak"],
                "slots_held_peak": _slots(first),
                "slots_held_ratio": _ratio([(_slots(s), _slots(base)) for s, base in pairs]),
                "waste_percent": 100 * first["waste_slot_steps"] / max(1, first["held_slot_steps"]),
                "preemptions": first["preemptions"],
                "evictions": first["evictions"],
                "hit_percent": 100 * first["hit_tokens"] / first["query_tokens"],
                "steps": first["steps"],
                "pool_slots": first["units_total"] * first["unit_tokens"],
                "free_cores_min": min(s["free_cores"] for s in own),
            }
        )
    return found


def _slots(sample: Mapping[str, Any]) -> int:
    slots: int = sample["units_held_peak"] * sample["unit_tokens"]
    return slots


def _ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    return median(own / base for own, base in pairs) if pairs else None


def _defaults(config: Knobs, positions: int) -> dict[str, int]:
    """What each knob is set to while others are tried."""
    longest = config.engine.max_model_tokens or positions
    at = {knob: getattr(config.engine, knob, None) for knob in KNOB_NAMES}
    return {**at, "pool_percent": config.default_pool_percent, "max_model_percent": 100 * longest // positions}


def _refuse_too_small(tried: Mapping[str, EngineSettings], workload: Workload, positions: int) -> None:
    """A setting under which the longest request could never be served."""
    for name, engine in tried.items():
        most = engine.max_model_tokens or positions
        if workload.longest > most:
            raise ConfigError(
                f"{name}: the longest request has {workload.longest} tokens, and a sequence at most {most}"
            )
        if workload.longest > (engine.pool_tokens or 0):
            raise ConfigError(
                f"{name}: the longest request has {workload.longest} tokens, and the pool room for "
                f"{engine.pool_tokens}; raise the percentage, or serve more requests"
            )


def _findings(found: Sequence[Row]) -> list[str]:
    """What a reader wants to know first: where each knob that was tried had its largest effect on speed."""
    said = []
    for knob in KNOB_NAMES:
        own = [row for row in found if row["knob"] == knob and row["tokens_per_s_ratio"] is not None]
        if own:
            row = max(own, key=lambda row: abs(np.log(row["tokens_per_s_ratio"])))
            said.append(
                f"{knob}={row['value']}: {row['tokens_per_s_ratio']:.2f}x the default's tokens/s, "
                f"{row['step_p99_ratio']:.2f}x its p99 step, {row['slots_held_ratio']:.2f}x its slots at the peak, "
                f"{row['preemptions']} preemptions"
            )
    return said


def small_multiples(found: Sequence[Row], defaults: Mapping[str, int]) -> Figure:
    """A column a knob, a line a measure; the star is the default."""
    from matplotlib.figure import Figure

    knobs = [knob for knob in KNOB_NAMES if any(row["knob"] == knob for row in found)]
    columns = max(1, len(knobs))
    figure = Figure(figsize=(1 + 2.6 * columns, 1.9 * len(MEASURES)), layout="constrained")
    grid = figure.subplots(len(MEASURES), columns, squeeze=False, sharex="col", sharey="row")
    default = next(row for row in found if row["knob"] == DEFAULT)
    for line, (measure, label) in zip(grid, MEASURES.items(), strict=True):
        for axes, knob in zip(line, knobs, strict=False):
            own = [row for row in found if row["knob"] == knob]
            _points(axes, [*own, {**default, "value": defaults[knob]}], measure)
            axes.plot(_place(own, defaults[knob]), default[measure], "*", color="C1", markersize=12)
        line[0].set_ylabel(label, fontsize="small")
        line[0].set_ylim(0, 1.1 * max(row[measure] for row in found) or 1)
    for axes, knob in zip(grid[-1], knobs, strict=False):
        axes.set_xlabel(knob)
    return figure


def _points(axes: Axes, own: Sequence[Row], measure: str) -> None:
    """Values at even distances, whatever they are: the knobs' ranges have nothing in common."""
    ordered = sorted(own, key=lambda row: row["value"])
    places = range(len(ordered))
    axes.plot(places, [row[measure] for row in ordered], "o-", color="C0", markersize=4)
    axes.set_xticks(places, [f"{row['value']}" for row in ordered])
    axes.grid(alpha=0.3)


def _place(own: Sequence[Row], value: int) -> int:
    """Where the default stands among the values that were tried."""
    return sum(row["value"] < value for row in own)
