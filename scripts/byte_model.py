"""What decode steps read, in closed form, and from which context on a method reads less than dense attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.scripts import budgets

if TYPE_CHECKING:
    from octavo.core import Engine
    from octavo.core.interfaces import SparseMethod

FARTHEST = 1 << 20
"""Tokens up to which a context is looked for."""

GAIN = 1.3
GAIN_BATCHES = (1, 8)

NOTE = (
    "Pays from: the context in tokens from which a step under the method reads fewer bytes than a dense one (K, V and "
    "what is read to choose); weights and batch cancel out. +30 %: the context from which the bytes of a dense step, "
    "weights included, are 1.3 times the method's, with so many sequences in the batch. Predicted; an adaptive budget "
    "counts in full."
)


@dataclass(frozen=True)
class ByteModel:
    """Bytes of a step that decodes one token in each of b sequences with N tokens in the cache, itself included::

    W + b (K and V of the pages that are read + what is read to choose them)
    """

    engine: Engine
    weight_bytes: int

    @classmethod
    def of(cls, engine: Engine, model: Any) -> ByteModel:
        from octavo.scripts.decode_floor import weights_read

        return cls(engine, sum(weight.nbytes for weight in weights_read(model)))

    def read(self, method: SparseMethod | None, tokens: int) -> int:
        """Of one sequence, without weights."""
        return budgets.step_bytes(self.engine, method, tokens)

    def step(self, method: SparseMethod | None, tokens: int, batch: int) -> int:
        return self.weight_bytes + batch * self.read(method, tokens)

    def speedup(self, method: SparseMethod | None, tokens: int, batch: int) -> float:
        """Bytes of a dense step over those of the method's."""
        return self.step(None, tokens, batch) / self.step(method, tokens, batch)

    def pays_from(self, method: SparseMethod, gain: float = 1.0, batch: int = 1) -> int | None:
        """The fewest tokens, in whole pages, from which on ``speedup`` is above ``gain``; None below ``FARTHEST``.

        From the farthest context the search goes down in steps of 5 % while it pays, and then halves the last one: a
        gap that is shorter than that may be missed.
        """
        page = self.engine.config.text_page_tokens

        def pays(pages: int) -> bool:
            return self.speedup(method, pages * page, batch) > gain

        high = FARTHEST // page
        if not pays(high):
            return None
        low = high
        while low > 1 and pays(low):
            high, low = low, min(low - 1, int(low * 0.95))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return high * page


def with_break_even(
    rows: Sequence[Mapping[str, Any]], methods: Mapping[str, SparseMethod | None], model: ByteModel
) -> list[dict[str, Any]]:
    """Rows, those of sparse methods with the contexts from which they pay; None where there is no such context."""
    found: dict[str, dict[str, int | None]] = {"dense": {}}
    for name, method in methods.items():
        if method is not None:
            found[name] = {"break_even_tokens": model.pays_from(method)} | {
                f"plus_30_percent_tokens_batch_{batch}": model.pays_from(method, GAIN, batch) for batch in GAIN_BATCHES
            }
    return [{**row, **found.get(row["method"], {})} for row in rows]
