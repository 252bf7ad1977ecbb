"""The index of computed pages: chained 256-bit keys, verified on every hit."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

import numpy as np
from numpy.typing import NDArray

PageKey = NewType("PageKey", bytes)
NodeId = NewType("NodeId", int)
Parent = NodeId | PageKey
"""What is in front of a page: a node, or at the beginning the root key of its namespace."""

KEY_BYTES = 32


def digest256(*parts: tuple[str, bytes]) -> PageKey:
    """256-bit digest of tagged parts. Each tag and each content goes in with its length, so that no two lists of
    parts give the same bytes; nothing depends on the process (no ``hash()``, no addresses)."""
    state = blake2b(digest_size=KEY_BYTES, person=b"octavo-page-v1")
    for tag, content in parts:
        state.update(len(tag).to_bytes(4, "little") + tag.encode() + len(content).to_bytes(8, "little") + content)
    return PageKey(state.digest())


def root_key(extra: Sequence[tuple[str, str]] = ()) -> PageKey:
    """Key of the empty prefix of a namespace; ``extra`` are tagged parts such as ("salt", "...")."""
    return digest256(("root", b""), *((tag, content.encode()) for tag, content in extra))


def page_key(parent: PageKey, tokens: NDArray[np.int32], provenance: str = "") -> PageKey:
    """Key of a page after its parent: token ids, their number, and how the KV came to be ("" is exact)."""
    parts = [("parent", bytes(parent)), ("tokens", np.ascontiguousarray(tokens, "<i4").tobytes())]
    if provenance:
        parts.append(("provenance", provenance.encode()))
    return digest256(*parts)


class PrefixCache:
    """Which page holds the KV of which prefix.

    A *node* is one distinct prefix: parent node, tokens and provenance. Node ids are never reused, so equality of
    ids is equality of whole prefixes, and a hit is verified by comparing one page's parent id, tokens and
    provenance: a key that collides is a miss, never a wrong hit. Several pages may hold the same node (twins computed
    side by side); each is tracked apart, so evicting one leaves the others findable.

    ::

        key -> pages            node   [units]  whose prefix a page holds, 0 if it is not findable
                                parent [units]  what is in front of it
                                tokens [units, page_tokens]
    """

    def __init__(self, units: int, page_tokens: int) -> None:
        self._pages: dict[PageKey, list[int]] = {}
        self._next_node = NodeId(1)
        self._node = np.zeros(units + 1, np.int64)
        self._parent: dict[int, Parent] = {}
        self._tokens = np.zeros((units + 1, page_tokens), np.int32)
        self._key: dict[int, tuple[PageKey, str]] = {}

    def __len__(self) -> int:
        return len(self._key)

    def __contains__(self, page: int) -> bool:
        return page in self._key

    def find(self, key: PageKey, parent: Parent, tokens: NDArray[np.int32], provenance: str) -> int | None:
        """The page that holds ``tokens`` after ``parent``, or None."""
        for page in self._pages.get(key, ()):
            if (
                self._parent[page] == parent
                and self._key[page][1] == provenance
                and np.array_equal(self._tokens[page], tokens)
            ):
                return page
        return None

    def node(self, page: int) -> NodeId:
        return NodeId(int(self._node[page]))

    def publish(self, page: int, key: PageKey, parent: Parent, tokens: NDArray[np.int32], provenance: str) -> NodeId:
        """Make a computed page findable; gives the node it holds. Precondition: it is not findable yet."""
        assert page not in self._key, f"page {page} is published already"
        twin = self.find(key, parent, tokens, provenance)
        node = self._next_node if twin is None else self.node(twin)
        self._next_node = NodeId(self._next_node + (twin is None))
        self._node[page], self._parent[page], self._tokens[page] = node, parent, tokens
        self._key[page] = (key, provenance)
        self._pages.setdefault(key, []).append(page)
        return node

    def forget(self, page: int) -> None:
        """Take a page out of the index, because its memory is about to hold something else."""
        key, _ = self._key.pop(page)
        pages = self._pages[key]
        pages.remove(page)
        if not pages:
            del self._pages[key]
        del self._parent[page]
        self._node[page] = 0

    def check(self) -> None:
        listed = [page for pages in self._pages.values() for page in pages]
        if sorted(listed) != sorted(self._key):
            raise AssertionError(f"pages by key {sorted(listed)} differ from keys by page {sorted(self._key)}")
        for page, (key, _) in self._key.items():
            if page not in self._pages.get(key, ()):
                raise AssertionError(f"page {page} is not listed under its own key")
            if self._node[page] == 0:
                raise AssertionError(f"page {page} is findable but has no node")
