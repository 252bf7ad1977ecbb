"""Servers without pages: each request reserves one contiguous stretch of memory when it begins."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.inspection.trace import Event, Trace

RULES: dict[str, Callable[[int, int], int]] = {
    "longest": lambda tokens, longest: longest,
    "power of two": lambda tokens, longest: min(1 << (tokens - 1).bit_length(), longest),
    "final length": lambda tokens, longest: tokens,
}
"""Slots to reserve for a request that will have ``tokens`` tokens, where none has more than ``longest``: what old
servers did, what one that guesses within a factor of two would do, and one that knows (Orca Max, Pow2 and Oracle in
Kwon et al., SOSP 2023)."""


@dataclass(frozen=True)
class Reserved:
    """Memory over a trace: slots summed over the steps, and used over held ones weighted by time."""

    held_slot_steps: int
    waste_slot_steps: int
    utilisation: float


def reserve(trace: Trace, rule: str, longest: int) -> Reserved:
    """Follow a trace without pages and without sharing. Memory is looked at as in ``octavo.scripts.replay``: once a
    step, when the step has stored its tokens."""
    lengths = trace.lengths().tolist()
    held = used = 0
    stored = [0] * trace.sequences
    samples: dict[int, tuple[float, int, int]] = {}
    columns = (trace.step, trace.time_s, trace.event, trace.sequence, trace.a)
    for step, time_s, event, sequence, a in zip(*(column.tolist() for column in columns), strict=True):
        if event == Event.OPEN:
            held += RULES[rule](lengths[sequence], longest)
        elif event == Event.GROW:
            used += a - stored[sequence]
            stored[sequence] = a
            samples[step] = time_s, held, used
        elif event == Event.CLOSE:
            held -= RULES[rule](lengths[sequence], longest)
            used -= stored[sequence]
    times, helds, useds = (np.array(column) for column in zip(*samples.values(), strict=True))
    lasting = np.diff(times, append=times[-1])
    return Reserved(
        held_slot_steps=int(helds.sum()),
        waste_slot_steps=int((helds - useds).sum()),
        utilisation=float((useds * lasting).sum() / (helds * lasting).sum()),
    )


def largest_batch(slots: NDArray[np.int64], memory: int) -> int:
    """How many requests that take so many slots fit at once, taken in their order and again from the start."""
    rounds, left = divmod(memory, int(slots.sum()))
    return rounds * len(slots) + int(np.searchsorted(np.cumsum(slots), left, side="right"))


class Regions:
    """First fit among the gaps of a contiguous memory; gaps are merged when a region comes back.

    ::

        _gaps   [(0, 3) . . . (9, 2) . . ]   (start, size), by start
    """

    def __init__(self, slots: int) -> None:
        self._gaps = [(0, slots)]

    def allocate(self, slots: int) -> int | None:
        """The first slot of a region, or None if no gap is large enough."""
        for at, (start, size) in enumerate(self._gaps):
            if size >= slots:
                self._gaps[at : at + 1] = [(start + slots, size - slots)] if size > slots else []
                return start
        return None

    def free(self, start: int, slots: int) -> None:
        at = bisect_left(self._gaps, (start, 0))
        if at < len(self._gaps) and self._gaps[at][0] == start + slots:
            slots += self._gaps.pop(at)[1]
        if at and sum(self._gaps[at - 1]) == start:
            at -= 1
            before, size = self._gaps.pop(at)
            start, slots = before, size + slots
        self._gaps.insert(at, (start, slots))
