"""The index of computed pages: chained 256-bit keys, verified on every hit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NewType

import numpy as np
from numpy.typing import NDArray

PageKey = NewType("PageKey", bytes)

Tags = tuple[tuple[str, bytes], ...]
"""What a page's key says besides its tokens and its provenance, each part with a name."""

KEY_BYTES = 32
_EMPTY = blake2b(digest_size=KEY_BYTES, person=b"octavo-page-v1")
TOKEN_DTYPE = np.dtype("<i4")
"""Of token ids in keys."""


def digest256(*parts: tuple[str, bytes]) -> PageKey:
    """256-bit digest of tagged parts. Each tag and each content goes in with its length, so that no two lists of
    parts give the same bytes; nothing depends on the process (no ``hash()``, no addresses)."""
    state = _EMPTY.copy()
    for tag, content in parts:
        state.update(_head(tag, len(content)) + content)
    return PageKey(state.digest())


@lru_cache
def _head(tag: str, size: int) -> bytes:
    """What goes in front of a content of ``size`` bytes; pages have few sizes."""
    return len(tag).to_bytes(4, "little") + tag.encode() + size.to_bytes(8, "little")


def root_key(extra: Sequence[tuple[str, str]] = ()) -> PageKey:
    """Key of the empty prefix of a namespace; ``extra`` are tagged parts such as ("salt", "...")."""
    return digest256(("root", b""), *((tag, content.encode()) for tag, content in extra))


def page_key(parent: PageKey, tokens: NDArray[np.int32], provenance: str = "", tags: Tags = ()) -> PageKey:
    """Key of a page after its parent: token ids, one a slot, how the KV came to be ("" is exact), and of an image's
    page its identity and offset (``PageLayout.tags``).

    Empty slots of a sealed page count as -1: the same tokens on a larger page are another key, because its units lie
    otherwise.
    """
    content = np.ascontiguousarray(tokens, TOKEN_DTYPE).tobytes()
    if provenance:
        tags = (*tags, ("provenance", provenance.encode()))
    return digest256(("parent", parent), ("tokens", content), *tags)


class Node:
    """One distinct prefix, up to the end of one page: what is in front (a node, or the root key of its namespace), the
    page's tokens (-1 in empty slots), its provenance, and what else its key says (``tags``).

    Nodes are compared by identity, which is equality of whole prefixes. ``pages[group]`` are the device pages that
    hold its KV for a group of layers (several if twins were computed side by side), ``host[group]`` its page in the
    host tier, 0 if there is none. ``children`` counts the nodes that come right after it. ``start`` and ``end`` are the
    positions of its first token and of the one after its last.
    """

    __slots__ = ("children", "end", "host", "id", "key", "pages", "parent", "provenance", "start", "tags", "tokens")

    def __init__(
        self,
        number: int,
        key: PageKey,
        parent: Parent,
        tokens: NDArray[np.int32],
        provenance: str,
        groups: int,
        tags: Tags = (),
    ) -> None:
        self.id = number
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.provenance = provenance
        self.tags = tags
        self.pages: list[list[int]] = [[] for _ in range(groups)]
        self.host = [0] * groups
        self.children = 0
        self.start: int = parent.end if isinstance(parent, Node) else 0
        held = len(tokens) if tokens[-1] >= 0 else int(np.count_nonzero(tokens >= 0))  # empty slots are the last ones
        self.end: int = self.start + held

    def page(self, group: int) -> int:
        """A device page that holds this prefix's last page for a group of layers; 0 if there is none."""
        return self.pages[group][0] if self.pages[group] else 0

    @property
    def forgotten(self) -> bool:
        """Nothing holds it and nothing leads through it."""
        return not (self.children or any(self.pages) or any(self.host))


Parent = Node | PageKey
"""What is in front of a page: a node, or at the beginning the root key of its namespace."""


