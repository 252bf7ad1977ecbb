"""Functions of many small operations, whose launches take the host longer than the device needs: replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Results = tuple[Tensor, ...]

MOST = 1024
"""Calls that are kept. With more, which differ in the number of sequences, say, all are captured anew."""


@dataclass
class _Captured:
    graph: Any
    given: Results
    found: Results


class CapturedCalls:
    """Calls functions of tensors on a GPU with one launch each; elsewhere it calls them, and that is all.

    Calls are told apart by a key, which stands for everything but the values in the tensors: the function, their
    shapes, and the memory that the function reads or writes besides them. The first call of a key is an ordinary one,
    which compiles what it needs. The second is captured, and from then on it is replayed::

        given [ its own memory ] <- copies of the arguments
        graph                       the function, from there to
        found [ its own memory ]    the results, which the next call of the key writes over
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._seen: dict[Hashable, _Captured | None] = {}
        self._pool: Any = None

    def clear(self) -> None:
        """Forget all keys, since what their functions read or write besides arguments lies elsewhere now."""
        self._seen, self._pool = {}, None

    def __call__(self, key: Hashable, function: Callable[..., Results], *given: Tensor) -> Results:
        """``function(*given)``, which makes the host wait for nothing and whose results' shapes follow from the key."""
        if self._stream is None:
            return function(*given)
        if key not in self._seen:
            if len(self._seen) >= MOST:
                self.clear()
            self._seen[key] = None
            return function(*given)
        captured = self._seen[key]
        if captured is None:
            captured = self._seen[key] = self._capture(function, given)
        for own, value in zip(captured.given, given, strict=True):
            own.copy_(value)
        captured.graph.replay()
        return captured.found

    def _capture(self, function: Callable[..., Results], given: Results) -> _Captured:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        own = tuple(value.clone() for value in given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads, which may be encoding images, are none of the capture's business.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                found = function(*own)
            finally:
                graph.capture_end()
        return _Captured(graph, own, found)
