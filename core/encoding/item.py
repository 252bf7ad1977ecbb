"""A stretch of a prompt that is no text: an image, say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from octavo.core.interfaces import SegmentReuse
from octavo.core.memory.prefix_cache import Tags

IDENTITY_BYTES = 32


@dataclass(frozen=True, eq=False)
class Item:
    """What a prompt held, and what its encoder said of it.

    Attributes:
        kind: names its page policy.
        value: what the encoder encodes.
        identity: 32 bytes that stand for its embeddings.
        witness: a second, independent digest of the same, or nothing.
        tokens: positions that it takes, N.
        bidirectional: whether its positions see all of it, and not only what is in front of them. Then one step
            computes them all.
        placeholder: the token id of its positions: past the vocabulary, and (but for chance) equal for equal items
            only.
        reuse: None if its KV is that of its place; otherwise what stands in front of it does not count, but for the
            tokens that are computed ``anew`` (``SegmentReuse``), in stretches (first, end) that do not touch.
        findable: False where no request may find it in the prefix cache.
    """

    kind: str
    value: Any
    identity: bytes
    witness: bytes
    tokens: int
    bidirectional: bool
    placeholder: int
    reuse: SegmentReuse | None = None
    anew: tuple[tuple[int, int], ...] = ()
    findable: bool = True

    @property
    def head(self) -> int:
        """How many of its first tokens are computed anew."""
        return self.anew[0][1] if self.anew and self.anew[0][0] == 0 else 0

    @property
    def spared(self) -> int:
        """How many of its tokens are not computed."""
        return self.tokens - sum(end - first for first, end in self.anew)

    @property
    def lent(self) -> bool:
        """Whether its pages are listed where they are, for other positions than they are stored for."""
        return self.reuse is not None and not self.reuse.copies

    @property
    def name(self) -> Tags:
        """What its KV depends on besides what is in front of it. Equal names are equal embeddings, and an identity that
        collides is told apart by the witness."""
        mask = b"bidirectional" if self.bidirectional else b"causal"
        return ("kind", self.kind.encode()), ("identity", self.identity), ("witness", self.witness), ("mask", mask)


class ItemSpan(NamedTuple):
    """An item at positions ``start`` to ``end`` (exclusive) of a sequence."""

    item: Item
    start: int
    end: int
