"""Page policies that fit pages to a length that is known, such as an image's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.core.policies.page_size import check_size, round_up


@dataclass(frozen=True)
class DivisorPages:
    """The largest multiple of ``grain``, at most ``cap``, that divides the segment's length; where none does, the one
    that wastes least, the larger of two.

    576 tokens get pages of 32 under a cap of 32, of 48 under one of 48, and waste nothing; 49 tokens get pages of 8.

    Raises:
        ValueError: ``cap`` or ``grain`` is no integer of at least 1, or the cap is below the grain.
    """

    cap: int = 32
    grain: int = 8

    def __post_init__(self) -> None:
        check_size("cap of DivisorPages", self.cap)
        check_size("grain of DivisorPages", self.grain)
        if self.cap < self.grain:
            raise ValueError(f"DivisorPages: cap={self.cap} is below grain={self.grain}; no page lies between")

    def page_tokens(self, segment_tokens: int | None) -> int:
        tokens = _known_length("DivisorPages", segment_tokens)
        # A divisor is a size that wastes 0, so one rule covers both cases.
        return min(range(self.grain, self.cap + 1, self.grain), key=lambda size: (-tokens % size, -size))


@dataclass(frozen=True)
class RowPages:
    """Whole rows of an image's grid: pages of at least ``rows`` rows, and as few more as fill whole grains.

    A 24 x 24 image has pages of one row, 24 tokens; in a 12 x 12 image one row of 12 tokens is no multiple of 8, two
    are. An image that is smaller than such a page is one page.

    Args:
        columns: tokens of a row; None for images whose grid is square.

    Raises:
        ValueError: a number is no integer of at least 1. ``page_tokens`` raises it for a length that makes no grid.
    """

    rows: int = 1
    columns: int | None = None
    grain: int = 8

    def __post_init__(self) -> None:
        check_size("rows of RowPages", self.rows)
        check_size("grain of RowPages", self.grain)
        if self.columns is not None:
            check_size("columns of RowPages", self.columns)

    def page_tokens(self, segment_tokens: int | None) -> int:
        tokens = _known_length("RowPages", segment_tokens)
        columns = self._columns(tokens)
        rows = round_up(self.rows, self.grain // math.gcd(columns, self.grain))
        return min(rows * columns, round_up(tokens, self.grain))

    def _columns(self, tokens: int) -> int:
        if self.columns is None:
            side = math.isqrt(tokens)
            if side * side != tokens:
                raise ValueError(
                    f"RowPages: {tokens} tokens are no square grid ({side} x {side} are {side * side}, "
                    f"{side + 1} x {side + 1} are {(side + 1) ** 2}); give columns"
                )
            return side
        if tokens % self.columns:
            raise ValueError(
                f"RowPages: {tokens} tokens are no whole rows of columns={self.columns}; give the grid's own columns"
            )
        return self.columns


@dataclass(frozen=True)
class WholePages:
    """One page a segment, its length rounded up to the grain: the least to keep account of, and nothing smaller than
    the segment can be shared, scored, evicted or copied on write.

    Raises:
        ValueError: ``grain`` is no integer of at least 1.
    """

    grain: int = 8

    def __post_init__(self) -> None:
        check_size("grain of WholePages", self.grain)

    def page_tokens(self, segment_tokens: int | None) -> int:
        return round_up(_known_length("WholePages", segment_tokens), self.grain)


def _known_length(policy: str, segment_tokens: int | None) -> int:
    if segment_tokens is None:
        raise ValueError(f"{policy} needs a segment's length, and growing text has none; give it a fixed page size")
    assert segment_tokens >= 1, f"a segment of {segment_tokens} tokens"
    return segment_tokens
