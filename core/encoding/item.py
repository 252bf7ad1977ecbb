"""A stretch of a prompt that is no text: an image, say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """

    kind: str
    value: Any
    identity: bytes
    witness: bytes
    tokens: int
    bidirectional: bool
    placeholder: int

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
