"""What a sparse method may look at where sequences have dropped tokens (interfaces.PageView)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Sequential
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.core.compression.kept_set import KeptSet
from octavo.core.compression.kept_tables import KeptTables
from octavo.core.execution.page_view import StepPages
from octavo.core.interfaces import LayerTraits, Selection
from octavo.core.step_plan import Chunk
from octavo.kernels import ops


@dataclass(kw_only=True)
class KeptPages(StepPages):
    """``StepPages`` of compressed sequences: every layer and head has pages of its own, each layer as many as it keeps.
    What it keeps fills whole pages, as many for each of its heads, and all since are pages of the sequence::

        head 0   [ 0 4 5 9 | 12 20 21 22 | 40 41 42 43 | 44 45 . . ]     positions; pages of 4
        head 1   [ 0 1 2 3 |  7 30 31 33 | 40 41 42 43 | 44 45 . . ]
                   ^ digests of the kept set               ^ open
                                           ^ digests of the pages since, ``first_units`` int64 [b, T]

    ``kv`` is the pool of slabs, and ``n_pages``, ``max_pages`` and ``slots`` are those of the present layer.
    ``tokens`` are the lengths of the sequences.
    """

    kept: KeptTables
    sets: Sequential[KeptSet]
    tokens: Sequential[int]
    _read: Tensor | None = field(default=None, init=False)

    @classmethod
    def of(cls, pages: StepPages, kept: KeptTables, chunks: Sequential[Chunk]) -> KeptPages:
        """Of the sequences of some chunks, all of which have dropped tokens, and the ``pages`` that they would have if
        they had not; but ``first_units`` are those of the pages since."""
        sets = [chunk.sequence.kept for chunk in chunks if chunk.sequence.kept is not None]
        return cls(
            kv=kept.kv,
            backend=pages.backend,
            plan=pages.plan,
            page_tokens=pages.page_tokens,
            tables=pages.tables,
            slots=pages.slots,
            q_pos=pages.q_pos,
            n_pages=pages.n_pages,
            max_pages=pages.max_pages,
            seeds=pages.seeds,
            first_units=pages.first_units,
            parts=pages.parts,
            kept=kept,
            sets=sets,
            tokens=[chunk.end for chunk in chunks],
        )

    def enter(self, layer: int, traits: LayerTraits) -> None:
        self._settle()
        super().enter(layer, traits)
        self.slots = self.kept.slots[self.group_layer][None]
        self.n_pages = (self.lengths + self.page_tokens - 1) // self.page_tokens
        self.max_pages = max(self._pages)

    @property
    def _pages(self) -> tuple[int, ...]:
        """Pages of each sequence, the open one included."""
        seen = (s.tokens[self.group_layer] + n - s.end for s, n in zip(self.sets, self.tokens, strict=True))
        return tuple(-(-n // self.page_tokens) for n in seen)

    def _settle(self) -> None:
        """Take down what has been read of the present layer."""
        if self._page_elements or self._token_elements:
            read = super().elements_read
            self._read = read if self._read is None else self._read + read
            self._page_elements, self._token_elements, self._chosen_elements = 0, 0, None

    @property
    def table(self) -> Tensor:
        return self.kept.tables[self.group_layer][None]

    @property
    def unit_layer(self) -> int:
        return 0

    @property
    def elements_read(self) -> Tensor:
        self._settle()
        return torch.zeros_like(self.n_pages, dtype=torch.int64) if self._read is None else self._read

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        return super().once((key, self._pages), make)

    def digest(self, part: str, channels: Tensor | None = None) -> Tensor:
        rows = self._rows(part)
        if channels is None:
            self._page_elements += rows[0, 0].numel()
            return rows
        self._page_elements += rows[0, 0, ..., 0].numel() * channels.shape[2]
        return rows.gather(4, channels[:, None, :, None].expand(*rows.shape[:4], -1))

    def digest_at(self, part: str, at: Tensor) -> Tensor:
        rows = self._rows(part).transpose(1, 2)  # [b, Hkv, P, ...]
        self._count_full(at, rows[0, 0, 0].numel())
        batch, heads = (torch.arange(n, device=at.device) for n in rows.shape[:2])
        return rows[batch[:, None, None], heads[:, None], at]

    def bounds(self, q: Tensor, per_query_head: bool = False) -> Tensor:
        low, high = (self.digest(part).flatten(0, 1)[:, None] for part in ("min", "max"))  # one layer
        rows = torch.arange(len(low), device=q.device).view(len(q), -1)
        bounds: Tensor = ops.page_score(q, low, high, 0, rows, self.n_pages, per_query_head, self.backend)
        return bounds

    def top(self, scores: Tensor, budget: Tensor, keep: Tensor, most: int) -> Selection:
        none = torch.zeros((len(scores), self.max_pages * self.page_units), dtype=torch.int32, device=scores.device)
        pages, counts, _, _ = ops.page_topk(  # whose one table is for all heads, so ``gather`` lists the entries
            scores, budget, keep, self.n_pages, self.lengths, none, self.page_tokens, self.page_units, most,
            self.backend,
        )  # fmt: skip
        self._scores = scores
        return Selection(pages, counts)

    def _rows(self, part: str) -> Tensor:
        """[b, P, Hkv, ...]: digests of what is kept, then those of the full pages since; NaN behind."""
        at, store = self.group_layer, self.parts[part]
        since = store[self.first_units, at]  # [b, T, Hkv, ...]
        rows = since.new_full((len(since), self.max_pages, *since.shape[2:]), torch.nan)
        for row, kept in enumerate(self.sets):
            n = kept.tokens[at] // self.page_tokens
            rows[row, :n] = kept.digests[part][at].transpose(0, 1)[:n]
            rows[row, n : n + since.shape[1]] = since[row, : self.max_pages - n]
        return rows
