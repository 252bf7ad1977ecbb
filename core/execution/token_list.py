"""Tokens of sequences that decode together: a step writes one row of a log, and each list reads its column later.

::

                    column  0   1   2           tokens of sequence 1
    log   step 7          [ 5   9   4 ]         [ prompt ... 3 8 ] 9 2 1
          step 8          [ 6   2   4 ]                     known  in the log
          step 9          [ 8   1   7 ]

A list is what its methods say, wherever its tokens lie: whoever asks it for one makes it read its column first. The log
has room for ``STEPS`` steps and then begins anew, so each step a few members read theirs, in turn.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.core.shared_list import SharedList

STEPS = 64
"""Of a log. With more of them fewer members read in a step, and each reads more at once."""

LEAST = 32
"""Sequences of a batch that has a log."""


class TokenLog:
    """The tokens of the last ``STEPS`` of ``count`` steps of one batch, a column a member, as long as it has the very
    same members (``DecodeBatch``). As with a ``Pace``, who has gone over to another log is fetched back."""

    __slots__ = ("_begun", "_whole", "count", "rows")

    def __init__(self) -> None:
        self.count = 0
        self.rows: NDArray[np.int64] = np.empty((0, STEPS), np.int64)
        self._begun = False
        self._whole = False

    def take(self, members: Sequence[TokenList], tokens: NDArray[np.int64]) -> None:
        """Let the members, who are always the same, have the tokens int64 [n] of a step."""
        if not self._begun:  # many batches make one step and no more, which is not worth a log
            self._begun = True
            for member, token in zip(members, tokens.tolist(), strict=True):
                member.append(token)
            return
        if not self._whole:
            for column, member in enumerate(members):
                member.follow(self, column)
            self.rows = np.empty((len(members), STEPS), np.int64)
            self._whole = True
        at, due = self.count % STEPS, -(-len(members) // STEPS)
        for member in members[at * due : (at + 1) * due]:
            member.catch_up()
        self.rows[:, at] = tokens
        self.count += 1

    def leave(self) -> None:
        """A member goes."""
        self._whole = False


NO_LOG = TokenLog()
"""Of those who are in no batch: nobody ever writes to it."""


class TokenList(SharedList[int]):
    """The tokens of one sequence, of which the last may still be in a log. ``_known`` are numbers side by side, so that
    no objects are made of those that nobody asks for."""

    __slots__ = ("_column", "_known", "_log", "_read")

    def __init__(self, begin: Sequence[int] = (), end: Sequence[int] = ()) -> None:
        self._log, self._column, self._read = NO_LOG, 0, 0
        super().__init__(begin, end)

    @property
    def _own(self) -> array[int]:
        """What the list has of its own, which is all that its other methods see of it."""
        if self._read < self._log.count:
            self.catch_up()
        return self._known

    @_own.setter
    def _own(self, items: MutableSequence[int]) -> None:
        self._known = array("q", items)

    def __len__(self) -> int:
        return self._shared + len(self._known) + self._log.count - self._read

    def catch_up(self) -> None:
        """Read what is in the log."""
        log, known = self._log, self._known
        if self._read == log.count:
            return
        first, last, row = self._read % STEPS, log.count % STEPS, log.rows[self._column]
        if first < last:
            known.frombytes(row[first:last].tobytes())
        else:
            known.frombytes(row[first:].tobytes())
            known.frombytes(row[:last].tobytes())
        self._read = log.count

    def ids(self, start: int, stop: int) -> NDArray[np.int32]:
        """Tokens ``start`` to ``stop`` (exclusive), int32, of which there are some."""
        own, before = self._own, self._shared
        if start < before:
            return np.array(self[start:stop], np.int32)
        return np.frombuffer(own, np.int64)[start - before : stop - before].astype(np.int32)

    def follow(self, log: TokenLog, column: int = 0) -> None:
        """Read a column of this log from now on, and of no other. The tokens stay as they are."""
        self.catch_up()
        self._log.leave()
        self._log, self._column, self._read = log, column, log.count
