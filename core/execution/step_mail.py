"""What the host and a replayed step tell each other without a call for it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.execution.downloads import Download

TURNS = 4
"""More than the steps that may be under way, so that hardly any is waited for."""


class StepMail:
    """Table entries that have changed, for a step, and the tokens that it draws, from it; up to ``most`` of each. Both
    lie in pinned memory, in one of ``TURNS`` places that steps take in turn::

        host    told for turn t | launch, record |      wait for t, read its news | told for t + 2 | ...
        step t                  receive: entries -> tables ... send: tokens -> news, turn t + 1

    ``receive`` and ``send`` are the first and the last call of a program that is captured. A launch is the only call
    of CUDA's that a step takes then, beside the event that tells of its end.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.most = most
        self._turn = 0
        self._on_device = torch.zeros(1, dtype=torch.int64, device=device)
        on_gpu = device.type == "cuda"
        self._numbers = torch.full((TURNS, 2), -1, dtype=torch.int64, pin_memory=on_gpu)
        self._places = torch.zeros((TURNS, most), dtype=torch.int64, pin_memory=on_gpu)
        self._values = torch.zeros((TURNS, most), dtype=torch.int32, pin_memory=on_gpu)
        self._news = torch.zeros((TURNS, most), dtype=torch.int64, pin_memory=on_gpu)
        self._written = self._numbers.numpy(), self._places.numpy(), self._values.numpy()
        self._ended = [torch.cuda.Event() if on_gpu else None for _ in range(TURNS)]  # type: ignore[no-untyped-call]

    def tell(self, places: NDArray[np.int64], values: NDArray[np.int64]) -> None:
        """Have the next step that is launched begin by writing ``values`` at ``places`` of the tables, [n] of them."""
        at, count = self._turn % TURNS, len(places)
        ended = self._ended[at]
        if ended is not None:
            ended.synchronize()
        numbers, all_places, all_values = self._written
        all_places[at, :count], all_values[at, :count] = places, values
        numbers[at] = self._turn, count

    def tell_nothing(self) -> None:
        """The next step has nothing to write, though another was told something that then was not launched."""
        numbers, at = self._written[0], self._turn % TURNS
        if numbers[at, 0] == self._turn:
            numbers[at, 0] = -1

    def launched(self, columns: int) -> Download:
        """A step has been launched: what it draws, int64 [1, columns], and the next one's turn begins."""
        at = self._turn % TURNS
        self._turn += 1
        ended = self._ended[at]
        if ended is not None:
            ended.record()
        return Download(self._news[at : at + 1, :columns], ended)

    def receive(self, entries: Tensor) -> None:
        """Of a program: write what it was told to ``entries`` int32."""
        from octavo.kernels.triton import mail  # for GPUs alone; a CPU may have no Triton

        mail.receive(self._on_device, self._numbers, self._places, self._values, entries)

    def send(self, drawn: Tensor | None) -> None:
        """Of a program: let the host have ``drawn`` int64 [n], if anything; the next one's turn begins."""
        from octavo.kernels.triton import mail

        mail.send(self._on_device, drawn, self._news)

    def take_back(self) -> None:
        """A program has run that was not launched as a step."""
        self._on_device.fill_(self._turn)
