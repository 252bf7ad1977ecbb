"""Lists of a sequence (tokens, keys, nodes) whose beginnings are shared: forking copies nothing that is long."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, MutableSequence, Sequence
from itertools import chain
from typing import Self, TypeVar, overload

T = TypeVar("T")


class SharedList(Sequence[T]):
    """A list that grows at its end, in pieces of which all but the last are shared and stay as they are::

        parent   [ prompt ][ up to the first fork ][ own ]
        fork     [ prompt ][ up to the first fork ][ own ]

    ``begin`` is such a piece from the start: its owner must leave it as it is.
    """

    __slots__ = ("_own", "_pieces", "_shared", "_starts")

    def __init__(self, begin: Sequence[T] = (), end: Sequence[T] = ()) -> None:
        self._pieces: tuple[Sequence[T], ...] = (begin,) if len(begin) else ()
        self._starts: tuple[int, ...] = (0,) * len(self._pieces)
        self._shared = len(begin)
        self._own: MutableSequence[T] = list(end)

    def __len__(self) -> int:
        return self._shared + len(self._own)

    def __iter__(self) -> Iterator[T]:
        return chain(*self._pieces, self._own)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        own, shared = self._own, self._shared
        length = shared + len(own)
        if not isinstance(index, slice):
            at = index if index >= 0 else index + length
            return own[at - shared] if at >= shared else self._item(at)
        start, stop, step = index.indices(length)
        assert step == 1, "it is read in order"
        found: list[T] = []
        if start < shared:
            for first, piece in zip(self._starts, self._pieces, strict=True):
                if first < stop and start < first + len(piece):
                    found += piece[max(0, start - first) : stop - first]
            start = shared
        found += own[start - shared : max(start, stop) - shared]
        return found

    def _item(self, at: int) -> T:
        """One of the shared items."""
        if at < 0:
            raise IndexError(f"item {at - len(self)} of {len(self)}")
        piece = bisect_right(self._starts, at) - 1
        return self._pieces[piece][at - self._starts[piece]]

    def append(self, item: T) -> None:
        self._own.append(item)

    def extend(self, items: list[T]) -> None:
        self._own.extend(items)

    def fork(self) -> Self:
        """A list of the same items; what this one has of its own so far is copied, once, and shared from now on."""
        if self._own:
            self._pieces += (self._own[:],)
            self._starts += (self._shared,)
            self._shared += len(self._own)
            del self._own[:]
        twin = type(self)()
        twin._pieces, twin._starts, twin._shared = self._pieces, self._starts, self._shared
        return twin
