"""How one race is run, and what becomes of it: a sample, which rows are made of.

1. Make the tensors. octavo's output is compared with the reference's, uninitialised memory being NaN; a kernel that is
   wrong does not race.
2. Every contender compiles, warms up and is captured; a rival that cannot is reported and left out.
3. All take turns (``timing.py``).
4. The target is judged by the medians, the rates of the same run and, for the shapes that need it, the fit over the
   uniform decode shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from octavo.scripts.kernel_races import rivals
from octavo.scripts.kernel_races.checking import poisoned_memory
from octavo.scripts.kernel_races.race import Race, Times
from octavo.scripts.kernel_races.rates import Line, Rates, fit, floor_us
from octavo.scripts.kernel_races.timing import Clock, interleave
from octavo.scripts.schema_kernels import RIVAL_FAMILIES

Sample = dict[str, Any]
Row = dict[str, Any]
OCTAVO = "octavo"
FIT = "t0 + bytes / rate"


def contest(
    race: Race,
    device: torch.device,
    rates: Rates | None,
    *,
    clock: Clock | None = None,
    rounds: int = 5,
    families: Sequence[str] = RIVAL_FAMILIES,
    line: Line | None = None,
) -> Sample:
    """Check a race and, with ``rates`` and a ``clock``, run it. Whatever goes wrong in it stands in the sample.

    Args:
        families: rivals to race with.
        line: the fit over the uniform shapes, as far as they have run.
    """
    sample: Sample = {
        "item": race.name,
        "kernel": race.kernel,
        "shape": race.shape,
        "moved_bytes": race.moved_bytes,
        "flops": race.flops,
        "bound": race.bound,
        "fit": race.fit,
        "floor_us": None if rates is None else floor_us(race, rates),
        "relative_error": None,
        "tolerance": None,
        "us": {},
        "failed": {},
        "target": None if race.target is None else race.target.text,
        "reached": None,
    }
    try:
        field = race.build(device)
        with poisoned_memory():
            sample |= {"relative_error": field.error(), "tolerance": field.tolerance}
        if clock is None or rates is None or not correct(sample):
            return sample
        captured = race.bound in ("read", "copy")
        laps = {}
        for name, calls in field.contenders.items():
            kind = rivals.family(name)
            if kind is not None and kind not in families:
                continue
            try:
                laps[name] = clock.prepare(calls, captured)
            except Exception as problem:  # one contender must not cost the others
                sample["failed"][name] = _said(problem)
        if OCTAVO in laps:
            sample["us"] = interleave(laps, rounds)
            sample["reached"] = _reached(race, sample, rates, line)
    except Exception as problem:  # nor one race the rest of the run
        sample["failed"][OCTAVO] = _said(problem)
    return sample


def correct(sample: Sample) -> bool:
    """Whether octavo ran and was right. An error that is no number is wrong."""
    error, tolerance = sample["relative_error"], sample["tolerance"]
    return OCTAVO not in sample["failed"] and tolerance is not None and float(error) <= tolerance


def line(samples: Sequence[Sample]) -> Line | None:
    """t0 + bytes / rate of octavo's decode over the uniform shapes that have raced."""
    points = [s for s in samples if s.get("fit") == "point" and OCTAVO in s["us"]]
    return fit([(s["moved_bytes"], median(s["us"][OCTAVO])) for s in points])


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a race, and one of the fit: medians over a contender's laps, and the whole range of octavo's.

    ``<contender>_us`` is the median of another contender, ``fastest_rival`` the best of those that are rivals.
    """
    found = [_row(sample) for sample in samples if "kernel" in sample]
    fitted = line([sample for sample in samples if "kernel" in sample])
    if fitted is not None:
        point = next(s for s in samples if s.get("fit") == "point")
        found.append(
            {
                "name": OCTAVO,
                "kernel": point["kernel"],
                "shape": FIT,
                "us": fitted.t0_us,
                "bytes_per_s": fitted.bytes_per_s,
            }
        )
    return found


def describe(sample: Sample) -> str:
    """A race in one line: bytes, floor and percentage of it; every contender's time; the target."""
    row = _row(sample)
    if not row["correct"]:
        why = sample["failed"].get(OCTAVO) or f"relative error {row['relative_error']}, at most {row['tolerance']}"
        return f"{sample['item']}: WRONG: {why}"
    if row["us"] is None:
        return f"{sample['item']}: right, relative error {row['relative_error']:.1e}"
    parts = [
        f"{sample['item']}: {row['moved_bytes'] / 1e6:,.1f} MB, floor {row['floor_us']:.1f} µs, "
        f"{row['percent_of_floor']:.1f} % of it",
        ", ".join(f"{name} {median(laps):.1f} µs" for name, laps in sample["us"].items()),
        *(f"{name} failed: {why}" for name, why in sample["failed"].items()),
    ]
    if sample["target"]:
        verdict = {True: "reached", False: "NOT reached", None: "not judged"}[sample["reached"]]
        parts.append(f"{sample['target']}: {verdict}")
    return "; ".join(parts)


def _row(sample: Sample) -> Row:
    us = {name: median(laps) for name, laps in sample["us"].items()}
    own = sample["us"].get(OCTAVO)
    racing = {name: time for name, time in us.items() if rivals.family(name)}
    fastest = min(racing, key=racing.__getitem__, default=None)
    return {
        "name": OCTAVO,
        "kernel": sample["kernel"],
        "shape": sample["shape"],
        "moved_bytes": sample["moved_bytes"],
        "flops": sample["flops"],
        "floor_us": sample["floor_us"],
        "percent_of_floor": 100 * sample["floor_us"] / us[OCTAVO] if own else None,
        "us": us.get(OCTAVO),
        "us_min": min(own) if own else None,
        "us_max": max(own) if own else None,
        "fastest_rival": fastest,
        "fastest_rival_us": None if fastest is None else racing[fastest],
        **{f"{name.replace(' ', '_')}_us": time for name, time in us.items() if name != OCTAVO},
        "target": sample["target"],
        "reached": sample["reached"],
        "correct": correct(sample),
        "relative_error": sample["relative_error"],
        "tolerance": sample["tolerance"],
        "failed": "; ".join(f"{name}: {why}" for name, why in sample["failed"].items()) or None,
    }


def _reached(race: Race, sample: Sample, rates: Rates, fitted: Line | None) -> bool | None:
    """None where there is no target, or not what it is judged by."""
    if race.target is None or (race.fit == "judged" and fitted is None):
        return None
    us: Mapping[str, float] = {name: median(laps) for name, laps in sample["us"].items()}
    try:
        return race.target.reached(Times(us, sample["floor_us"], rates.read, rates.copy, fitted))
    except KeyError:  # a contender that the target compares with did not race
        return None


def _said(problem: Exception) -> str:
    """The end of what an exception says: compilers put the reason there."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[-300:]}"
