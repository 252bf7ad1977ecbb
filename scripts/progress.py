"""Progress of anything that takes over a second: a live bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

# A log has no width; rich would take 80 columns and break every table.
console = Console(width=None if sys.stdout.isatty() else 180)

Advance = Callable[[str], None]


@contextmanager
def counting(title: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Counts ``done`` up to ``total``; the function that it yields ends one piece and prints its line."""
    width = len(str(total))
    count = done
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    if not console.is_terminal:
        _line(f"{title}: {total} to do, {done} done before")
    with bar:
        task = bar.add_task(title, total=total, completed=done)

        def advance(line: str) -> None:
            nonlocal count
            count += 1
            _line(f"[{count:>{width}}/{total}] {line}")
            bar.advance(task)

        yield advance


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """A single long step: a spinner on a terminal, else its title and how long it took."""
    start = time.perf_counter()
    if console.is_terminal:
        with console.status(title):
            yield
    else:
        _line(f"{title} ...")
        yield
    _line(f"{title}: {time.perf_counter() - start:.1f} s")


def _line(text: str) -> None:
    # Items are code and file names: neither markup nor wrapping must touch them.
    console.print(text, markup=False, highlight=False, soft_wrap=True)
