"""Copies that a device makes beside the model's work, some time before a layer needs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class CopiesAhead:
    """Copies for layers to come, in the order of one side stream of a GPU; elsewhere each is made at once::

        main stream   ... fetch l | attend l | MLP l | QKV l+1, choose | wait | fetch l+1 | attend l+1 ...
                               \\                                        /
        side stream             copy for l+1 ---------------------------

    What keeps a frame from being written while it is read, or read before it is written:

    - A copy begins after all that the main stream was given before it: whoever read the frame's former run, which was
      the same layer in an earlier step, is done.
    - A layer waits for its copies before it fetches what is missing still, so that the fetch may write to a frame whose
      page has made room again, and before it attends. Copies are made in order: who waits for the last of a layer has
      waited for all before it.
    - Frames that a sequence gave back may be copied to until ``wait_all``, which comes before anybody else's pages are
      written there.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._done: dict[int, torch.cuda.Event] = {}

    def add(self, layer: int, copy: Callable[[], None], *read: Tensor) -> None:
        """Let ``copy`` run some time before ``wait(layer)`` is over. ``read`` are tensors that it reads and that
        nobody else keeps."""
        if self._stream is None:
            copy()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copy()
            self._done[layer] = self._stream.record_event()
        for tensor in read:
            tensor.record_stream(self._stream)

    def wait(self, layer: int) -> None:
        """What the device is given from now on comes after the copies for a layer."""
        if layer in self._done:
            torch.cuda.current_stream().wait_event(self._done.pop(layer))

    def wait_all(self) -> None:
        """What the device is given from now on comes after all copies."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._done = {}
