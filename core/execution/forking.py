"""The samples of one request branch off when its prompt is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.execution.token_list import TokenList
from octavo.core.sequence import Sequence

if TYPE_CHECKING:
    from octavo.core.engine import Engine


def fork_samples(engine: Engine, first: Sequence) -> list[Sequence]:
    """The other samples of a request, sharing every page of the first; without a free place they wait."""
    request = first.request
    children = []
    while request.unforked:
        request.unforked -= 1
        child = Sequence(request, len(request.sequences), TokenList(request.prompt), engine._pool, engine._plan)
        child.adopt_prefix(first)
        engine._enter(request, child)
        if not engine._scheduler.run(child):
            child.rewind()
            engine._scheduler.add(child)
        elif engine.recorder is not None:
            engine.recorder.forked(child, first)
        children.append(child)
    return children
