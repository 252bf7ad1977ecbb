"""The token ids of a sequence: a beginning that many share and nobody changes, and an end of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload


class TokenList(Sequence[int]):
    """``begin``, a prompt that stays as it is, and what was appended since; forking copies the latter only."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: list[int], end: Sequence[int] = ()) -> None:
        self._begin = begin
        self._end = list(end)

    def __len__(self) -> int:
        return len(self._begin) + len(self._end)

    def __iter__(self) -> Iterator[int]:
        return chain(self._begin, self._end)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        shared = len(self._begin)
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1, "tokens are read in order"
            if start >= shared:
                return self._end[start - shared : max(start, stop) - shared]
            return self._begin[start:stop] + self._end[: max(0, stop - shared)]
        index += len(self) if index < 0 else 0
        return self._begin[index] if index < shared else self._end[index - shared]

    def append(self, token: int) -> None:
        self._end.append(token)

    def fork(self) -> TokenList:
        return TokenList(self._begin, self._end)
