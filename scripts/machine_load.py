"""How busy a machine is with other work: a time taken beside it says little."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WATCH_SECONDS = 0.5
QUIET_SHARE = 0.9


@dataclass(frozen=True)
class Load:
    """load_1m: the system's load average over a minute, this process included. free_cores: cores that stood idle while
    this process slept. cores: those that it may use."""

    load_1m: float
    free_cores: float
    cores: int

    @property
    def quiet(self) -> bool:
        """Whether at least 90 % of the cores that this process may use are free."""
        return self.free_cores >= QUIET_SHARE * self.cores


def watch(seconds: float = WATCH_SECONDS) -> Load:
    """Sleep, and see what the cores that this process may use do meanwhile (Linux, ``/proc/stat``)."""
    cores = os.sched_getaffinity(0)
    before = _idle_ticks(cores)
    time.sleep(seconds)
    idle = (_idle_ticks(cores) - before) / os.sysconf("SC_CLK_TCK") / seconds
    return Load(os.getloadavg()[0], min(idle, len(cores)), len(cores))


def busy_rounds(samples: Iterable[Mapping[str, Any]], *round_keys: str) -> list[str]:
    """A note, if some rounds of a run were timed on a machine that was not quiet; ``round_keys`` are the keys of a
    sample that tell rounds apart. A sample carries the fields of the ``Load`` that was seen before its round."""
    loads = {tuple(s[key] for key in round_keys): Load(s["load_1m"], s["free_cores"], s["cores"]) for s in samples}
    busy = [at for at, load in loads.items() if not load.quiet]
    if not busy:
        return []
    return [f"The machine was not quiet before {len(busy)} of {len(loads)} rounds: take the figures again."]


def _idle_ticks(cores: set[int]) -> int:
    """Clock ticks since boot that these cores spent idle or waiting for a disk."""
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *counts = line.split()
        if name.removeprefix("cpu").isdigit() and int(name.removeprefix("cpu")) in cores:
            ticks += int(counts[3]) + int(counts[4])
    return ticks
