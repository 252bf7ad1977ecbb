"""A pool over time: what every unit was used for after each step, stored by difference."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.core.inspection.page_census import CELL, HELD, HOST, IMAGE, SHARED, STATES, Cells, PageCensus

if TYPE_CHECKING:
    from octavo.core.engine import Engine

MOMENT = np.dtype(
    [
        ("step", "<i8"),
        ("seconds", "<f8"),
        ("hit_tokens", "<i8"),
        ("query_tokens", "<i8"),
        ("evictions", "<i8"),
        ("preemptions", "<i8"),
        ("running", "<i4"),
        ("waiting", "<i4"),
        ("slots_used", "<i8"),
        ("slots_held", "<i8"),
        ("units", "<i4", (len(STATES),)),
    ]
)
"""Numbers of one frame. Seconds are since the first; tokens, evictions and preemptions count since the engine began;
``slots_used`` of ``slots_held`` slots in held units hold tokens; ``units`` are the device's, by state, and under "host"
those of the host tier."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What is different from the frame before: ``cells`` (CELL [n]) of ``units`` (int32 [n], ascending)."""

    units: NDArray[np.int32]
    cells: Cells


class PageWatch:
    """Looks at an engine after every step: ``engine.watch = PageWatch()``; None (the default) stops it.

    The first frame differs from a pool of free units, each other one from the frame before. Memory is bounded: when
    there are ``max_frames`` frames, or more than ``max_changes`` changed units in all of them (12 bytes each), every
    second frame is merged into the one after it, and from then on only every second step is looked at, and so on. A
    merged frame has the state and numbers of its end, so nothing shown is ever between two states.

    A look costs some 30 microseconds of host time for each running sequence, and 6 for each thousand units of the pool.
    Do not measure speed with it.

    Attributes:
        frames: the differences, oldest first.
        moments: MOMENT [frames], see there.
        requests: ids; request r > 0 of a cell is ``requests[r - 1]``.
        unit_tokens: slots of a unit; device_units: units of the device's pool, at its largest. Cells behind them are of
            the host tier. Both are 0 before the first look.
    """

    def __init__(self, max_frames: int = 600, max_changes: int = 2_000_000) -> None:
        for name, value in (("max_frames", max_frames), ("max_changes", max_changes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 2:
                raise ValueError(f"{name} must be an integer of at least 2, got {value!r}")
        self.frames: list[Frame] = []
        self.unit_tokens = 0
        self.device_units = 0
        self._census = PageCensus()
        self._cells: Cells = np.zeros(0, CELL)
        self._moments: list[Cells] = []
        self._max_frames = max_frames
        self._max_changes = max_changes
        self._changes = 0
        self._every = 1
        self._steps = 0
        self._began = 0.0

    @property
    def moments(self) -> Cells:
        return np.concatenate(self._moments) if self._moments else np.zeros(0, MOMENT)

    @property
    def requests(self) -> list[str]:
        return self._census.requests

    def observe(self, engine: Engine) -> None:
        """A step of the engine has ended: take a frame, if this step's turn has come."""
        self._steps += 1
        if (self._steps - 1) % self._every:
            return
        now = time.perf_counter()
        if not self.frames:
            self.unit_tokens, self.device_units = engine.config.unit_tokens, engine._pool.most_units
            self._began = now
        cells = self._census.take(engine)
        before = self._cells if self.frames else np.zeros_like(cells)
        changed = np.flatnonzero(before.view(np.int64) != cells.view(np.int64)).astype(np.int32)
        self.frames.append(Frame(changed, cells[changed]))
        self._moments.append(self._moment(engine, cells, now - self._began))
        self._cells = cells
        self._changes += len(changed)
        while (len(self.frames) >= self._max_frames or self._changes > self._max_changes) and len(self.frames) > 1:
            self.thin()

    def thin(self) -> None:
        """Merge every second frame into the one after it, and look half as often from now on."""
        self._every *= 2
        odd = len(self.frames) % 2
        pairs = zip(self.frames[odd::2], self.frames[odd + 1 :: 2], strict=True)
        self.frames = self.frames[:odd] + [_merged(*pair) for pair in pairs]
        self._moments = self._moments[:odd] + self._moments[odd + 1 :: 2]
        self._changes = sum(len(frame.units) for frame in self.frames)

    def cells_at(self, frame: int) -> Cells:
        """CELL [1 + units] as they were at a frame."""
        cells = np.zeros_like(self._cells)
        for change in self.frames[: range(len(self.frames))[frame] + 1]:
            cells[change.units] = change.cells
        return cells

    def series(self) -> dict[str, NDArray[np.float64]]:
        """Shares over time, float64 [frames], NaN where nothing is there to be shared.

        ``hit_rate``: prompt tokens found in the prefix cache, of those looked up, since the engine began.
        ``utilisation``: slots with a token, of the slots in held units. ``in_use``: held units, of all.
        """
        moments = self.moments
        there = moments["units"][:, :HOST].sum(1)  # of the device; what it does not have yet comes behind
        held = moments["units"][:, [HELD, SHARED, IMAGE]].sum(1)
        return {
            "hit_rate": _share(moments["hit_tokens"], moments["query_tokens"]),
            "utilisation": _share(moments["slots_used"], moments["slots_held"]),
            "in_use": _share(held, there),
        }

    def _moment(self, engine: Engine, cells: Cells, seconds: float) -> Cells:
        scheduler = engine._scheduler
        device = cells[1 : 1 + self.device_units]
        held = np.isin(device["state"], (HELD, SHARED, IMAGE))
        units = np.bincount(device["state"], minlength=len(STATES))
        units[HOST] = (cells["state"] == HOST).sum()
        moment = np.zeros(1, MOMENT)
        moment[0] = (
            engine._steps,
            seconds,
            scheduler.hit_tokens,
            scheduler.query_tokens,
            engine._pool.evictions,
            scheduler.preemptions,
            len(scheduler.running),
            len(scheduler.waiting),
            int(device["tokens"][held].sum()),
            int(held.sum()) * self.unit_tokens,
            units,
        )
        return moment


def _merged(first: Frame, second: Frame) -> Frame:
    """Both differences as one; where both change a unit, the second holds."""
    kept = ~np.isin(first.units, second.units)
    units = np.concatenate([first.units[kept], second.units])
    order = np.argsort(units)
    return Frame(units[order], np.concatenate([first.cells[kept], second.cells])[order])


def _share(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    share = np.full(len(part), np.nan)
    np.divide(part, whole, out=share, where=whole > 0)
    return share
