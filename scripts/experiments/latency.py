"""How long do requests wait for their tokens when they come at a rate, dense and sparse, next to other engines?"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.scripts import budgets, build, latency_plots, latency_rows, model_shapes, report, step_profile, workloads
from octavo.scripts.latency_plots import who
from octavo.scripts.latency_rows import Row
from octavo.scripts.machine_load import busy_rounds, watch
from octavo.scripts.progress import counting, waiting
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Latency
from octavo.scripts.serving import Clock
from octavo.scripts.step_profile import Profile, profile_middle
from octavo.scripts.timed_requests import TimedRequest, timed
from octavo.scripts.watched_pass import watched_pass
from octavo.scripts.workloads import Workload

if TYPE_CHECKING:
    from octavo.core import Engine
    from octavo.core.inspection.page_watch import PageWatch
    from octavo.scripts.octavo_server import OctavoService
    from octavo.scripts.rivals import Service

log = logging.getLogger(__name__)

LONG_NEW = 16  # tokens that the long request gets after its prompt
WATCHED_TOKENS = 48

NOTES = (
    "Times run from the arrival of a request, whether or not the engine had time to take it in; all contenders get the "
    "same requests at the same times.",
    "TTFT: time to first token. ITL: from one token of a request to its next, over all of them; tokens that one step "
    "brings together are 0 apart.",
)


def run(config: Latency, run: Run) -> None:
    """One sample and one row a rate and contender.

    Every contender is warmed up once. Then, rate by rate, they take turns at the same requests, which arrive at the
    same times. The load of the machine is noted before each pass.
    """
    from octavo.scripts.octavo_server import OctavoService
    from octavo.scripts.rivals import engine_for, rival_services

    methods = build.methods(config.sparse)
    model, workload = _model_and_workload(config)
    workloads.refuse_too_long(workload, model)
    engine = engine_for(config, model, workload)
    methods = budgets.matched(methods, engine, config.sparse)
    ours = [OctavoService(engine, name, method) for name, method in methods.items()]
    rivals, absent = rival_services(config, model, workload)

    contenders: list[Service] = [*ours, *rivals]
    done = run.done("item", "name", "method")
    passes = [(rate, contender) for rate in config.rates for contender in contenders]
    left = [(rate, c) for rate, c in passes if (_label(rate), c.name, c.method) not in done]
    for contender in contenders:
        if any(contender is next_one for _, next_one in left):
            with waiting(f"{who(contender.name, contender.method)}: warming up"):
                contender.serve(timed(workloads.warm_up(workload, model), None, config.seed), Clock())
    build.spare_collections()
    with counting(config.experiment, len(passes), len(passes) - len(left)) as advance:
        for rate, contender in left:
            run.add(_pass(contender, rate, _requests(config, workload, rate)))
            rows = _rows(config, run.samples)
            run.write_rows(rows)
            advance(_line(rows[-1]))

    rows = _rows(config, run.samples)
    notes = [*NOTES, _limits(config), *absent, *busy_rounds(run.samples, "item", "name", "method")]
    if config.profile:
        profile = _profile(config, run, ours[0], workload, model.device.type)
        notes += profile.notes
        for row in rows:
            if (row["task"], row["name"], row["method"]) == (_label(config.rates[-1]), ours[0].name, ours[0].method):
                row.update(profile.columns)
    maps = [_map(ours[0], engine, workload)] if config.page_map else []
    plots = {"latency": latency_plots.percentiles_over_rate(rows), "gaps": latency_plots.gaps_cdf(run.samples)}
    report.publish(run, config, rows, plots=plots, notes=notes, maps=maps)


def _model_and_workload(config: Latency) -> tuple[Any, Workload]:
    """Real text for a model with a tokenizer, random tokens for one of random weights."""
    last = None if config.long_prompt_tokens is None else (config.long_prompt_tokens, LONG_NEW)
    if config.model.path is None:
        with waiting("making a model of random weights"):
            model = model_shapes.make(config.model)
        source, lay_out = model.config.vocab_size, workloads.random_ids
    else:
        with waiting(f"loading {config.model.path}"):
            model, source = build.load_model(config.model)
        lay_out = workloads.build
    return model, lay_out(config.workload, source, config.seed, config.limit, requests=config.requests, last=last)


def _pass(contender: Service, rate: float | str, requests: list[TimedRequest]) -> Sample:
    load = watch()
    if not load.quiet:
        log.warning("the machine is not quiet: %.1f of %d cores are free", load.free_cores, load.cores)
    return {
        "item": _label(rate),
        "name": contender.name,
        "method": contender.method,
        "rate_per_s": _per_s(rate),
        **latency_rows.passed(requests, contender.serve(requests, Clock())),
        **dataclasses.asdict(load),
    }


def _requests(config: Latency, workload: Workload, rate: float | str) -> list[TimedRequest]:
    return timed(workload, _per_s(rate), config.seed, last_is_long=config.long_prompt_tokens is not None)


def _rows(config: Latency, samples: Sequence[Sample]) -> list[Row]:
    return latency_rows.rows(samples, config.ttft_limit_s, config.itl_limit_s)


def _per_s(rate: float | str) -> float | None:
    return None if isinstance(rate, str) else float(rate)


def _label(rate: float | str) -> str:
    return rate if isinstance(rate, str) else f"{rate:g}/s"


def _line(row: Row) -> str:
    """What a reader wants to know first of a pass."""
    gap = (
        ""
        if row["itl_p99_ms"] is None
        else f"  between tokens p50 {row['itl_p50_ms']:.1f} p99 {row['itl_p99_ms']:.1f} ms"
    )
    return (
        f"{row['task']} {who(row['name'], row['method'])}: {row['tokens_per_s']:.1f} tokens/s  "
        f"first token p50 {row['ttft_p50_ms']:.0f} p99 {row['ttft_p99_ms']:.0f} ms{gap}"
    )


def _limits(config: Latency) -> str:
    return (
        f"Goodput: requests a second whose first token came within {config.ttft_limit_s:g} s and whose tokens were "
        f"{1e3 * config.itl_limit_s:g} ms apart, or less, on average."
    )


def _profile(config: Latency, run: Run, service: OctavoService, workload: Workload, device: str) -> Profile:
    """One more pass, at the last rate."""
    requests = _requests(config, workload, config.rates[-1])
    return profile_middle(service.server(Clock()), requests, run.folder / step_profile.FILE, device)


def _map(service: OctavoService, engine: Engine, workload: Workload) -> tuple[str, PageWatch]:
    """The pool while all requests are there at once, their outputs cut short."""
    short = workload.cut(len(workload.prompts), workload.longest, WATCHED_TOKENS)
    shows = f"{service.method}, all requests at once, outputs of at most {WATCHED_TOKENS} tokens"
    return shows, watched_pass(engine, lambda: service.serve(timed(short, None, 0), Clock()))
