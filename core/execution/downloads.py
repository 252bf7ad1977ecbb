"""News on their way from the device to the host, begun now and read later."""

from __future__ import annotations

import torch
from torch import Tensor

Landing = tuple[Tensor, torch.cuda.Event | None]
"""Host memory, and the event that tells when it is written; None where it is written at once."""


class Download:
    """Values on their way into ``host`` memory, waited for once: they are there when ``event`` is over (None: now).

    ``spare``: where its landing goes then, to be used again.
    """

    def __init__(self, host: Tensor, event: torch.cuda.Event | None, spare: list[Landing] | None = None) -> None:
        self._landing: Landing = host, event
        self._spare = spare

    def wait(self) -> Tensor:
        """The values, once they are there."""
        host, event = self._landing
        if event is None:
            return host
        event.synchronize()
        values = host.clone()
        if self._spare is not None:
            self._spare.append(self._landing)
        return values


def download(source: Tensor, spare: list[Landing]) -> Download:
    """Begin to copy a device tensor to the host.

    ``spare`` are landings of earlier downloads of this shape and dtype, to be used again: pinned memory and an event
    that are had anew cost more than the copy.
    """
    if source.device.type != "cuda":
        return Download(source.clone(), None)
    if spare:
        host, event = spare.pop()
    else:
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    host.copy_(source, non_blocking=True)
    if event is not None:
        event.record()
    return Download(host, event, spare)
