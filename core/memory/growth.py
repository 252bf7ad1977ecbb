"""How much of a pool is there from the start, and in which steps the rest comes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

CHUNK_BYTES = 256 << 20
"""Default growth step. Mapping takes about as long for 64 MB as for 1 GiB, and what a step takes too much is idle."""


class PoolSteps(NamedTuple):
    """Sizes of a growing pool in units, each a multiple of a page's."""

    base_units: int
    chunk_units: int
    max_units: int


@dataclass(frozen=True)
class Growth:
    """A base share at the start, then chunks, up to the pool's full size.

    Attributes:
        base_share: of the pool's pages, rounded up; 1.0 takes everything at once.
        chunk_tokens: tokens of a growth step, rounded up to whole pages; None takes 256 MiB, or what lies above the
            base where that is less.

    Raises:
        ValueError: a value out of range.
    """

    base_share: float = 0.6
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.base_share <= 1.0:
            raise ValueError(f"base_share must be in (0, 1], got {self.base_share!r}")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")

    def steps(self, pages: int, *, page_units: int, page_tokens: int, page_bytes: int) -> PoolSteps:
        """Steps of a pool of at most ``pages`` pages; the sizes are those of one page.

        Raises:
            ValueError: a growth step larger than the pool.
        """
        base = max(math.ceil(round(self.base_share * pages, 6)), 1)  # 0.55 * 100 is a hair above 55
        if self.chunk_tokens is None:
            chunk = max(min(CHUNK_BYTES // page_bytes, pages - base), 1)
        else:
            chunk = -(-self.chunk_tokens // page_tokens)
            if chunk > pages:
                raise ValueError(
                    f"chunk_tokens={self.chunk_tokens} is a growth step larger than the pool, which holds "
                    f"{pages * page_tokens} tokens; lower it (growth_tokens of an engine), or raise pool_tokens"
                )
        return PoolSteps(base * page_units, chunk * page_units, pages * page_units)
