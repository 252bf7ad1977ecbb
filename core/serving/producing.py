"""What a session's turn waits for: text and images that a user's function makes while the model pauses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from octavo.core.engine import Engine
    from octavo.core.serving.prompts import ReadPrompt


class TurnState(NamedTuple):
    """What a producer is told.

    Attributes:
        tokens: the session's history, the marker at its end; positions of images hold their placeholders.
        text: what the model has said in this turn so far, the marker included; "" without a tokenizer.
        marker: the token id or the text that the producer was registered for.
        calls: producers that this turn has called before.
    """

    tokens: list[int]
    text: str
    marker: int | str
    calls: int


Producer = Callable[[TurnState], Any]
"""Gives what a prompt may be: text, token ids, or a list of texts and images. Empty, nothing is appended."""


class Produced(NamedTuple):
    """What a producer gave, and what the model reads of it; None if it is empty."""

    items: Any
    read: ReadPrompt | None


class _Production(NamedTuple):
    future: Future[Produced]
    resume: Callable[[Future[Produced]], None]


class Productions:
    """Producers at work for an engine, one after another, in a thread that begins with the first.

    The engine looks in at the start of a step (``deliver``), so whatever a result changes, it changes there.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._pending: dict[str, _Production] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._pending

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def futures(self) -> list[Future[Produced]]:
        return [production.future for production in self._pending.values()]

    def begin(self, request_id: str, work: Callable[[], Produced], resume: Callable[[Future[Produced]], None]) -> None:
        """Let ``work`` be done; ``resume`` gets its outcome, in the engine's thread."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-produce")
        self._pending[request_id] = _Production(self._thread.submit(work), resume)

    def deliver(self) -> None:
        """Resume whoever's producer is done."""
        for request_id in [name for name, production in self._pending.items() if production.future.done()]:
            production = self._pending.pop(request_id)
            production.resume(production.future)

    def abort(self, request_id: str) -> None:
        """Wait no longer; a producer that is at work goes on, and nobody hears of it."""
        production = self._pending.pop(request_id)
        production.future.cancel()
        cancelled: Future[Produced] = Future()
        cancelled.cancel()
        production.resume(cancelled)


def checked(producers: Mapping[int | str, Producer], engine: Engine) -> dict[int | str, Producer]:
    """The producers of a session.

    Raises:
        ValueError: as ``Session``.
    """
    for marker, producer in producers.items():
        if isinstance(marker, bool) or not isinstance(marker, int | str) or marker == "":
            raise ValueError(f"a producer's marker is a token id or a text, got {marker!r:.80}")
        if isinstance(marker, str) and engine.tokenizer is None:
            raise ValueError(f"the marker {marker!r} is text and needs a tokenizer; give its token id")
        if isinstance(marker, int) and not 0 <= marker < engine.spec.vocab_size:
            raise ValueError(
                f"the marker {marker} is outside the vocabulary of {engine.spec.vocab_size} tokens; a token "
                "that no text has may be added to the tokenizer and the model"
            )
        if marker in engine._eos:
            raise ValueError(f"the marker {marker} ends sequences; choose a token or text that does not")
        if not callable(producer):
            raise ValueError(f"the producer of {marker!r} cannot be called: {producer!r:.80}")
    return dict(producers)


def refusal(error: Exception) -> ValueError:
    """What a turn ends with whose producer, or what it gave, failed."""
    if isinstance(error, ValueError):
        return error
    refused = ValueError(f"a producer of the session failed: {error!r}")
    refused.__cause__ = error
    return refused
