"""Lists of a sequence (tokens, keys, nodes) whose beginnings are shared: forking copies nothing that is long."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TypeVar, overload

T = TypeVar("T")


class SharedList(Sequence[T]):
    """A list that grows at its end, in pieces of which all but the last are shared and stay as they are::

        parent   [ prompt ][ up to the first fork ][ own ]
        fork     [ prompt ][ up to the first fork ][ own ]

    ``begin`` is such a piece from the start: its owner must leave it as it is. Its own items always lie in the same
    list, so that ``append`` is that list's, with no call in between: each token that is drawn is one.
    """

    __slots__ = ("_own", "_pieces", "_shared", "_starts", "append")
    append: Callable[[T], None]

    def __init__(self, begin: Sequence[T] = (), end: Sequence[T] = ()) -> None:
        self._pieces: tuple[Sequence[T], ...] = (begin,) if len(begin) else ()
        self._starts: tuple[int, ...] = (0,) * len(self._pieces)
        self._shared = len(begin)
        self._own = list(end)
        self.append = self._own.append

    def __len__(self) -> int:
        return self._shared + len(self._own)

    def __iter__(self) -> Iterator[T]:
        return chain(*self._pieces, self._own)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        length = self._shared + len(self._own)
        if not isinstance(index, slice):
            at = index if index >= 0 else index + length
            return self._own[at - self._shared] if at >= self._shared else self._item(at)
        start, stop, step = index.indices(length)
        assert step == 1, "it is read in order"
        if start >= self._shared:
            return self._own[start - self._shared : max(start, stop) - self._shared]
        found: list[T] = []
        for first, piece in zip(self._starts, self._pieces, strict=True):
            if first < stop and start < first + len(piece):
                found += piece[max(0, start - first) : stop - first]
        return found + self._own[: max(0, stop - self._shared)]

    def _item(self, at: int) -> T:
        """One of the shared items."""
        if at < 0:
            raise IndexError(f"item {at - len(self)} of {len(self)}")
        piece = bisect_right(self._starts, at) - 1
        return self._pieces[piece][at - self._starts[piece]]

    def extend(self, items: list[T]) -> None:
        self._own += items

    def fork(self) -> SharedList[T]:
        """A list of the same items; what this one has of its own so far is copied, once, and shared from now on."""
        if self._own:
            self._pieces += (self._own.copy(),)
            self._starts += (self._shared,)
            self._shared += len(self._own)
            self._own.clear()
        twin: SharedList[T] = SharedList()
        twin._pieces, twin._starts, twin._shared = self._pieces, self._starts, self._shared
        return twin
