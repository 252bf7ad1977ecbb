"""Small host arrays on their way to the device, without the host waiting for what the device does."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of an array on the device, in the order of the stream.

    A plain copy from pageable memory would wait until the device has done all that it was given before. Pinned memory
    comes from torch's cache, which keeps it until the copy has been made.
    """
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


Landing = tuple[Tensor, torch.cuda.Event | None]
"""Host memory, and the event that tells when it is written; None where it is written at once."""


class Download:
    """A device tensor's way to the host, begun now and waited for later, once.

    ``spare`` are landings of earlier downloads of this shape and dtype, to be used again: pinned memory and an event
    that are had anew cost more than the copy.
    """

    def __init__(self, source: Tensor, spare: list[Landing] | None = None) -> None:
        self._spare = [] if spare is None else spare
        if source.device.type != "cuda":
            self._landing: Landing = source.clone(), None
            return
        if self._spare:
            self._landing = self._spare.pop()
        else:
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._landing = host, torch.cuda.Event()  # type: ignore[no-untyped-call]
        host, event = self._landing
        host.copy_(source, non_blocking=True)
        if event is not None:
            event.record()

    def wait(self) -> Tensor:
        """The values, once they are there."""
        host, event = self._landing
        if event is None:
            return host
        event.synchronize()
        values = host.clone()
        self._spare.append(self._landing)
        return values
