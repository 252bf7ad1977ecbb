"""What heads chose step by step, recorded once, and how often it would have been in the frames under any policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.sparse.replacement.belady import Belady
from octavo.sparse.resident_sets import FrameMaps, Replacement


@dataclass(frozen=True)
class Choice:
    """One step of one layer: of b sequences, by the numbers ``sequences`` int64 [b], the ``pages`` int32 [b, Hkv, S]
    that heads chose among those that are away, -1 where nothing is meant, and their ``shares`` fp32 of the scores."""

    layer: int
    sequences: NDArray[np.int64]
    pages: NDArray[np.int32]
    shares: NDArray[np.float32]


@dataclass
class Recorder:
    """Takes down what is chosen (``FrameMaps.recorder``). Every choice is read back, so do not measure time
    meanwhile."""

    choices: list[Choice] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _begun: int = 0

    def opened(self, row: int) -> None:
        """A row of the maps is another sequence's from now on."""
        self._begun += 1
        self._numbers[row] = self._begun

    def chose(self, layer: int, rows: Tensor, pages: Tensor, is_read: Tensor, shares: Tensor | None) -> None:
        sequences = np.array([self._numbers.get(row, 0) for row in rows.tolist()], np.int64)
        known = torch.zeros_like(pages, dtype=torch.float32) if shares is None else shares.float()
        chosen = pages.masked_fill(~is_read, -1).to(torch.int32)
        used = sequences > 0
        self.choices.append(
            Choice(layer, sequences[used], chosen.cpu().numpy()[used], known.cpu().numpy().astype(np.float32)[used])
        )


@dataclass(frozen=True)
class Replayed:
    """Pages that were looked up, one a step, layer, KV head and choice, and those of them that were in no frame. A page
    that is chosen for the first time is in none under any policy: ``first`` of them."""

    lookups: int
    misses: int
    first: int

    @property
    def hit_rate(self) -> float:
        return 1 - self.misses / self.lookups if self.lookups else 0.0


def replay(choices: Sequence[Choice], frames: int, replacement: Replacement) -> Replayed:
    """Run recorded choices through frames that fill up on demand. With ``Belady()`` it is the bound.

    Raises:
        ValueError: a step chose more pages than there are frames.
    """
    if not choices:
        return Replayed(0, 0, 0)
    most = max(int((choice.pages >= 0).sum(2).max(initial=0)) for choice in choices)
    if most > frames:
        raise ValueError(f"a head chose {most} pages at once, and there are {frames} frames; give at least {most}")
    layers, heads = 1 + max(choice.layer for choice in choices), choices[0].pages.shape[1]
    maps = FrameMaps(frames, layers, heads, replacement, torch.device("cpu"))
    maps.widen(1 + max(int(choice.pages.max(initial=0)) for choice in choices))
    for _ in range(max(int(choice.sequences.max(initial=0)) for choice in choices)):
        maps.open()
    brings = _next_uses(choices) if isinstance(replacement, Belady) else [choice.shares for choice in choices]
    lookups = misses = 0
    for choice, shares in zip(choices, brings, strict=True):
        wanted = torch.from_numpy(choice.pages >= 0)
        pages = torch.from_numpy(choice.pages).long().clamp(min=0)
        _, missing, _ = maps.take(
            choice.layer, torch.from_numpy(choice.sequences), pages, wanted, wanted, torch.from_numpy(shares)
        )
        lookups += int(wanted.sum())
        misses += int(missing.sum())
    return Replayed(lookups, misses, _distinct(choices))


def _distinct(choices: Sequence[Choice]) -> int:
    """Distinct (sequence, layer, head, page)."""
    seen = set()
    for choice in choices:
        for number, pages in zip(choice.sequences.tolist(), choice.pages, strict=True):
            seen |= {(number, choice.layer, head, page) for head, row in enumerate(pages.tolist()) for page in row}
    return len([key for key in seen if key[3] >= 0])


def _next_uses(choices: Sequence[Choice]) -> list[NDArray[np.float64]]:
    """Of every page that is chosen, the number of the choice that it is in next, fp64 [b, Hkv, S]; infinite: in
    none."""
    later: dict[tuple[int, int], NDArray[np.float64]] = {}  # (sequence, layer) -> [Hkv, P + 1]; the last is for -1
    width = 2 + max(int(choice.pages.max(initial=0)) for choice in choices)
    found = []
    for at in reversed(range(len(choices))):
        choice = choices[at]
        uses = np.full(choice.pages.shape, np.inf)
        for b, number in enumerate(choice.sequences.tolist()):
            key = number, choice.layer
            known = later.setdefault(key, np.full((choice.pages.shape[1], width), np.inf))
            for head, pages in enumerate(choice.pages[b]):
                uses[b, head] = known[head, pages]
                known[head, pages] = at
                known[head, -1] = np.inf
        found.append(uses)
    return found[::-1]
