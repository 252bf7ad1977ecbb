"""Page policies whose page does not depend on the segment: a number, or a multiple of another page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FixedPages:
    """The same page for every segment, whatever its length.

    Raises:
        ValueError: ``tokens`` is no integer of at least 1.
    """

    tokens: int

    def __post_init__(self) -> None:
        check_size("tokens of FixedPages", self.tokens)

    @property
    def grain(self) -> int:
        return self.tokens

    def page_tokens(self, segment_tokens: int | None) -> int:
        return self.tokens


@dataclass(frozen=True)
class RatioPages:
    """Pages ``ratio`` times as large as pages ``of`` so many tokens, to the nearest multiple of ``grain``: images get
    1.5 x 16 = 24 tokens, three units of 8 where text takes two.

    Raises:
        ValueError: ``of`` or ``grain`` is no integer of at least 1, or ``ratio`` is no finite number above 0.
    """

    ratio: float = 1.5
    of: int = 16
    grain: int = 8

    def __post_init__(self) -> None:
        check_positive("ratio of RatioPages", self.ratio)
        check_size("of of RatioPages", self.of)
        check_size("grain of RatioPages", self.grain)

    def page_tokens(self, segment_tokens: int | None) -> int:
        return rounded(self.ratio * self.of, self.grain)


def rounded(tokens: float, grain: int) -> int:
    """The multiple of ``grain`` that is nearest to ``tokens``, the larger of two; at least one grain."""
    return max(1, math.floor(tokens / grain + 0.5)) * grain


def round_up(tokens: int, grain: int) -> int:
    """The smallest multiple of ``grain`` that holds ``tokens``."""
    return -(-tokens // grain) * grain


def check_size(name: str, value: Any) -> None:
    """Raises ValueError unless ``value`` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def check_positive(name: str, value: Any) -> None:
    """Raises ValueError unless ``value`` is a finite number above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
