"""How close to the limit of the card is each kernel, and how far from its rivals?"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from octavo.scripts import report
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.refusal import ConfigError, one_of
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema_kernels import Kernels

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from octavo.scripts.kernel_races.race import Race
    from octavo.scripts.kernel_races.rates import Rates
    from octavo.scripts.kernel_races.timing import Clock

Row = dict[str, Any]

RATES = "rates"

NOTES = (
    "Floor: bytes over the rate of a plain stream, or operations over the rate of an 8192^3 bf16 product, whichever "
    "takes longer; both measured in this run. The fit's bytes/s is the slope of a decode over the uniform shapes, its "
    "µs what is left at no bytes.",
    "Times are medians over rounds in which all contenders take turns: replays of CUDA graphs of at least 20 launches, "
    "inputs rotated so that each finds its own outside of the L2. Copies over the bus are launched one by one.",
    "SDPA and FlexAttention read contiguous K and V, which no paged kernel can.",
)


class WrongResultError(RuntimeError):
    """A kernel's result is not the reference's."""


def run(config: Kernels, run: Run) -> None:
    """One sample and row a race: checked against the reference, then timed (``kernel_races.contest``). Without a CUDA
    device, checked only.

    Rates of the card come first, since every floor needs them, and a resumed run keeps those that it began with. Shapes
    that are judged against the fit over the uniform decode shapes come last.

    Raises:
        ConfigError: no device that this can run on.
        WrongResultError: a result was wrong; all races have run and all rows are written before.
    """
    from octavo.scripts.kernel_races import registry
    from octavo.scripts.kernel_races.timing import GraphClock

    device = _device(config)
    run.environment.update(_card(device))
    if config.tune:
        _tune(config, run, device, GraphClock())
        return
    races = registry.races(config.only, config.limit)
    _race(config, run, races, device, _clock(config, device))


def _race(config: Kernels, run: Run, races: Sequence[Race], device: torch.device, clock: Clock | None) -> None:
    import torch

    from octavo.scripts.kernel_races.contest import contest, correct, describe, line, rows

    torch.manual_seed(config.seed)
    rates = None if clock is None else _rates(run, races, device, clock)
    done = run.done("item")
    todo = [race for race in races if (race.name,) not in done]
    with counting(config.experiment, len(races), len(races) - len(todo)) as advance:
        for race in todo:
            ran = [sample for sample in run.samples if "kernel" in sample]
            sample = contest(
                race, device, rates, clock=clock, rounds=config.rounds, families=config.rivals, line=line(ran)
            )
            run.add(sample)
            run.write_rows(rows(run.samples))
            advance(describe(sample))
            if device.type == "cuda":
                torch.cuda.empty_cache()  # what one race leaves must not be what the next finds

    found = rows(run.samples)
    for text in _findings(found):
        console.print(text, style="bold", markup=False, highlight=False)
    plots = {} if clock is None else {"kernels": figure(run.samples)}
    report.publish(run, config, found, plots=plots, notes=(*NOTES, *_absent(config.rivals)))
    wrong = [sample["item"] for sample in run.samples if "kernel" in sample and not correct(sample)]
    if wrong:
        raise WrongResultError(f"{len(wrong)} of {len(races)} races are not right: {'; '.join(wrong)}")


def _rates(run: Run, races: Sequence[Race], device: torch.device, clock: Clock) -> Rates:
    """Those of this run, measured when it began."""
    from octavo.scripts.kernel_races import rates

    before = [sample for sample in run.samples if sample["item"] == RATES]
    if not before:
        with waiting("measuring the card's own rates"):
            measured = rates.measure(device, [race.bound for race in races], clock)
        run.add({"item": RATES, **dataclasses.asdict(measured)})
    found = rates.Rates(**{key: value for key, value in run.samples[0].items() if key != "item"})
    shown = {f"{name}_bytes_per_s": rate for name, rate in _byte_rates(found).items()}
    run.environment.update(shown | {"product_flop_per_s": found.product_flop_per_s})
    console.print(
        ", ".join(f"{name.replace('_', ' ')} {rate / 1e12:.3f} TB/s" for name, rate in _byte_rates(found).items())
        + f", bf16 product {found.product_flop_per_s / 1e12:.0f} TFLOP/s",
        markup=False,
        highlight=False,
    )
    return found


def _byte_rates(rates: Rates) -> dict[str, float]:
    names = ("read", "read_pieces", "copy", "to_device", "to_host")
    return {name: getattr(rates, name) for name in names if getattr(rates, name) is not None}


def _tune(config: Kernels, run: Run, device: torch.device, clock: Clock) -> None:
    """One sample a kernel and key, with all its trials; ``settings.json`` is the chip's table so far.

    Raises:
        ConfigError: ``only`` names a kernel without a search space.
    """
    import json

    import torch

    from octavo.kernels.triton import settings
    from octavo.scripts.kernel_races import registry, tuning
    from octavo.scripts.kernel_races.search import SPACES

    for name in config.only:
        one_of("only", name, tuple(SPACES))
    by_name = {race.name: race for race in registry.races()}
    spaces = [
        (kernel, key, space)
        for kernel, entries in SPACES.items()
        for key, space in entries.items()
        if not config.only or kernel in config.only
    ][: config.limit]
    own = settings.FOLDER / f"{settings.chip(device)}.json"
    kept = json.loads(own.read_text()) if own.exists() else {}
    done = run.done("item")
    todo = [space for space in spaces if (f"{space[0]} {space[1]}",) not in done]
    with counting(config.experiment, len(spaces), len(spaces) - len(todo)) as advance:
        for kernel, key, space in todo:
            races = [by_name[name] for name in space.races]
            trials = tuning.search(kernel, key, space, races, device, clock, config.tune_seconds)
            winner = tuning.best(trials)
            run.add(
                {
                    "item": f"{kernel} {key}",
                    "tuned": kernel,
                    "key": key,
                    "best": dict(winner.values),
                    "trials": [dataclasses.asdict(trial) | {"us_mean": trial.us_mean} for trial in trials],
                }
            )
            run.write_rows(tuned_rows(run.samples))
            run.write("settings.json", tuning.table_text(tuning.merged(kept, tuned_tables(run.samples))))
            advance(f"{kernel} {key}: {len(trials)} trials, {trials[0].us_mean:.1f} to {winner.us_mean:.1f} µs")
            torch.cuda.empty_cache()

    report.publish(run, config, tuned_rows(run.samples), plots={}, notes=(_where(run, own.name),))


def tuned_rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a trial, the best of a kernel and key first."""
    found = []
    for sample in samples:
        trials = sorted(sample["trials"], key=lambda trial: float(trial["us_mean"]))
        for trial in trials:
            found.append(
                {
                    "name": "octavo",
                    "kernel": sample["tuned"],
                    "key": sample["key"],
                    "settings": ", ".join(f"{name} {value}" for name, value in trial["values"].items()),
                    "us_mean": None if trial["problem"] else trial["us_mean"],
                    "chosen": trial["values"] == sample["best"],
                    "problem": trial["problem"],
                }
            )
    return found


