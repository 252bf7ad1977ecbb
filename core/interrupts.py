"""Ctrl-C between two states of an engine, never in the middle of one."""

from __future__ import annotations

import _signal as signal  # without the enumerations that ``signal`` turns handlers into, and out of: 7 us a step
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_before: Callable[..., Any] | None = None  # what Ctrl-C does outside the block that holds it back; None outside of all
_waiting: list[tuple[Any, ...]] = []  # what the handler that was there before gets, once the block ends


def _wait(*args: Any) -> None:
    _waiting.append(args)


@contextmanager
def held() -> Iterator[None]:
    """Within the block Ctrl-C waits for its end: pages, tables and queues change together or not at all.

    Only the main thread gets Ctrl-C, so elsewhere, and within another such block, it changes nothing. Whatever handler
    there is gets the signal afterwards; costs a microsecond or two.
    """
    global _before
    handler = signal.getsignal(signal.SIGINT)
    if _before is not None or threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    try:
        _before = handler
        signal.signal(signal.SIGINT, _wait)
        yield
    finally:
        _before = None
        signal.signal(signal.SIGINT, handler)
        _deliver(handler)


@contextmanager
def let_through() -> Iterator[None]:
    """Within ``held``: a stretch that is long, and may end anywhere."""
    handler = _before
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        _deliver(handler)
        yield
    finally:
        if _before is not None:  # Ctrl-C may have come just where ``with`` ends, and this is garbage that ends later
            signal.signal(signal.SIGINT, _wait)


def _deliver(handler: Callable[..., Any]) -> None:
    if _waiting:
        args = _waiting[0]
        _waiting.clear()
        handler(*args)
