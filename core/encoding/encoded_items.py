"""Embeddings of images, from when somebody is about to need them to the step that computes an image's last token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from octavo.core import interrupts
from octavo.core.encoding.item import Item
from octavo.core.encoding.pieces import computed_items
from octavo.core.hf_model import HFModel
from octavo.core.interfaces import Encoded, SegmentEncoder
from octavo.core.memory.prefix_cache import Tags
from octavo.core.request import Request
from octavo.core.sequence import Sequence as TokenSequence
from octavo.core.step_plan import Chunk

MOST_SCORES = 4096
"""Items whose tokens' scores are kept: a few KB each, and without them an image whose pages are found would have to be
encoded."""


@dataclass
class _Held:
    """An item that somebody needs: being encoded (``future``), encoded (``rows`` [N, D]), or one that cannot be."""

    item: Item
    users: set[TokenSequence] = field(default_factory=set)
    future: Future[Tensor | Encoded] | None = None
    rows: Tensor | None = None
    error: ValueError | None = None


class EncodedItems:
    """What the steps of an engine need of its encoder's output.

    An item is encoded when a sequence is about to compute its first token (or, after a prefix hit that ends inside of
    it, the first one that is left), and its embeddings are held until nobody who asked has tokens of it left. So a
    prompt whose images are all found in the prefix cache never asks the encoder, and one that is preempted inside an
    image finds it again. There are two kinds of encoders::

        plain             reach: is there budget?                     encode: of the step's chunks, in its thread
        with ``submit``   reach: hand it over; is it done?            encode: nothing is left to do

    ``budget_tokens`` of items are encoded a step at most; or, with ``submit``, are being encoded, or held, at any time.
    Either way somebody's next item never waits for the budget for ever: see ``reach``.

    Once ``scored`` is set, the encoder says with each item what its tokens are worth. That is kept longer than the
    embeddings, as methods ask for it once the whole prompt is computed, or found.
    """

    def __init__(self, encoder: SegmentEncoder | None, model: HFModel, budget_tokens: int | None, ahead: int) -> None:
        self._encoder = encoder
        self._submit = getattr(encoder, "submit", None)
        self._width = model.embedding_width() if encoder is not None else 0
        self._device = model.device
        self._budget = budget_tokens if self._submit is None else budget_tokens or ahead
        self._held: dict[Tags, _Held] = {}
        self._first: TokenSequence | None = None
        self._asked: dict[Tags, int] = {}
        self._scores: OrderedDict[Tags, Tensor] = OrderedDict()
        self.scored = False

    @property
    def kind(self) -> str:
        """The encoder's type, for messages; "" if there is none."""
        return "" if self._encoder is None else type(self._encoder).__name__

    @property
    def can_score(self) -> bool:
        return bool(getattr(self._encoder, "scores_tokens", False))

    @property
    def ahead(self) -> bool:
        """Whether items are encoded beside the engine, and so are worth asking for early."""
        return self._submit is not None

    @property
    def futures(self) -> list[Future[Tensor | Encoded]]:
        """What was being encoded when last somebody looked."""
        return [held.future for held in self._held.values() if held.future is not None]

    @property
    def held_tokens(self) -> int:
        """Tokens of items that are encoded, or being encoded, and still needed."""
        return sum(held.item.tokens for held in self._held.values())

    def begin(self) -> None:
        """A new step is planned: whoever asks first is first, and a plain encoder's budget is whole again."""
        self._first = None
        self._asked.clear()

    def reach(self, sequence: TokenSequence, start: int, stop: int) -> int:
        """How far of its tokens ``start`` to ``stop`` a sequence can be computed in the step that is planned: ``stop``;
        the first token of an item that the budget has no room for; ``start`` while an item is being encoded, as a step
        for the few tokens in front of it would cost more than it brings.

        Who asks first in a plan may exceed the budget by an item, if it holds none that it waits for. So whoever is
        next always gets on, however small the budget.
        """
        if self._encoder is None:
            return stop
        spans = computed_items(sequence.layout, start, stop)
        if spans and self._first is None:
            self._first = sequence
        waits = False
        for number, span in enumerate(spans):
            name = span.item.name
            if name not in self._held and name not in self._asked:
                if not self._has_room(span.item) and (number or self._first is not sequence):
                    return start if waits else max(start, span.start)
                self._ask(span.item)
            if (held := self._held.get(name)) is not None:
                held.users.add(sequence)
                waits |= not self._settled(held)
        return start if waits else stop

    def settle(self) -> bool:
        """Take over what is done by now; whether there was anything."""
        return sum(held.future is not None and self._settled(held) for held in self._held.values()) > 0

    def wants(self, sequence: TokenSequence) -> bool:
        """Whether it is worth looking what a sequence that cannot run yet needs."""
        if self._submit is None or sequence.layout.uniform or self.held_tokens >= (self._budget or 0):
            return False
        return any(span.item.name not in self._held for span in computed_items(sequence.layout, 0, sequence.goal))

    def encode(self, chunks: Sequence[Chunk]) -> list[tuple[Request, ValueError]]:
        """Encode what the chunks need and is not there, equal items once, items of as many tokens in one call.

        If a call fails, its items are encoded one by one. Gives the requests whose items fail alone, and why.
        """
        if self._encoder is None:
            return []
        needed = [(c.sequence, item) for c in chunks for item, *_ in c.sequence.layout.items(c.start, c.end)]
        for sequence, item in needed:
            self._held.setdefault(item.name, _Held(item)).users.add(sequence)
        missing = [held for held in self._held.values() if held.rows is None and held.error is None and not held.future]
        for _, group in groupby(sorted(missing, key=_tokens), _tokens):
            self._encode_group(list(group))
        errors = {name: held.error for name, held in self._held.items() if held.error is not None}
        requests = [((sequence.serves or sequence).request, item) for sequence, item in needed]
        failed = {r.request_id: (r, errors[item.name]) for r, item in requests if item.name in errors}
        return list(failed.values())

    def ready(self, chunk: Chunk) -> bool:
        """Whether what a chunk needs is encoded by now. Precondition: ``encode`` has been called for it."""
        spans = chunk.sequence.layout.items(chunk.start, chunk.end)
        return all(self._held[span.item.name].rows is not None for span in spans)

    def placed(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor] | None:
        """Where among the chunks' tokens, packed in one row, items stand: indices int64 [E], and the embeddings [E, D]
        of those tokens; None if there are none. Precondition: ``encode`` has been called for these chunks."""
        if not self._held:  # a step of text pays nothing
            return None
        at: list[Tensor] = []
        rows: list[Tensor] = []
        first = 0
        for chunk in chunks:
            for item, start, end in chunk.sequence.layout.items(chunk.start, chunk.end):
                begin, stop = max(start, chunk.start), min(end, chunk.end)
                at.append(torch.arange(begin, stop) - chunk.start + first)
                embeddings = self._held[item.name].rows
                assert embeddings is not None, f"tokens {begin} to {stop} are computed without their embeddings"
                rows.append(embeddings[begin - start : stop - start])
            first += chunk.count
        return (torch.cat(at).to(self._device), torch.cat(rows)) if rows else None

    def spans(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Bidirectional spans of the chunks' tokens, packed in one row: ``q_span`` int32 [T, 2] of ``ops.prefill``, or
        None if there are none."""
        if not self._held:
            return None
        found: list[tuple[int, int, int, int]] = []
        first = 0
        for chunk in chunks:
            for item, start, end in chunk.sequence.layout.items(chunk.start, chunk.end):
                if item.bidirectional:
                    assert chunk.start <= start and end <= chunk.end, f"tokens {start} to {end} are computed in parts"
                    found.append((first + start - chunk.start, first + end - chunk.start, start, end))
            first += chunk.count
        if not found:
            return None
        spans = torch.zeros(first, 2, dtype=torch.int32)
        for begin, stop, start, end in found:
            spans[begin:stop] = torch.tensor([start, end], dtype=torch.int32)
        return spans.to(self._device)

    def keep(self) -> None:
        """Let go of what nobody needs any more: who asked has computed it, or has ended."""
        for name, held in list(self._held.items()):
            held.users = {sequence for sequence in held.users if _needs(sequence, name)}
            if not held.users:
                if held.future is not None:
                    held.future.cancel()
                del self._held[name]

    def check(self) -> None:
        stale = [name for name, held in self._held.items() if not any(_needs(user, name) for user in held.users)]
        if stale:
            raise AssertionError(f"embeddings of {len(stale)} items are kept, and nobody who asked needs them")

    def scores(self, item: Item) -> Tensor:
        """What the encoder says of an item's tokens, fp32 [N]. It is asked once more if that is not known any longer.

        Raises:
            ValueError: it fails, or what it gives has another shape. Precondition: ``scored``.
        """
        assert self.scored, "no method said that it asks"
        if item.name not in self._scores:
            try:
                self._encoded([item])
            except Exception as error:  # an encoder is the user's
                raise _refusal(item, error) from error
        self._scores.move_to_end(item.name)
        return self._scores[item.name]

    def _keep_scores(self, items: list[Item], scores: Tensor) -> None:
        wanted = (len(items), items[0].tokens)
        if not isinstance(scores, Tensor) or tuple(scores.shape) != wanted:
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(
                f"the {items[0].kind} encoder gave scores of {shape}, and {wanted} were due: items, tokens"
            )
        for item, own in zip(items, scores.to(self._device, torch.float32), strict=True):
            self._scores[item.name] = own.clone()  # a row of the batch would keep all of it alive
        while len(self._scores) > MOST_SCORES:
            self._scores.popitem(last=False)

    def _has_room(self, item: Item) -> bool:
        if self._budget is None:
            return True
        used = self.held_tokens if self.ahead else sum(self._asked.values())
        return used + item.tokens <= self._budget

    def _ask(self, item: Item) -> None:
        if self._submit is None:
            self._asked[item.name] = item.tokens
            return
        held = self._held[item.name] = _Held(item)
        try:
            (held.future,) = self._submit([item.value], **({"scored": True} if self.scored else {}))
        except Exception as error:  # a worker is the user's, too
            held.error = _refusal(item, error)

    def _settled(self, held: _Held) -> bool:
        """Whether it is known what became of an item; takes over what is done."""
        if held.future is not None and held.future.done():
            try:
                self._take(held, held.future.result())
            except BaseException as error:  # also what is no Exception: it was raised in another thread, for this item
                held.error = _refusal(held.item, error)
            held.future = None
        return held.future is None

    def _take(self, held: _Held, rows: Tensor | Encoded) -> None:
        item, wanted = held.item, (held.item.tokens, self._width)
        if isinstance(rows, Encoded):
            self._keep_scores([item], rows.scores[None])
            rows = rows.embeddings
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        if shape != wanted:
            raise ValueError(
                f"the {item.kind} encoder gave embeddings of {shape}, and {wanted} were due: tokens by n_tokens, and "
                "the width of the language model"
            )
        if rows.is_cuda:  # they were made on another stream, which must not have their memory back too early
            rows.record_stream(torch.cuda.current_stream(rows.device))
        held.rows = rows.to(self._device)

    def _encode_group(self, group: list[_Held]) -> None:
        try:
            for held, rows in zip(group, self._encoded([held.item for held in group]), strict=True):
                held.rows = rows
        except Exception as error:  # an encoder is the user's: whatever it raises, others go on
            if len(group) == 1:
                group[0].error = _refusal(group[0].item, error)
                return
            for held in group:
                self._encode_group([held])

    def _encoded(self, items: list[Item]) -> Sequence[Tensor]:
        """Embeddings [N, D] of items of N tokens each."""
        assert self._encoder is not None
        plain = torch.autocast(self._device.type, enabled=False)  # what is cached does not depend on the caller's
        with torch.no_grad(), plain, interrupts.let_through():
            values = [item.value for item in items]
            if self.scored:
                embeddings, scores = self._encoder.encode_scored(values)  # type: ignore[attr-defined]
                self._keep_scores(items, scores)
            else:
                embeddings = self._encoder.encode(values)
        wanted = (len(items), items[0].tokens, self._width)
        shape = tuple(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__
        if shape != wanted:
            raise ValueError(
                f"the {items[0].kind} encoder gave embeddings of {shape}, and {wanted} were due: items, tokens of each "
                "by n_tokens, and the width of the language model"
            )
        rows: Sequence[Tensor] = embeddings.to(self._device).unbind()
        return rows


def _tokens(held: _Held) -> int:
    return held.item.tokens


def _needs(sequence: TokenSequence, name: Tags) -> bool:
    """Whether a sequence lives and has tokens of an item left to compute."""
    if sequence.finish_reason is not None:
        return False
    return any(span.item.name == name for span in sequence.layout.items(sequence.computed, sequence.goal))


def _refusal(item: Item, error: BaseException) -> ValueError:
    if isinstance(error, ValueError):
        return error
    refusal = ValueError(f"the {item.kind} encoder failed: {error!r}")
    refusal.__cause__ = error
    return refusal
