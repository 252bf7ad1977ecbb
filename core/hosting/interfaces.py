"""What a placement in the host tier and the engine ask of one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from octavo.core.interfaces import LayerTraits, PageView, Selection


class ResidentSets(Protocol):
    """Which page is in which frame: for each sequence, layer and KV head a map between F frames of the device and the
    sequence's pages. Row 0 is nobody's. Only placements ask for more than is said here."""

    def open(self) -> int:
        """A row of empty frames."""
        ...

    def close(self, row: int) -> None: ...

    def forget(self, row: int) -> None:
        """A row's frames are empty."""
        ...

    def widen(self, pages: int) -> None:
        """Room for pages 0 to ``pages`` (exclusive)."""
        ...

    def check(self, row: int, pages: int) -> None:
        """Raises AssertionError where a row's two maps disagree, or a frame has a page of ``pages`` or more."""
        ...


class FrameSets(ResidentSets, Protocol):
    """Those that are asked for pages by the engine itself."""

    def take(
        self, layer: int, rows: Tensor, pages: Tensor, wanted: Tensor, read: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Let ``pages`` int64 [b, Hkv, S] have frames in a layer of the maps, where ``wanted`` bool says so, and note
        those that are ``read`` now: frames int64 [b, Hkv, S], which of the wanted do not hold their page yet, and which
        had come ahead."""
        ...


@dataclass(frozen=True)
class Hosting:
    """How a method's sequences share their pages between the device and the host tier.

    Attributes:
        frames: pages of the device that a sequence gets for whatever it reads from the host, F.
        tail: full pages at the end that stay in the block table, besides the open one.
        whole_layers: layers that read every page; their part of all pages stays on the device.
        sets: makes the maps of an engine: (layers, KV heads, device).
        foresees: whether the method looks ahead by queries of layers to come (``LooksAhead``).
    """

    frames: int
    tail: int
    whole_layers: tuple[int, ...]
    sets: Callable[[int, int, torch.device], ResidentSets]
    foresees: bool = False


@dataclass(frozen=True)
class Foretold:
    """What a layer is expected to ask in this step: ``q`` [n, Hq, D], of the step's rows from ``start`` on."""

    layer: int
    start: int
    q: Tensor
    traits: LayerTraits


class LooksAhead(Protocol):
    """What a method also has whose pages lie in the host tier."""

    def look_ahead(self, selection: Selection | None, foretold: Foretold | None, pages: PageView) -> None:
        """Called when the present layer has what it reads, ``selection`` (None: all pages), and before it attends:
        whatever is fetched ahead now comes while it does, and while the rest of the layer is computed. ``foretold``
        are the next layer's queries of these sequences, as far as they are known."""
        ...


class AwayPages(Protocol):
    """The pages of a step's b sequences that are in the host tier alone: of each the first ``count`` int64 [b].
    ``rows`` int64 [b] are the sequences' rows of ``sets``."""

    sets: Any
    rows: Tensor
    count: Tensor

    def entries(self, layer: int, frames: Tensor) -> Tensor:
        """Table entries int32 [b, Hkv, S * units of a page] of ``frames`` int64 [b, Hkv, S]."""
        ...

    def fetch(self, layer: int, pages: Tensor, frames: Tensor, missing: Tensor, *, ahead: bool = False) -> None:
        """Bring the runs of ``pages`` int64 [b, Hkv, S] in one layer into ``frames``, where ``missing`` is true: before
        this layer attends, or, ``ahead``, some time before it is asked for the next time."""
        ...

    def following(self, layer: int) -> int | None:
        """The next layer that reads what it chooses out of frames, if the model has one."""
        ...

    def counted(self, lookups: Tensor, misses: Tensor, prefetched_read: Tensor) -> None:
        """So many pages were looked up, not found in a frame, and found because they had come ahead: integer [b]."""
        ...
