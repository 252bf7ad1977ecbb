"""How far sequences are computed that decode together: a step of all of them is one addition.

::

    sequence   apart  +  steps of its pace  =  computed          pace   .  .  .  .  .  .
                 12          5                   17              steps  0  1  2  3  4  5
                 40          5                   45

A batch has a pace of its own (``DecodeBatch``), and keeps it while it has the very same members. So whoever is at a
pace is a member of its batch, and the pace knows whether all of its members are: who has gone over to another pace is
fetched back before the next step, as far as there is one.
"""

from __future__ import annotations

from collections.abc import Iterable


class Pace:
    """The ``steps`` that the members of one batch have made together."""

    __slots__ = ("_begun", "_whole", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self._begun = False
        self._whole = False

    def advance(self, members: Iterable[Paced]) -> None:
        """One more token of each of the members, who are always the same, is computed."""
        if self._whole:
            self.steps += 1
        elif self._begun:
            for member in members:
                member.keep(self)
            self._whole = True
            self.steps += 1
        else:  # many batches make one step and no more, which is not worth a pace
            for member in members:
                member._apart += 1
            self._begun = True

    def leave(self) -> None:
        """A member goes."""
        self._whole = False


STANDING = Pace()
"""Of those who are in no batch: it never advances."""


class Paced:
    """Has ``computed`` tokens, at a pace."""

    __slots__ = ("_apart", "_pace")

    def __init__(self) -> None:
        self._apart = 0
        self._pace = STANDING

    @property
    def computed(self) -> int:
        return self._apart + self._pace.steps

    @computed.setter
    def computed(self, tokens: int) -> None:
        self._apart = tokens - self._pace.steps

    def keep(self, pace: Pace) -> None:
        """Be at this pace from now on, and no other. ``computed`` stays as it is."""
        computed = self.computed
        self._pace.leave()
        self._pace = pace
        self.computed = computed
