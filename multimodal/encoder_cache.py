"""Embeddings of images that were encoded before, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class _Entry:
    witness: bytes
    embeddings: Tensor
    users: set[Hashable] = field(default_factory=set)


class EncoderCache:
    """Embeddings by the image's identity, shared by all who use the image. Not for several threads at once.

    ::

                 insert                 last user releases
        (none) ---------> pinned  <--------------------------> idle ---------> (none)
                          has users          acquire                  evict

    A pinned entry is never evicted: whoever acquired or inserted it finds it until he releases it, however often he is
    preempted in between. Idle ones go in the order in which their last users let go, the least recent first, and only
    when another needs their room. So memory is never above ``capacity_bytes``, pressure or not, and an image that does
    not fit beside the pinned ones is refused, which changes nothing: its user keeps the embeddings himself, or waits.

    A hit is verified. ``witness`` is a second digest of the image, independent of its identity: an entry with another
    witness is another image, and serves nobody but its own.

    Attributes:
        bytes_used, bytes_pinned: now; bytes_peak: the most that ``bytes_used`` ever was.
        hits, misses, collisions: of ``acquire``; a collision (equal identity, other witness) is a miss, too.
        evictions, refusals: entries that went, and inserts that found no room.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must not be negative, got {capacity_bytes}; 0 keeps nothing")
        self.capacity_bytes = capacity_bytes
        self.bytes_used = self.bytes_pinned = self.bytes_peak = 0
        self.hits = self.misses = self.collisions = self.evictions = self.refusals = 0
        self._entries: dict[bytes, _Entry] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes_available(self) -> int:
        """The largest embeddings that ``insert`` would take now."""
        return self.capacity_bytes - self.bytes_pinned

    def acquire(self, identity: bytes, witness: bytes, user: Hashable) -> Tensor | None:
        """The embeddings, pinned for ``user`` until he releases them; None if they are not here. Not to be written to.

        To acquire twice is to acquire once.
        """
        entry = self._entries.get(identity)
        if entry is None or entry.witness != witness:
            self.collisions += entry is not None
            self.misses += 1
            return None
        self.hits += 1
        self._pin(identity, entry, user)
        return entry.embeddings

    def insert(self, identity: bytes, witness: bytes, embeddings: Tensor, user: Hashable) -> bool:
        """Keep ``embeddings`` [N, D] and pin them for ``user``; False, and nothing has changed, if they cannot be kept.

        1. Somebody else's under this identity and witness stay, and are pinned for ``user`` instead; under another
           witness they stay, too, and these are refused.
        2. More than what is not pinned: refused.
        3. Idle entries go until there is room.
        """
        entry = self._entries.get(identity)
        if entry is None:
            nbytes = embeddings.nbytes
            if nbytes > self.bytes_available:
                self.refusals += 1
                return False
            while self.bytes_used + nbytes > self.capacity_bytes:
                self._evict()
            if embeddings.untyped_storage().nbytes() > nbytes:
                embeddings = embeddings.clone()  # a row of a batch would keep the whole batch alive
            entry = self._entries[identity] = _Entry(witness, embeddings)
            self._idle[identity] = None
            self.bytes_used += nbytes
            self.bytes_peak = max(self.bytes_peak, self.bytes_used)
        elif entry.witness != witness:
            self.refusals += 1
            return False
        self._pin(identity, entry, user)
        return True

    def release(self, identity: bytes, user: Hashable) -> None:
        """End a use. Precondition: ``user`` has acquired or inserted this entry."""
        entry = self._entries.get(identity)
        assert entry is not None and user in entry.users, f"{user!r} does not use this entry"
        entry.users.remove(user)
        if not entry.users:
            self.bytes_pinned -= entry.embeddings.nbytes
            self._idle[identity] = None

    def clear(self) -> None:
        """Drop all idle entries."""
        while self._idle:
            self._evict()

    def check(self) -> None:
        """Raises AssertionError where entries, order and counts disagree."""
        idle = {identity for identity, entry in self._entries.items() if not entry.users}
        if idle != self._idle.keys():
            raise AssertionError(f"{len(idle)} entries have no users, {len(self._idle)} are listed as idle")
        sizes = {identity: entry.embeddings.nbytes for identity, entry in self._entries.items()}
        pinned = sum(sizes.values()) - sum(sizes[identity] for identity in idle)
        if (self.bytes_used, self.bytes_pinned) != (sum(sizes.values()), pinned):
            raise AssertionError(
                f"{self.bytes_used} bytes are counted as used and {self.bytes_pinned} as pinned, there are "
                f"{sum(sizes.values())} and {pinned}"
            )
        if not self.bytes_used <= self.bytes_peak <= self.capacity_bytes:
            raise AssertionError(
                f"{self.bytes_used} bytes now and {self.bytes_peak} at the peak, of {self.capacity_bytes} allowed"
            )
        for entry in self._entries.values():
            if entry.embeddings.untyped_storage().nbytes() != entry.embeddings.nbytes:
                raise AssertionError("an entry keeps more memory alive than its own")

    def _pin(self, identity: bytes, entry: _Entry, user: Hashable) -> None:
        if not entry.users:
            del self._idle[identity]
            self.bytes_pinned += entry.embeddings.nbytes
        entry.users.add(user)

    def _evict(self) -> None:
        identity, _ = self._idle.popitem(last=False)
        self.bytes_used -= self._entries.pop(identity).embeddings.nbytes
        self.evictions += 1
