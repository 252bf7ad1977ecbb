"""A few numbers a step on their way into a tensor on the device, through memory that is had once."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TURNS = 4
"""Host buffers. More than the steps that may be under way, so that hardly any is waited for."""


class StagedWrites:
    """Writes up to ``most`` int32 at places of their own, in the order of the stream.

    ::

        host, pinned    [ places int64 [most] | values int32 [most] ]      one of ``TURNS``
                                   | one copy
        device          [ places int64 [most] | values int32 [most] ]  -> index_copy_ into the target

    Every write is of one shape, so that the device's calls are two, and tensors are neither made nor sliced: where
    there are fewer numbers the last is written again.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.most = most
        self._sent = torch.empty(most + (most + 1) // 2, dtype=torch.int64, device=device)
        self._places, self._values = self._sent[:most], self._sent[most:].view(torch.int32)[:most]
        self._turns = cycle([_Turn(most, device) for _ in range(TURNS)])

    def write(self, target: Tensor, places: NDArray[np.int64], values: NDArray[np.int64]) -> None:
        """Let ``target`` int32 [n] have ``values`` at ``places``, of which there are 1 to ``most``, each once."""
        turn, count = next(self._turns), len(places)
        if turn.copied is not None:
            turn.copied.synchronize()
        turn.places[:count], turn.places[count:] = places, places[-1]
        turn.values[:count], turn.values[count:] = values, values[-1]
        self._sent.copy_(turn.host, non_blocking=True)
        if turn.copied is not None:
            turn.copied.record()
        target.index_copy_(0, self._places, self._values)


class _Turn:
    """A host buffer, which may be written to once it is ``copied``."""

    def __init__(self, most: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.empty(most + (most + 1) // 2, dtype=torch.int64, pin_memory=on_gpu)
        self.places: NDArray[np.int64] = self.host[:most].numpy()
        self.values: NDArray[np.int32] = self.host[most:].view(torch.int32)[:most].numpy()
        self.copied: torch.cuda.Event | None = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
