"""Sequences that decode together, as columns: what a step asks of every one of them is asked of all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.execution import token_list
from octavo.core.execution.drafts import UNREAD
from octavo.core.execution.pace import Pace
from octavo.core.execution.token_list import TokenList, TokenLog
from octavo.core.interfaces import SparseMethod
from octavo.core.memory.block_table import BlockTable
from octavo.core.sequence import NEVER, Sequence

if TYPE_CHECKING:
    from octavo.core.step_plan import Chunk


@dataclass(eq=False)
class DecodeBatch:
    """The sequences of a replayed step, a token each. The batch of the step behind it has the same columns and the next
    ``starts``; a sequence that ends leaves a row out; nobody comes in. So the host's work for a token does not grow
    with what there is to know of its sequence: only rows that a comparison of columns finds touch the sequence itself.

    ::

        sequences  [n]             the same list as long as nobody leaves
        names      [n]             their requests' ids
        samples    [n]             and which samples of these they are
        tokens     [n]             their tokens so far
        tables     [n]             their first block tables
        starts     int64 [n]       the position of the token that is computed
        drafting   bool  [n]       it is for a draft
        prompts    int64 [n]       tokens of the prompt
        turns      int64 [n]       the first position at which pages are taken or let go of (``Sequence.turn``)
        stops      int64 [n]       the first position that is never computed, since the token there is the last
        fills      int64 [n]       with so many tokens computed a page is full that has no node (``Sequence.full_at``)
        halts      int64 [n]       the first position that waits for the tokens in front of it: where drafts begin, or
                                   the last of a round is verified
        rounds     int64 [n]       where its round of drafts has begun: the first token whose KV is not exact
        most       int64 [n]       drafts of a whole round, 0 where nobody drafts
        limits     int64 [n]       tokens of the prompt and the longest sample
        drawn      bool  [n]       nothing but its tokens has to come to the host when they are no drafts
        closely    bool  [n]       each token needs a look: as text, for a marker, or since drafts may begin
        ending     int64 [n, k]    tokens that end it, filled up with -1
        chooser    int64 [n]       which of ``methods`` chooses the pages that it reads; 0, which is None, reads all
        whole      int64 [n]       so many tokens are read whole all the same

    ``pace`` and ``log`` are those of these very members (``pace.py``, ``token_list.py``).
    """

    sequences: list[Sequence]
    names: list[str]
    samples: list[int]
    tokens: list[TokenList]
    tables: list[BlockTable]
    starts: NDArray[np.int64]
    drafting: NDArray[np.bool_]
    prompts: NDArray[np.int64]
    turns: NDArray[np.int64]
    stops: NDArray[np.int64]
    fills: NDArray[np.int64]
    halts: NDArray[np.int64]
    rounds: NDArray[np.int64]
    most: NDArray[np.int64]
    limits: NDArray[np.int64]
    drawn: NDArray[np.bool_]
    closely: NDArray[np.bool_]
    ending: NDArray[np.int64]
    chooser: NDArray[np.int64]
    whole: NDArray[np.int64]
    methods: tuple[SparseMethod | None, ...]
    pace: Pace = field(default_factory=Pace)
    log: TokenLog = field(default_factory=TokenLog)

    @classmethod
    def of(cls, chunks: list[Chunk], whole_tokens: Callable[[SparseMethod], int]) -> DecodeBatch:
        """Of chunks of one token, which are planned. ``whole_tokens`` of the longest sequence that a method reads
        whole."""
        methods: dict[str, SparseMethod | None] = {"": None}
        rows = []
        for chunk in chunks:
            sequence, request, drafts = chunk.sequence, chunk.sequence.request, chunk.sequence.drafts
            method = drafts.rule.method if chunk.draft and drafts.rule is not None else request.method
            name = "" if method is None else method.provenance
            methods.setdefault(name, method)
            halt = NEVER if drafts.rule is None else drafts.rule.beyond
            if chunk.draft:
                halt = sequence.computed + drafts.room(len(sequence.tokens), request.limit)
            rows.append(
                (
                    chunk.start,
                    len(request.prompt),
                    sequence.turn,
                    NEVER if chunk.draft else request.limit - 1,
                    sequence.full_at,
                    halt,
                    sequence.computed,
                    drafts.most if chunk.draft else 0,
                    request.limit,
                    list(methods).index(name),
                    0 if method is None or chunk.draft else whole_tokens(method),
                )
            )
        columns = np.array(rows, np.int64).T.copy()
        starts, prompts, turns, stops, fills, halts, rounds, most, limits, chooser, whole = columns
        members = [chunk.sequence for chunk in chunks]
        ending = np.full((len(chunks), max(len(s.request.ending) for s in members)), -1, np.int64)
        for row, sequence in enumerate(members):
            ending[row, : len(sequence.request.ending)] = list(sequence.request.ending)
        return cls(
            sequences=members,
            names=[sequence.request.request_id for sequence in members],
            samples=[sequence.sample for sequence in members],
            tokens=[sequence.tokens for sequence in members],
            tables=[sequence.table for sequence in members],
            starts=starts,
            drafting=np.array([chunk.draft for chunk in chunks]),
            prompts=prompts,
            turns=turns,
            stops=stops,
            fills=fills,
            halts=halts,
            rounds=rounds,
            most=most,
            limits=limits,
            drawn=np.array([s.request.draws_on_device for s in members]),
            closely=np.array([c.sequence.is_followed or (c.sequence.drafts.most > 0 and not c.draft) for c in chunks]),
            ending=ending,
            chooser=chooser,
            whole=whole,
            methods=tuple(methods.values()),
        )

    def __len__(self) -> int:
        return len(self.sequences)

    @cached_property
    def drafts(self) -> bool:
        """Whether some of the tokens are for drafts."""
        return bool(self.drafting.any())

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """The first position of each that is not simply the next one, int64 [n]."""
        return np.minimum(self.stops, self.halts)

    @cached_property
    def logs(self) -> bool:
        """Whether tokens had better wait in the log: of few sequences they are appended sooner, and where somebody
        looks at each of them it would be read at once."""
        return len(self) >= token_list.LEAST and not self.closely.any()

    def at(self, starts: NDArray[np.int64]) -> DecodeBatch:
        """The same members at other positions."""
        moved = object.__new__(DecodeBatch)
        vars(moved).update(vars(self), starts=starts)  # as ``copy`` does, which takes several times as long
        return moved

    def following(self) -> DecodeBatch | None:
        """The next tokens of those that have one; None if there are none, or if the host must first read the tokens of
        this batch."""
        if not self.sequences:
            return None
        moved = self.at(self.starts + 1)
        if (moved.starts < self.ends).all():
            return moved
        going = moved.starts < self.stops
        if (going & (moved.starts >= self.halts)).any():
            return None
        return moved.only(going) if going.any() else None

    def only(self, which: NDArray[np.bool_]) -> DecodeBatch:
        """Some of its members; the very same batch if all of them."""
        if which.all():
            return self
        stays, kept = which.tolist(), dict[str, Any](pace=Pace(), log=TokenLog())
        for name in [f.name for f in fields(self) if f.name not in ("methods", "pace", "log")]:
            column = getattr(self, name)
            kept[name] = column[which] if isinstance(column, np.ndarray) else list(compress(column, stays))
        return replace(self, **kept)

    @property
    def turning(self) -> NDArray[np.intp]:
        """The rows of those whose pages must be seen to before this step."""
        return np.flatnonzero(self.starts >= self.turns)

    @property
    def filled(self) -> NDArray[np.intp]:
        """The rows of those that may have a page to be published once the step behind this one is under way: with this
        step ``starts + 1`` tokens are computed, with that one another."""
        return np.flatnonzero(self.starts + 2 >= self.fills)

    @property
    def choosers(self) -> NDArray[np.int64]:
        """Which of ``methods`` chooses in this step, int64 [n]."""
        if len(self.methods) == 1:
            return self.chooser
        return np.where(self.starts >= self.whole, self.chooser, 0)

    def settle(self) -> None:
        """The step is under way: its KV stands for all who come after it in the device's order."""
        if not self.drafts:
            self.pace.advance(self.sequences)
            return
        for sequence, draft in zip(self.sequences, self.drafting.tolist(), strict=True):
            if draft:
                sequence.drafts.tokens.append(UNREAD)
            else:
                sequence.computed += 1

    def take(self, tokens: NDArray[np.int64]) -> None:
        """Let the members have the tokens int64 [n] that this step has drawn."""
        if self.logs and not self.drafts:
            self.log.take(self.tokens, tokens)
            return
        for sequence, token, draft in zip(self.sequences, tokens.tolist(), self.drafting.tolist(), strict=True):
            if draft:
                sequence.drafts.read(token)
            else:
                sequence.tokens.append(token)

    def needs_look(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the tokens int64 [n] that this step has drawn are, or may be, more than one more token."""
        looks = self.closely | (self.starts + 1 >= self.stops)
        if self.ending.size:
            looks |= (self.ending == tokens[:, None]).any(1)
        return looks
