"""Units that are dealt out run by run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.memory.page_pool import PagePool, Units

Slabs = NDArray[np.int32]


class SplitUnits:
    """Deals in runs: K and V of one head in one layer's part of a unit.

    A unit of ``unit_layers`` layers is as many *slabs*, each of ``kv_heads`` runs. A layer's kernel finds its KV
    through a table of slabs, so any slab serves any layer, and only the head is fixed::

        slab      unit 5: 15  16  17      unit 9: 27  28  29       unit_layers = 3, slab = unit * 3 + 0, 1, 2
        head 0            A   A   A               A   B   free
        head 1            A   B   free            free ...

    Heads that keep little leave runs for other sequences. A unit is held by the pool's count while one of its runs is
    in use, and goes back when none is. Where all heads take equally many runs, no unit is left in part.
    """

    def __init__(self, pool: PagePool, unit_layers: int, kv_heads: int) -> None:
        self.unit_layers = unit_layers
        self._pool = pool
        self._heads = kv_heads
        self._free = np.zeros((pool.most_units + 1, unit_layers, kv_heads), np.bool_)
        self._split = np.zeros(pool.most_units + 1, np.bool_)

    @property
    def units(self) -> Units:
        """The units that are split, ascending."""
        return np.flatnonzero(self._split).astype(np.int32)

    @property
    def free_runs(self) -> int:
        """Runs of split units that nobody uses."""
        return int(np.count_nonzero(self._free))

    def used_share(self, units: Units) -> NDArray[np.float64]:
        """Share of the runs of some split units that are in use, fp64 [n]."""
        shares: NDArray[np.float64] = 1.0 - self._free[units].mean((1, 2))
        return shares

    def units_for(self, runs: NDArray[np.integer]) -> int:
        """Units that ``runs`` [Hkv] runs of each head take from the pool."""
        missing = runs - self._free[self.units].sum((0, 1))
        return max(0, -(-int(missing.max()) // self.unit_layers))

    def allocate(self, runs: NDArray[np.integer]) -> list[Slabs]:
        """For every head as many slabs as ``runs`` [Hkv] says, ascending. Precondition: ``units_for(runs)`` units are
        available."""
        fresh = self._pool.allocate(self.units_for(runs))
        self._split[fresh] = True
        self._free[fresh] = True
        units = self.units
        free = self._free[units].reshape(-1, self._heads)
        parts = np.arange(self.unit_layers, dtype=np.int32)
        slabs: Slabs = (units[:, None] * self.unit_layers + parts).ravel().astype(np.int32)
        taken = [slabs[np.flatnonzero(free[:, head])[:count]] for head, count in enumerate(runs.tolist())]
        for head, own in enumerate(taken):
            self._free.reshape(-1, self._heads)[own, head] = False
        return taken

    def release(self, slabs: list[Slabs]) -> None:
        """Take back what ``allocate`` gave."""
        for head, own in enumerate(slabs):
            self._free.reshape(-1, self._heads)[own, head] = True
        touched = np.unique(np.concatenate(slabs) // self.unit_layers)
        whole = touched[self._free[touched].all((1, 2))]
        self._free[whole] = False
        self._split[whole] = False
        self._pool.release(whole)

    def check(self, used: list[list[Slabs]]) -> None:
        """Recount: ``used`` are the slabs of everybody who has some."""
        free = np.zeros_like(self._free)
        free[self.units] = True
        flat = free.reshape(-1, self._heads)
        for slabs in used:
            for head, own in enumerate(slabs):
                if not flat[own, head].all():
                    raise AssertionError(f"head {head} uses slabs {own.tolist()}, of which some are used already")
                flat[own, head] = False
        if not np.array_equal(free, self._free):
            wrong = np.unique(np.argwhere(free != self._free)[:, 0])
            raise AssertionError(f"runs of split units {wrong.tolist()} are marked as free and are not, or are free")
        whole = self.units[self._free[self.units].all((1, 2))]
        if len(whole):
            raise AssertionError(f"no run of split units {whole.tolist()} is used")
