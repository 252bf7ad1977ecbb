"""The next free run that is long enough, going on from where the last search ended."""

from __future__ import annotations

import numpy as np

from octavo.core.policies.first_fit import FirstFitAllocator
from octavo.core.policies.unit_allocator import Units


class NextFitAllocator(FirstFitAllocator):
    """First fit with a roving hint: the first fitting run that begins at the hint or after it, else, from unit 1 on
    again, the first of all. Spreads use over the pool instead of filling small holes at its start again and again.

    What ``near`` places does not move the hint.
    """

    def __init__(self, total_units: int) -> None:
        super().__init__(total_units)
        self._hint = 1

    def _choose(self, starts: Units, lengths: Units, units: int) -> int | None:
        fits = np.flatnonzero(lengths >= units)
        if len(fits) == 0:
            return None
        index = int(fits[np.searchsorted(starts[fits], self._hint) % len(fits)])
        self._hint = int(starts[index]) + units
        return index
