"""Conversations that grow in turns and fork cheaply."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core import interrupts
from octavo.core.compression.kept_set import Point
from octavo.core.config import SamplingParams
from octavo.core.encoding.pieces import reused
from octavo.core.encoding.reusing import extended
from octavo.core.execution.token_list import TokenList
from octavo.core.interfaces import SegmentReuse, SparseMethod
from octavo.core.outputs import Completion, StepOutput
from octavo.core.request import Request
from octavo.core.sequence import Sequence as TokenSequence
from octavo.core.sequence import SparseSpan
from octavo.core.serving.producing import Produced, Producer, TurnState, checked, refusal
from octavo.core.serving.requests import new_request, require_room
from octavo.core.serving.turn import MARKER, Turn

if TYPE_CHECKING:
    from octavo.core.engine import Engine
    from octavo.core.serving.prompts import Prompt, ReadPrompt


class Session:
    """A history of tokens whose pages stay in the pool between turns.

    An idle session is parked: its pages are the first to go when others need room, and what is gone is found in the
    prefix cache or computed again at the next turn. So an idle session never blocks anybody, and the tokens of a
    turn never depend on whether its pages survived. One turn at a time; end it with ``close``.

    ``producers`` add to a turn while it is generated: when the model has drawn a marker (a token id) or written one (a
    text), the function that is registered for it is told of the turn (``TurnState``) and gives text, token ids, or a
    list of texts and images, which follow the marker; then the model goes on. The turn stays one request, whose stream
    names what was inserted. Functions run in a thread beside the engine, one after another, and hold up nobody else;
    what they must not do is to call the engine. A marker that is the last token which ``max_tokens`` allows calls
    nobody.

    Raises:
        ValueError: a marker that is no token id or text, or that ends sequences; a producer that cannot be called.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        method: SparseMethod | None,
        salt: str | None,
        producers: Mapping[int | str, Producer],
        reuse: SegmentReuse | None,
    ) -> None:
        self._engine = engine
        self._method = method
        self._salt = salt
        self._producers = checked(producers, engine)
        self._turn: Turn | None = None
        self._reuse = reuse
        self._spans: list[SparseSpan] = []
        self._points: list[Point] = []
        self._parked: TokenSequence | None = None
        self._busy: str | None = None
        self._closed = False
        self._messages: list[dict[str, str]] = []
        self._rendered = ""
        self._layout = engine._text
        self.tokens: list[int] = []
        if len(prompt):
            self.append(prompt)

    def append(self, prompt: Prompt, *, role: str | None = None) -> None:
        """Add text, token ids, or a list of texts and images to the history. With ``role`` text becomes a message of
        the tokenizer's chat template; after a "user" message the template's cue for an answer is added too.

        Raises:
            ValueError: the session is closed or busy, or the prompt cannot be read.
        """
        self._require_idle()
        if role is not None:
            prompt = self._render(prompt, role)
        reader = self._engine._prompts
        self._extend(reader.read_segments(prompt, continues=bool(self.tokens) or role is not None))

    @interrupts.held()
    def submit(self, params: SamplingParams | None = None, *, priority: int = 0) -> str:
        """Queue the next turn and give its request id; the history takes up the new tokens when it ends."""
        self._require_idle()
        params = params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"a session's turn has one sample, got n={params.n}; fork() the session for more")
        engine = self._engine
        if not self.tokens:
            raise ValueError("the session is empty; append something before a turn")
        request = new_request(
            engine, self.tokens.copy(), params, None, self._method, priority, self._salt, layout=self._layout
        )
        request.keep, request.markers = self._take_back, frozenset(self._producers)
        self._turn, self._busy = Turn(request), request.request_id
        self._begin(request)
        return request.request_id

    def _begin(self, request: Request) -> None:
        """Enter a turn, or a leg of one, on the pages that are left."""
        engine = self._engine
        sequence = TokenSequence(request, 0, TokenList(request.prompt), engine._pool, engine._plan)
        if request.compressor is not None and request.compressor.renews:
            self._spans, self._points = [], []  # a turn sees all of the earlier ones, which are text by now
        if request.method is not None:
            known = self._spans[-1].stop if self._spans else 0
            sequence.sparse_spans = [*self._spans, *sequence.method_spans(known)]
            sequence.points = self._points = [*self._points, *map(self._observed, sequence.points)]
        engine._enter(request, sequence)
        parked, self._parked = self._parked, None
        if parked is not None and engine.recorder is not None:
            engine.recorder.continued(sequence, parked)
        if parked is not None and engine._scheduler.unpark(parked):
            sequence.inherit(parked)
            kept = min(sequence.computed, max(0, sequence.reusable_tokens()))  # some token's logits are still wanted
            sequence.truncate(kept)
            if reused(sequence.layout, sequence.computed):  # admission places those, and finds the rest again
                sequence.rewind()
                engine._scheduler.add(sequence)
                return
            held = np.unique(np.concatenate([table.held for table in sequence.tables]))
            engine._pool.book.touch(held, request.priority)
            if engine._scheduler.run(sequence):
                request.cached_tokens = sequence.computed
                return
            sequence.rewind()
        engine._scheduler.add(sequence)

    def generate(self, params: SamplingParams | None = None) -> Completion:
        """Run the next turn to its end.

        Raises:
            ValueError: an image of the history could not be encoded; what a producer raised, if that is a ValueError,
                or else with it as its cause.
        """
        request_id = self.submit(params)
        completion = self._engine.finish([request_id])[request_id]
        if completion.error is not None:
            raise completion.error
        return completion

    @interrupts.held()
    def fork(self) -> Session:
        """A session with the same history that shares every page; either may go on without the other noticing."""
        self._require_idle()
        twin = Session(self._engine, "", self._method, self._salt, self._producers, self._reuse)
        twin.tokens, twin._spans, twin._points = self.tokens, self._spans.copy(), self._points
        twin._messages, twin._rendered = self._messages.copy(), self._rendered
        twin._layout = self._layout
        if self._parked is not None and self._parked in self._engine._scheduler.parked:
            request = self._parked.request
            twin._parked = TokenSequence(
                request, self._parked.sample, self._parked.tokens.fork(), self._engine._pool, self._engine._plan
            )
            twin._parked.adopt_prefix(self._parked)
            self._engine._scheduler.parked.append(twin._parked)
            if self._engine.recorder is not None:
                self._engine.recorder.forked(twin._parked, self._parked)
                self._engine.recorder.parked(twin._parked)
        return twin

    @interrupts.held()
    def close(self) -> None:
        """Give the pages back. A turn that is under way is aborted."""
        if self._busy is not None:
            self._engine.abort(self._busy)
        if self._parked is not None and self._engine._scheduler.unpark(self._parked):
            self._parked.rewind()
        if self._parked is not None and self._engine.recorder is not None:
            self._engine.recorder.closed(self._parked)
        self._parked, self._closed = None, True

    def _take_back(self, sequence: TokenSequence, output: StepOutput) -> None:
        """A leg of a turn has ended: keep its tokens, but for a stop string that was cut from its text. If it has ended
        at a marker, the turn goes on behind what its producer gives."""
        turn = self._turn
        assert turn is not None and output.completion is not None
        prompt = len(sequence.request.prompt)
        kept = self._kept_tokens(sequence)
        if sequence.request.method is not None:
            self._spans = [*sequence.sparse_spans[:-1], sequence.sparse_spans[-1]._replace(stop=prompt + len(kept))]
        self.tokens = sequence.request.prompt + kept
        common = prompt
        while common < min(len(self.tokens), len(sequence.tokens)) and self.tokens[common] == sequence.tokens[common]:
            common += 1
        sequence.truncate(min(sequence.computed, common))
        self._parked = sequence
        if self._messages and sequence.detokenizer is not None:
            self._rendered += sequence.detokenizer.text
        turn.end_leg(output.completion)
        if output.finish_reason == MARKER:
            output.finish_reason = output.completion = None
            self._produce(turn, sequence)
        else:
            output.completion = self._end(turn, sequence.finish_reason or "", output.completion.error)

    def _produce(self, turn: Turn, sequence: TokenSequence) -> None:
        """Ask the producer of the marker that has ended a leg."""
        found = None if sequence.detokenizer is None else sequence.detokenizer.marker
        marker = sequence.tokens[-1] if found is None else found
        state = TurnState(self.tokens.copy(), turn.text, marker, len(turn.inserted))
        producer, reader = self._producers[marker], self._engine._prompts

        def work() -> Produced:
            items = producer(state)
            prompt = items if isinstance(items, str | list | tuple) else [] if items is None else [items]
            return Produced(items, reader.read_segments(prompt, continues=True) if prompt else None)

        self._engine._productions.begin(turn.request.request_id, work, partial(self._resume, turn))

    def _resume(self, turn: Turn, future: Future[Produced]) -> None:
        """Go on with a turn behind what a producer gave, or end it: it failed, or the turn was aborted."""
        engine, request = self._engine, turn.request
        error = None
        try:
            items, read = future.result()
            layout = self._layout if read is None else self._layout.extended(len(self.tokens), read.segments)
            tokens = self.tokens if read is None else self.tokens + read.tokens
            params = turn.next_params()
            require_room(engine, layout, len(tokens), params, self._method)
        except CancelledError:
            pass
        except Exception as failure:  # a producer is the user's: whatever it raises, others go on
            error = refusal(failure)
        else:
            self.tokens, self._layout = tokens, layout
            turn.inserted.append((turn.generated, items))
            turn.request = replace(request, prompt=tokens.copy(), params=params, layout=layout, sequences=[])
            turn.request.cached_tokens = None
            engine._undelivered.append(StepOutput(request.request_id, 0, [], "", inserted=items))
            self._begin(turn.request)
            return
        completion = self._end(turn, "abort", error)
        engine._undelivered.append(StepOutput(request.request_id, 0, [], "", "abort", completion))

    def _end(self, turn: Turn, reason: str, error: ValueError | None) -> Completion:
        """The turn is over."""
        self._turn = self._busy = None
        if self._messages:
            self._messages.append({"role": "assistant", "content": turn.text})
        return turn.completion(reason, error)

    def _extend(self, read: ReadPrompt) -> None:
        self._layout = extended(self._engine, self._layout, len(self.tokens), read.segments, self._reuse)
        self.tokens = self.tokens + read.tokens  # a new list: forks share the old one

    def _observed(self, point: Point) -> Point:
        """The point of a turn's prompt, with a window of queries that are computed in this turn in any case."""
        return Point(point.at, min(point.window, max(1, point.at - (self._spans[-1].stop if self._spans else 0))))

    def _kept_tokens(self, sequence: TokenSequence) -> list[int]:
        generated = sequence.tokens[len(sequence.request.prompt) :]
        detokenizer = sequence.detokenizer
        stopped = detokenizer is not None and detokenizer.stopped and not sequence.request.params.include_stop
        if detokenizer is None or not (stopped or detokenizer.marker is not None):
            return generated

        def decoded(tokens: list[int]) -> str:
            text: str = self._engine.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            return text

        kept = len(generated)
        while kept and not detokenizer.text.startswith(decoded(generated[:kept])):
            kept -= 1
        rest = detokenizer.text[len(decoded(generated[:kept])) :]
        return generated[:kept] + (self._engine._prompts.read(rest, continues=True) if rest else [])

    def _render(self, prompt: Any, role: str) -> str:
        """The text that a chat template adds for one more message."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"role={role!r} needs a tokenizer with a chat template, and this engine's has none")
        if not isinstance(prompt, str):
            raise ValueError(f"role={role!r} needs text, got {type(prompt).__name__}")
        messages = [*self._messages, {"role": role, "content": prompt}]
        rendered: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=role not in ("assistant", "system")
        )
        if not rendered.startswith(self._rendered):
            raise ValueError("the chat template rewrites earlier messages, so a session cannot grow by it; append text")
        added = rendered[len(self._rendered) :]
        if self._messages and self.tokens and self.tokens[-1] in self._engine._eos:
            added = added.removeprefix(tokenizer.decode(self.tokens[-1:], skip_special_tokens=False))
        self._messages, self._rendered = messages, rendered
        return added

    def _require_idle(self) -> None:
        if self._closed:
            raise ValueError("the session is closed")
        if self._busy is not None:
            raise ValueError(f"a turn of the session is under way as request {self._busy!r}; wait for it, or abort it")
