"""Pages of images that heads of a sequence do without, and that its later tokens may ask back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.compression.interfaces import Recalling
from octavo.core.memory.host_tier import HostTier
from octavo.core.memory.page_layout import PageLayout

if TYPE_CHECKING:
    from octavo.core.compression.sequence_context import SequenceContext


@dataclass(eq=False)
class Recallable:
    """All P full pages of a sequence's images, as they were when it was compressed: a part of the kept set, which never
    changes.

    They are in one of two places: in the host tier, pinned, from where runs come to the ``Frames`` of a sequence; or,
    where nothing moves, in the sequence's own pages. What a head keeps of them is in the kept set as well, so it asks
    for the others alone::

        images        [p0 p1 p2 p3]  [p4 p5 p6]     digests of all stay on the device
        head 0 keeps   x     x           x
        head 1 keeps      x  x        x
        host tier     [h0 h1 h2 h3]  [h4 h5 h6]     up to U units each

    Attributes:
        pages: their numbers in the sequence.
        valid: int32 [P, U], tokens in each unit; 0 in those that a page does not have.
        is_kept: bool [L, Hkv, P], for the L layers of the first group.
        budget: int64 [L, Hkv], how many each head keeps.
        misses: of each layer, whether one of its heads does without some.
        parts: digests [P + 1, L, Hkv, ...]; the last row is nobody's.
        frames: the most pages that a head reads besides those that it keeps.
        host_pages: ids in the host tier, if they are there.
        host_units: int32 [1, P, slices, U] there; 0, which is nobody's, where a page has no unit.
        entries: int32 [L, P, U] of slabs, where nothing moves.
    """

    recall: Recalling
    pages: list[int]
    valid: Tensor
    is_kept: Tensor
    budget: Tensor
    misses: list[bool]
    parts: Mapping[str, Tensor]
    frames: int
    host_pages: list[int] = field(default_factory=list)
    host_units: Tensor | None = None
    entries: Tensor | None = None
    _host: HostTier | None = None

    @classmethod
    def of(
        cls, recall: Recalling, context: SequenceContext, layout: PageLayout, end: int, kept: Tensor
    ) -> Recallable | None:
        """Of the images before token ``end``, the beginning of a page, and the tokens that are kept, bool [L, Hkv, N],
        where no token is missing yet; None if there are none."""
        pages = [
            page
            for item in context.items
            if item.start < end
            for page in range(layout.page_of(item.start), layout.page_of(min(item.end, end) - 1) + 1)
        ]
        if not pages:
            return None
        is_kept = kept[:, :, [layout.first_token(page) for page in pages]]
        return cls(
            recall=recall,
            pages=pages,
            valid=torch.from_numpy(_valid(layout, pages)).to(kept.device),
            is_kept=is_kept,
            budget=is_kept.sum(2),
            misses=(~is_kept).flatten(1).any(1).tolist(),
            parts=_digests(recall, context, layout, pages),
            frames=min(recall.frames(len(pages)), len(pages)),
        )

    @property
    def units(self) -> int:
        """Units of the largest page, in a slice."""
        return self.valid.shape[1]

    def frame_units(self, slices: int) -> int:
        """Units of the pool that frames for them take."""
        return self.frames * self.units * slices

    def shelve(self, host: HostTier, pages: list[int], slices: int) -> None:
        """They lie in these pages of the host tier, each of which has a pin for this."""
        units = np.zeros((1, len(pages), slices, self.units), np.int32)
        for at, page in enumerate(pages):
            own = host.units_of(page).reshape(slices, -1)
            units[0, at, :, : own.shape[1]] = own
        self._host, self.host_pages = host, pages
        self.host_units = torch.from_numpy(units).to(self.valid.device)

    def release(self) -> None:
        """Nobody asks for them any more. The host's pages stay findable, until others need their room."""
        for page in reversed(self.host_pages):
            assert self._host is not None
            self._host.unpin(page)
        self.host_pages = []


def _valid(layout: PageLayout, pages: list[int]) -> NDArray[np.int32]:
    units, unit_tokens = max(map(layout.page_entries, pages)), layout.unit_tokens
    tokens = np.array([layout.end_token(page) - layout.first_token(page) for page in pages])
    return np.clip(tokens[:, None] - np.arange(units) * unit_tokens, 0, unit_tokens).astype(np.int32)


def _digests(recall: Recalling, context: SequenceContext, layout: PageLayout, pages: list[int]) -> dict[str, Tensor]:
    """Those of pages with equally many tokens are made at once, so that none sees an empty slot."""
    alike: dict[int, list[int]] = defaultdict(list)
    for at, page in enumerate(pages):
        alike[layout.end_token(page) - layout.first_token(page)].append(at)
    parts: dict[str, Tensor] = {}
    for number, layer in enumerate(context.layers):
        held = context.held(layer)
        for tokens, rows in alike.items():
            first = torch.tensor([layout.first_token(pages[row]) for row in rows])
            inside = (first[:, None] + torch.arange(tokens)).to(held.keys.device)  # [n, tokens]
            k, v = (
                side[:, inside].transpose(0, 1)[:, None] for side in (held.keys, held.values)
            )  # [n, 1, Hkv, tokens, D]
            for name, part in recall.digest.compute(k, v, (layer,)).items():
                if name not in parts:
                    shape = len(pages) + 1, len(context.layers), *part.shape[2:]
                    parts[name] = torch.full(shape, torch.nan, dtype=held.keys.dtype, device=held.keys.device)
                parts[name][rows, number] = part[:, 0].to(held.keys.dtype)
    return parts