class PrefixCache:
    """Which pages hold the KV of which prefix.

    A hit is verified by comparing one page's parent node, tokens, provenance and tags: a key that collides is a miss,
    never a wrong hit. A node stays while a page holds it or a longer prefix leads through it, so a chain can be
    followed over pages that are gone (behind a sliding window, or in the host tier).

    ::

        key -> nodes         node -> parent, tokens, provenance, tags, pages of each group, host pages
        page -> node
    """

    def __init__(self, groups: int = 1) -> None:
        self._groups = groups
        self._nodes: dict[PageKey, list[Node]] = {}
        self._of_page: dict[int, Node] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._of_page)

    def __contains__(self, page: int) -> bool:
        return page in self._of_page

    def lists(self, key: PageKey) -> bool:
        """Whether there is a node of this key, of whatever prefix."""
        return key in self._nodes

    def find(
        self, key: PageKey, parent: Parent, tokens: NDArray[np.int32], provenance: str, tags: Tags = ()
    ) -> Node | None:
        """The node of ``tokens`` after ``parent``, or None."""
        for node in self._nodes.get(key, ()):
            alike = node.parent == parent and node.provenance == provenance and node.tags == tags
            if alike and np.array_equal(node.tokens, tokens):
                return node
        return None

    def node(self, page: int) -> Node:
        """The node that a findable page holds."""
        return self._of_page[page]

    def group(self, page: int) -> int:
        """The group of layers that a findable page is for."""
        return next(group for group, pages in enumerate(self._of_page[page].pages) if page in pages)

    def enter(
        self,
        key: PageKey,
        parent: Parent,
        tokens: NDArray[np.int32],
        provenance: str,
        tags: Tags = (),
        *,
        lent: bool = False,
    ) -> Node:
        """The node of a computed page, made if it is new. One whose page is ``lent`` by another prefix holds none: it
        is in the index once something behind it is."""
        node = self.find(key, parent, tokens, provenance, tags) if key in self._nodes else None
        if node is None:
            node = Node(self.new_number(), key, parent, tokens, provenance, self._groups, tags)
            if not lent:
                self._list(node)
        return node

    def new_number(self) -> int:
        """A number that no node has had."""
        self._made += 1
        return self._made

    def _list(self, node: Node) -> None:
        """Put a node in the index, and those in front of it: a sequence whose window has passed their pages may be the
        last to know them."""
        while node not in (listed := self._nodes.setdefault(node.key, [])):
            listed.append(node)
            if not isinstance(node.parent, Node):
                return
            node = node.parent
            node.children += 1

    def attach(self, page: int, node: Node, group: int = 0) -> None:
        """Make a page findable. Precondition: it is not findable yet."""
        assert page not in self._of_page, f"page {page} is published already"
        self._of_page[page] = node
        node.pages[group].append(page)

    def forget(self, page: int) -> None:
        """Take a page out of the index, because its memory is about to hold something else."""
        group, node = self.group(page), self._of_page.pop(page)
        node.pages[group].remove(page)
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Drop a node that nothing holds, if it is in the index, and those in front of it that only led to it."""
        while node.forgotten and node in (nodes := self._nodes.get(node.key, [])):
            nodes.remove(node)
            if not nodes:
                del self._nodes[node.key]
            if not isinstance(node.parent, Node):
                return
            node = node.parent
            node.children -= 1

    def check(self) -> None:
        nodes = [node for nodes in self._nodes.values() for node in nodes]
        listed = sorted(page for node in nodes for pages in node.pages for page in pages)
        if listed != sorted(self._of_page):
            raise AssertionError(f"pages of nodes {listed} differ from nodes of pages {sorted(self._of_page)}")
        children: dict[int, int] = {}
        for node in nodes:
            if node.forgotten:
                raise AssertionError(f"node {node.id} is kept and nothing needs it")
            if isinstance(node.parent, Node):
                children[node.parent.id] = children.get(node.parent.id, 0) + 1
        for key, nodes in self._nodes.items():
            for node in nodes:
                if node.key != key:
                    raise AssertionError(f"node {node.id} is listed under another key")
                if node.children != children.get(node.id, 0):
                    raise AssertionError(
                        f"node {node.id} counts {node.children} children, not {children.get(node.id, 0)}"
                    )
        for page, node in self._of_page.items():
            if not any(page in pages for pages in node.pages):
                raise AssertionError(f"page {page} is not listed by its own node")
