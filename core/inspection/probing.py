"""Instruments that look on while sparse methods choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from octavo.core.interfaces import PageView, Selection, SparseMethod

if TYPE_CHECKING:
    from octavo.core.engine import Engine


class AttentionProbe(Protocol):
    """Looks on while methods choose: at the first decode step of a request and every ``every``-th after it, in each
    layer where something was chosen."""

    @property
    def every(self) -> int: ...

    def observe(
        self, method: SparseMethod, q: Tensor, out: Tensor, selection: Selection, pages: PageView, rows: Sequence[int]
    ) -> None:
        """``q, out [b, Hq, D]``: the queries and what attention to ``selection`` gave. ``rows``: of the sequences whose
        turn it is. Must change nothing."""
        ...


def attach(engine: Engine, probe: AttentionProbe | None) -> None:
    """Let a probe look on from now on; None lets nobody. Steps at which it looks run eagerly, whatever the execution,
    and give the same tokens."""
    engine._runner.choosers.probe = probe
