"""A batch of prompts, from first to last: what an engine does when nobody follows its stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.core import interrupts
from octavo.core.config import SamplingParams
from octavo.core.errors import BatchError
from octavo.core.outputs import Completion, Sample, StepOutput
from octavo.core.serving.prompts import Prompt, ReadPrompt
from octavo.core.serving.requests import accept

if TYPE_CHECKING:
    from octavo.core.engine import Engine

WORTH = 16
"""Prompts that are worth a thread."""

AHEAD = 64
"""Prompts that are read, or being read, before the engine has asked for them."""


def generate(
    engine: Engine, prompts: Sequence[Prompt] | str, params: SamplingParams | Sequence[SamplingParams] | None
) -> list[Completion]:
    """``Engine.generate``. A large batch of texts or images goes through three stages that overlap::

        threads   read prompts: tokenise, decode images, name them         write the texts of finished requests
        caller                       plan steps
        device                            compute them

    The first stage is asked by the second, and not the other way round: before a step prompts are taken, in order,
    until a whole step's tokens wait, and one that is not read yet is waited for. So who computes beside whom depends on
    the prompts alone and on no thread's pace, and a batch gives what it gave before, run after run. Texts are decoded
    when a request has ended, since nobody follows it; where stop strings are looked for, that happens token by token in
    the caller's thread, as in a stream. The threads end with the call, however it ends.

    Small batches and those of token ids are read before the first step, in the caller's thread.
    """
    if not isinstance(prompts, str | Sequence):
        raise ValueError(f"prompts must be a list of prompts, got {type(prompts).__name__}")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts came with {len(each)} sampling parameters; give one, or one a prompt")
    worth = len(prompts) >= WORTH and not all(map(_is_ids, prompts))
    with _threads(engine.config.host_threads if worth else 0) as pool:
        batch = _Batch(engine, pool, prompts, each)
        completions = finish(engine, [], batch.feed)
        batch.end()
    ordered: list[Completion | None] = [None] * len(prompts)
    for request_id, completion in completions.items():
        if completion.error is None:
            ordered[batch.ids[request_id]] = completion
        else:
            batch.errors[batch.ids[request_id]] = completion.error
    if batch.errors:
        raise BatchError(ordered, batch.errors)
    return [completion for completion in ordered if completion is not None]


def finish(
    engine: Engine, request_ids: list[str], feed: Callable[[set[str], dict[str, Completion]], None] | None = None
) -> dict[str, Completion]:
    """``Engine.finish``. ``feed`` is called before every step with what is waited for, to which it may add, and what is
    complete."""
    waiting = set(request_ids)
    completions: dict[str, Completion] = {}
    others: list[StepOutput] = []
    try:
        while True:
            if feed is not None:
                feed(waiting, completions)
            if not waiting:
                break
            for output in engine.step():
                if output.request_id not in waiting:
                    others.append(output)
                elif output.completion is not None:
                    completions[output.request_id] = output.completion
                    waiting.remove(output.request_id)
    finally:
        with interrupts.held():
            for request_id in waiting:
                engine.abort(request_id)
            others += [output for output in engine._undelivered if output.request_id not in waiting]
            engine._undelivered = others
    return completions


class _Batch:
    """Prompts on their way into an engine, and texts on their way out.

    ``ids`` are the requests so far, each with the number of its prompt, ``errors`` why others were refused.
    """

    def __init__(
        self,
        engine: Engine,
        pool: ThreadPoolExecutor | None,
        prompts: Sequence[Prompt],
        each: Sequence[SamplingParams],
    ) -> None:
        self.ids: dict[str, int] = {}
        self.errors: dict[int, Exception] = {}
        self._engine = engine
        self._pool = pool
        self._each = each
        self._reads = enumerate(_read_ahead(pool, engine._prompts.read_segments, prompts))
        self._texts: list[tuple[Sample, Future[str]]] = []
        self._seen = 0

    def feed(self, waiting: set[str], completions: dict[str, Completion]) -> None:
        """Have texts written, and submit prompts: all of them, or, with threads, until a whole step's tokens wait."""
        for name in list(completions)[self._seen :]:
            self._write(completions[name], self._each[self.ids[name]])
        self._seen = len(completions)
        queued = sum(len(sequence.tokens) for sequence in self._engine._scheduler.waiting)
        while self._pool is None or queued < self._engine.config.step_tokens:
            index, read = next(self._reads, (None, None))
            if index is None or read is None:
                break
            params = self._each[index]
            try:
                prompt = read()
                name = accept(self._engine, prompt, params, streamed=not self._written_later(params))
            except ValueError as error:
                self.errors[index] = error
                continue
            waiting.add(name)
            self.ids[name] = index
            queued += len(prompt.tokens)

    def end(self) -> None:
        """Wait for the texts."""
        for sample, text in self._texts:
            sample.text = text.result()

    def _written_later(self, params: SamplingParams) -> bool:
        threads = self._pool is not None and self._engine.tokenizer is not None
        return threads and isinstance(params, SamplingParams) and not params.stop

    def _write(self, completion: Completion, params: SamplingParams) -> None:
        if self._pool is None or not self._written_later(params):
            return
        for sample in completion.samples:
            ended = sample.finish_reason == "stop" and not params.include_stop  # by its last token, which is no text
            tokens = sample.token_ids[:-1] if ended else sample.token_ids
            self._texts.append((sample, self._pool.submit(self._engine._prompts.write, tokens)))


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor | None]:
    """So many threads within the block, which drops what none has begun with when it ends."""
    if count == 0:
        yield None
        return
    pool = ThreadPoolExecutor(count, thread_name_prefix="octavo-host")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _read_ahead(
    pool: ThreadPoolExecutor | None, read: Callable[[Prompt], ReadPrompt], prompts: Sequence[Prompt]
) -> Iterator[Callable[[], ReadPrompt]]:
    """What gives, or raises, each prompt's outcome, in order."""
    if pool is None:
        yield from (partial(read, prompt) for prompt in prompts)
        return
    pending: deque[Future[ReadPrompt]] = deque()
    for prompt in prompts:
        pending.append(pool.submit(read, prompt))
        if len(pending) > AHEAD:
            yield pending.popleft().result
    while pending:
        yield pending.popleft().result


def _is_ids(prompt: Any) -> bool:
    """Whether a prompt looks like token ids, which take no time to read."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], int)