def tuned_tables(samples: Sequence[Sample]) -> dict[str, dict[str, dict[str, int]]]:
    """Kernel -> key -> the best settings found."""
    tables: dict[str, dict[str, dict[str, int]]] = {}
    for sample in samples:
        tables.setdefault(sample["tuned"], {})[sample["key"]] = sample["best"]
    return tables


def figure(samples: Sequence[Sample]) -> Figure:
    """How much of the floor each race reaches: octavo as a bar, everybody else as a mark beside it."""
    from matplotlib.figure import Figure

    from octavo.scripts.kernel_races.contest import OCTAVO

    ran = [sample for sample in samples if sample.get("us")]
    drawn = Figure(figsize=(11, 1.5 + 0.28 * len(ran)), layout="constrained")
    axes = drawn.add_subplot()
    shares: dict[str, list[tuple[float, int]]] = {}
    for place, sample in enumerate(ran):
        for name, laps in sample["us"].items():
            share = 100 * sample["floor_us"] / sorted(laps)[len(laps) // 2]
            shares.setdefault(name, []).append((share, place))
    widths = {place: share for share, place in shares.get(OCTAVO, [])}
    axes.barh(list(widths), list(widths.values()), color="0.75", label=OCTAVO)
    for number, (name, points) in enumerate((n, p) for n, p in shares.items() if n != OCTAVO):
        axes.scatter(*zip(*points, strict=True), marker="osD^vPX*<>"[number % 10], s=28, label=name, zorder=3)
    axes.set_yticks(range(len(ran)), [sample["item"] for sample in ran])
    axes.invert_yaxis()
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlim(left=0)
    axes.set_xlabel("% of the floor (bytes or operations over the card's own rate)")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return drawn


def _findings(found: Sequence[Row]) -> Iterator[str]:
    judged = [row for row in found if row.get("reached") is not None]
    if judged:
        missed = [f"{row['kernel']}, {row['shape']}" for row in judged if not row["reached"]]
        yield f"{len(judged) - len(missed)} of {len(judged)} targets reached" + (
            f"; not: {'; '.join(missed)}" if missed else ""
        )
    for row in found:
        if row.get("bytes_per_s"):
            rate = report.format_bytes(row["bytes_per_s"])
            yield f"a decode of a uniform batch takes {row['us']:.1f} µs + bytes over {rate}/s"


def _absent(families: Sequence[str]) -> list[str]:
    """Rivals that were asked for and are not installed."""
    if "flashinfer" not in families or find_spec("flashinfer"):
        return []
    return ["FlashInfer is not installed, so nothing was compared with it: pip install flashinfer-python."]


def _where(run: Run, name: str) -> str:
    return (
        f"{run.folder / 'settings.json'} is this chip's table: review it, commit it as kernels/triton/settings/{name}."
    )


def _device(config: Kernels) -> torch.device:
    """Where the kernels run. Without a CUDA device that is Triton's interpreter, which is switched on here.

    Raises:
        ConfigError: no Triton; launch settings are to be tuned and there is nothing to time; the interpreter comes too
            late.
    """
    import torch

    name = config.model.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if find_spec("triton") is None:
        raise ConfigError("the kernels need the package triton, which is not installed: pip install triton")
    if device.type == "cuda":
        return device
    if config.tune:
        raise ConfigError(f"tune=true times kernels, which needs a CUDA device, and this is {device}")
    if os.environ.get("TRITON_INTERPRET") != "1":
        if "triton" in sys.modules:  # it asks when it is imported
            raise ConfigError(
                f"Triton compiles nothing for {device} and has been imported already: set TRITON_INTERPRET=1 in the "
                "environment to check the kernels in its interpreter"
            )
        os.environ["TRITON_INTERPRET"] = "1"
    return device


def _clock(config: Kernels, device: torch.device) -> Clock | None:
    """What times the races; None where results alone are checked."""
    from octavo.scripts.kernel_races.timing import GraphClock

    if config.check_only or device.type == "cuda":
        return None if config.check_only else GraphClock()
    console.print(
        f"no races: they need a CUDA device, and this is {device}. Results are checked in Triton's interpreter, on a "
        "small part of every race; 'pytest tests/kernels' checks more",
        markup=False,
        highlight=False,
    )
    return None


def _card(device: torch.device) -> Mapping[str, Any]:
    """What figures of this experiment depend on besides: driver, multiprocessors, the table of launch settings."""
    import torch

    from octavo.kernels.triton import settings

    own = settings.FOLDER / f"{settings.chip(device)}.json"
    facts: dict[str, Any] = {"settings_file": own.name if own.exists() else "default.json"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "multiprocessors": properties.multi_processor_count, "driver": _driver()}
    return facts


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
