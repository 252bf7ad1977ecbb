"""A pass of an engine that is there to be looked at, for the page map of a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts.progress import waiting

if TYPE_CHECKING:
    from octavo.core import Engine


def watched_pass(engine: Engine, serve: Callable[[], object]) -> PageWatch:
    """The pool while ``serve`` gives the engine work, to the end of it.

    For experiments that measure time: looking takes about a millisecond a step, so what was measured is served once
    more. The engine is not watched any longer when this returns.
    """
    watch = engine.watch = PageWatch()
    with waiting("one more pass, for the page map"):
        serve()
    engine.watch = None
    return watch
