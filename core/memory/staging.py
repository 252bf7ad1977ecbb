"""Units between a GPU and pinned memory in long pieces: gathered on the device, moved by its copy engine."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels import ops

Units = NDArray[np.int32]

BUFFER_BYTES = 32 << 20
"""Of each of the two buffers: long enough to hide the launch of a copy, short enough that the first comes soon."""

LONG_RUN_BYTES = 1 << 20
"""Mean length of the runs in host memory from which the copy engine beats a kernel that reads host memory itself."""


def host_runs(units: Units) -> list[slice]:
    """Where ascending host ``units`` int32 [n] follow on one another: slices that cover them."""
    cuts = np.flatnonzero(np.diff(units) != 1) + 1
    return [slice(start, stop) for start, stop in pairwise([0, *cuts.tolist(), len(units)])]


class Staging:
    """Two buffers on the device, in which units lie as they lie in host memory::

        device pool  [.][b][.][a][.][c]       units anywhere
                          \\  |     |           a kernel gathers (or scatters) at the device's own rate
        buffer       [a][b][c]                while the other buffer
                      | one copy a run        is on the bus
        host pool    [.][a][b][c][.]

    Kernels run on the current stream and copies on one of their own; each waits for the other's last use of a buffer.
    """

    def __init__(self, kv: Tensor) -> None:
        self.units = max(1, BUFFER_BYTES // kv[0].nbytes)
        self._buffers = [kv.new_empty((self.units + 1, *kv.shape[1:])) for _ in range(2)]  # unit 0 is scratch
        self._copies = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]

    def move(self, kv: Tensor, host: Tensor, pairs: Units, *, out: bool, backend: str) -> None:
        """Copy units, ``pairs`` int32 [n, 2] of (device unit, host unit) in ascending order of the host's.

        ``out`` from ``kv`` to ``host``, otherwise from ``host`` to ``kv``. Whatever the current stream runs later sees
        the copies done.
        """
        compute = torch.cuda.current_stream(kv.device)
        self._copies.wait_stream(compute)
        free = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
        for number, start in enumerate(range(0, len(pairs), self.units)):
            part = pairs[start : start + self.units]
            buffer, event = self._buffers[number % 2], free[number % 2]
            places = np.arange(1, 1 + len(part), dtype=np.int32)
            if out:
                compute.wait_event(event)
                self._exchange(kv, buffer, part[:, 0], places, backend)
                self._copies.wait_stream(compute)
                self._copy(host, buffer, part[:, 1], out=True)
                event.record(self._copies)
            else:
                self._copies.wait_event(event)
                self._copy(host, buffer, part[:, 1], out=False)
                compute.wait_stream(self._copies)
                self._exchange(buffer, kv, places, part[:, 0], backend)
                event.record(compute)
        compute.wait_stream(self._copies)

    def _exchange(self, source: Tensor, target: Tensor, sources: Units, targets: Units, backend: str) -> None:
        pairs = torch.from_numpy(np.stack([sources, targets], 1)).to(source.device, non_blocking=True)
        ops.transfer(source, target, pairs, backend)

    def _copy(self, host: Tensor, buffer: Tensor, units: Units, *, out: bool) -> None:
        with torch.cuda.stream(self._copies):
            for run in host_runs(units):
                there = host[int(units[run.start]) : int(units[run.stop - 1]) + 1]
                here = buffer[1 + run.start : 1 + run.stop]
                if out:
                    there.copy_(here, non_blocking=True)
                else:
                    here.copy_(there, non_blocking=True)
