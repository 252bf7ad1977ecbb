"""The search for a chip's launch settings, one kernel and key after another.

    begin with the table's own settings
    one setting after another, try its other values with all else as in the best so far
    what is right, and faster by more than MARGIN, becomes the best
    until a whole round changes nothing, or the time is up

The races are made once and timed under ``settings.trial``, octavo alone. A choice counts by the geometric mean of its
times; one that does not compile, needs more than the card has, or gives a wrong result is passed over.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch

from octavo.scripts.kernel_races.checking import poisoned_memory
from octavo.scripts.kernel_races.race import Field, Race
from octavo.scripts.kernel_races.search import Space
from octavo.scripts.kernel_races.timing import Clock, interleave

MARGIN = 0.003
"""A gain that is smaller than this is noise."""

LAPS = 5
Tables = Mapping[str, Mapping[str, Mapping[str, int]]]


@dataclass(frozen=True)
class Trial:
    """Settings and what they gave: microseconds by race, or what was wrong with them."""

    values: Mapping[str, int]
    us: Mapping[str, float]
    problem: str | None = None

    @property
    def us_mean(self) -> float:
        """Geometric mean over the races; infinite if it is passed over."""
        return math.inf if self.problem else math.exp(fmean(map(math.log, self.us.values())))


def search(
    kernel: str,
    key: str,
    space: Space,
    races: Sequence[Race],
    device: torch.device,
    clock: Clock,
    seconds: float,
    now: Callable[[], float] = time.monotonic,
) -> list[Trial]:
    """All trials of one kernel and key, the table's own settings first; ``best`` picks the winner.

    Args:
        races: those that ``space`` names.
        seconds: after which no further trial begins.
    """
    from octavo.kernels.triton import settings

    ends = now() + seconds
    fields = {race: race.build(device) for race in races}

    def attempt(values: Mapping[str, int]) -> Trial:
        with settings.trial(kernel, **values):
            return _attempt(values, fields, clock)

    leader = attempt(settings.launch(kernel, key, device))
    trials = [leader]
    while True:
        before = leader
        for setting, choices in space.values.items():
            for choice in choices:
                values = {**leader.values, setting: choice}
                if any(dict(trial.values) == values for trial in trials):
                    continue
                if now() >= ends:
                    return trials
                trials.append(attempt(values))
                if trials[-1].us_mean < leader.us_mean * (1 - MARGIN):
                    leader = trials[-1]
        if leader is before:
            return trials


def best(trials: Sequence[Trial]) -> Trial:
    """The fastest trial; the table's own settings unless something beats them by more than the noise."""
    found = trials[0]
    for trial in trials[1:]:
        if trial.us_mean < found.us_mean * (1 - MARGIN):
            found = trial
    return found


def merged(kept: Tables, tuned: Tables) -> dict[str, dict[str, dict[str, int]]]:
    """A chip's table: what its file holds, with what was tuned in place of it."""
    return {
        kernel: {key: dict(values) for key, values in {**kept.get(kernel, {}), **tuned.get(kernel, {})}.items()}
        for kernel in (*kept, *(kernel for kernel in tuned if kernel not in kept))
    }


def table_text(tables: Tables) -> str:
    """A table as its files have it: a kernel a block, a key a line."""
    blocks = [
        f"  {json.dumps(kernel)}: {{\n"
        + ",\n".join(f"    {json.dumps(key)}: {json.dumps(dict(values))}" for key, values in entries.items())
        + "\n  }"
        for kernel, entries in tables.items()
    ]
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _attempt(values: Mapping[str, int], fields: Mapping[Race, Field], clock: Clock) -> Trial:
    us: dict[str, float] = {}
    try:
        for race, field in fields.items():
            with poisoned_memory():
                error = field.error()
            if not error <= field.tolerance:
                return Trial(values, us, f"wrong at {race.name}: relative error {error:.1e}")
            lap = clock.prepare(field.contenders["octavo"], race.bound in ("read", "copy"))
            us[race.name] = median(interleave({"octavo": lap}, LAPS)["octavo"])
    except Exception as problem:  # out of registers or shared memory, or a shape that the kernel does not take
        return Trial(values, us, f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}")
    return Trial(values, us)
