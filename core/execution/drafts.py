"""Drafts: tokens that a sparse method decodes ahead, until the full cache says which of them stand.

::

    tokens [ prompt .............. | t t t t ]            known
    drafts                                    [ d d d ]   each decoded behind the one before it, under the method
             exact KV      computed ^ [ shaped KV ]       goes where exact KV will go

A round, of one sequence:

1. Draft: one token a step, each with its own selection, until there are ``most`` of them.
2. Verify: the last known token and all drafts are one dense chunk. Its KV overwrites theirs, and at each of its places
   the token is drawn that would be drawn without drafts. While that is the draft, the next place stands too; where it
   is not, it takes the draft's place, and what comes behind is forgotten.

So a round adds one token more than drafts were right, and the tokens are those of dense decoding, up to rounding. When
they are drawn at random too: the noise of a draw depends on the seed and on the number of the token alone
(``kernels/reference/sampling``), so a draft is drawn with the noise with which it is verified. Rejection sampling
(Leviathan et al., arXiv 2211.17192) would keep the distribution and not the tokens. It accepts a draft with probability
1 - d, for d the total variation between the two distributions; common noise with at least (1 - d) / (1 + d).

A sequence whose room is short drops its drafts and goes on with one dense token: drafts preempt nobody. Pages hold
exact KV up to ``computed``, and only such pages are published, digested for good, or kept when the sequence ends.

Where decode steps are replayed, whole rounds are: ``verification.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from random import Random
from typing import TYPE_CHECKING

from octavo.core.interfaces import SparseMethod
from octavo.core.outputs import DraftCounts

if TYPE_CHECKING:
    from octavo.core.engine import Engine
    from octavo.core.execution.sampler import Draw, Drawn
    from octavo.core.sequence import Sequence


UNREAD = -1
"""Stands among drafts for one that the device has and the host does not know yet."""


@dataclass(frozen=True)
class DraftRule:
    """How a request drafts: up to ``most`` tokens a round under ``method``, in sequences of more than ``beyond`` tokens
    (shorter ones are read whole).

    ``forced_acceptance``: a draft is right with this probability, whatever was drawn, so that time can be measured on
    weights that mean nothing; the tokens are then not those of dense decoding.
    """

    method: SparseMethod
    most: int
    beyond: int
    forced_acceptance: float | None = None


@dataclass
class Drafts:
    """The drafts of one sequence. ``called``: they are to be verified now, however few."""

    rule: DraftRule | None
    tokens: list[int] = field(default_factory=list)
    called: bool = False
    counts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def most(self) -> int:
        """Drafts of a whole round; 0 where nobody drafts."""
        return 0 if self.rule is None else self.rule.most

    def room(self, known: int, limit: int) -> int:
        """How many are worth decoding behind ``known`` tokens, of which there will be at most ``limit``: the last token
        of all has no use for a draft."""
        if self.rule is None or self.called or known <= self.rule.beyond:
            return 0
        return min(self.rule.most, limit - known - 1)

    def read(self, token: int) -> None:
        """The first that was ``UNREAD`` is known now."""
        self.tokens[self.tokens.index(UNREAD)] = token

    def cut(self, count: int) -> None:
        """Forget all but the first ``count``, and verify those."""
        del self.tokens[count:]
        self.called = True

    def begin(self) -> None:
        """A new round."""
        self.tokens, self.called = [], False

    def foreseen(self, count: int, seed: int, known: int) -> int:
        """How many of ``count`` drafts behind ``known`` tokens will be right; -1 if that is not forced. ``seed`` is the
        sequence's."""
        forced = None if self.rule is None else self.rule.forced_acceptance
        if forced is None:
            return -1
        right = (Random(draw_seed(seed, known + at)).random() < forced for at in range(count))
        return sum(1 for _ in takewhile(bool, right))

    def judge(self, drawn: int, seed: int) -> tuple[int, bool]:
        """The token that stands where the full cache has ``drawn``, and whether that is the first draft, which is one
        no more; if it is not, the round is over. Forced acceptance draws from ``seed``."""
        if not self.tokens:
            self.begin()
            return drawn, False
        draft, forced = self.tokens.pop(0), self.rule.forced_acceptance if self.rule is not None else None
        right = drawn == draft if forced is None else Random(seed).random() < forced
        self.counts.accepted += right
        self.counts.rejected += not right
        if not right:
            self.begin()
        return draft if right else drawn, right


def draw_seed(seed: int, known: int) -> int:
    """What forced acceptance draws from, for the draft behind ``known`` tokens of a sequence with this seed."""
    return seed * 1_000_003 + known


def take_drawn(engine: Engine, draws: list[Draw], drawn: Drawn) -> None:
    """Give each sequence the tokens that were drawn for it, up to the first that is no draft or that ends it; and keep
    those that are drafts themselves. News go to ``_undelivered``."""
    closed: set[Sequence] = set()
    for draw, token, logprobs in zip(draws, drawn.tokens, drawn.logprobs, strict=True):
        sequence = draw.sequence
        if draw.draft:
            sequence.drafts.tokens.append(token)
            continue
        if sequence in closed:
            continue
        if sequence.drafts.tokens or draw.drafts:
            sequence.decode_steps += 1
        if draw.drafts:  # the draft in front was right, so its KV stands
            sequence.computed = len(sequence.tokens)
            engine._publisher.publish([sequence])
        token, right = sequence.drafts.judge(token, draw_seed(sequence.seed, len(sequence.tokens)))
        if logprobs is not None:
            sequence.sample_logprobs.append(logprobs)
        sequence.tokens.append(token)
        engine._undelivered.append(engine._take(sequence, token))
        if not right or sequence.finish_reason is not None:
            closed.add(sequence)
