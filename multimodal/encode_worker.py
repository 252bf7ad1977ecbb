"""Encoding in a thread of its own, in batches, while the engine goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.core.interfaces import Encoded, SegmentEncoder


class _Job(NamedTuple):
    item: Any
    tokens: int
    future: Future[Any]
    scored: bool

    @property
    def kind(self) -> tuple[int, bool]:
        """What all of a batch have in common."""
        return self.tokens, self.scored


class EncodeWorker:
    """Encodes items first come, first served, in one thread, which starts with the first item.

    ::

        with EncodeWorker(ImageEncoder(tower, projector)) as worker:
            engine = Engine(model, tokenizer, config, encoders={"image": worker})

    It is a ``SegmentEncoder`` itself, and an engine that has it goes on while images are encoded: text is decoded
    meanwhile, and the images of waiting requests are encoded in batches (``EngineConfig.encode_tokens`` says how many
    ahead). On a GPU it works on a stream of its own from the second batch on.

    A batch is as many of the waiting items, of one number of tokens and all scored or none, as fit into
    ``max_images`` and ``max_tokens``, and at least one. Whether an item's embeddings depend on the batch is the
    encoder's word to give (``ImageEncoder.batch_images``); the worker splits and never pads.

    Use it in a ``with`` block, which waits for what was submitted, or drops what is still waiting if it is left by an
    exception.

    Args:
        max_images: items a batch.
        max_tokens: tokens a batch, by the encoder's ``n_tokens``; None sets no limit.

    Attributes:
        encoded, failed: items so far. batches: calls of ``encode`` for them, repeated ones included.
    """

    def __init__(self, encoder: SegmentEncoder, *, max_images: int = 8, max_tokens: int | None = None) -> None:
        for name, limit in (("max_images", max_images), ("max_tokens", max_tokens)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1, got {limit}")
        self.encoded = self.failed = self.batches = 0
        self._encoder = encoder
        self._max_images = max_images
        self._max_tokens = max_tokens
        self._waiting: deque[_Job] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="octavo-encode")
        self._stream: torch.cuda.Stream | None = None
        self.bidirectional = encoder.bidirectional
        self.identity, self.n_tokens = encoder.identity, encoder.n_tokens
        # What an encoder may lack, this lacks, too.
        for name in ("read", "witness", "scores_tokens", "encode_scored"):
            if hasattr(encoder, name):
                setattr(self, name, getattr(encoder, name))
        self._lock = threading.Lock()  # keeps submit and close apart; the queue needs none
        self._closed = False

    def submit(self, items: Sequence[Any], *, scored: bool = False) -> list[Future[Any]]:
        """A future an item: its embeddings [N, D], or, ``scored``, an ``Encoded`` of [N, D] and [N], in memory of their
        own, complete on the device when the future is done, or what the encoder raised for it. A future that is
        cancelled before its batch begins is not encoded.

        Raises:
            RuntimeError: the worker is closed.
            Whatever the encoder's ``n_tokens`` raises; then nothing is submitted.
        """
        jobs = [_Job(item, self._encoder.n_tokens(item), Future(), scored) for item in items]
        with self._lock:
            if self._closed:
                raise RuntimeError("the encode worker is closed")
            self._waiting.extend(jobs)
            for _ in jobs:  # one step an item is enough for any batching; a step that finds nothing does nothing
                self._executor.submit(self._step)
        return [job.future for job in jobs]

    def encode(self, items: Sequence[Any]) -> Tensor:
        """Embeddings [I, N, D] of items of N tokens each, in the caller's thread."""
        return self._encoder.encode(items)

    def close(self, *, cancel: bool = False) -> None:
        """End the thread, after all that was submitted; ``cancel`` drops what no batch has begun with."""
        with self._lock:
            self._closed = True
        if cancel:
            for job in list(self._waiting):
                job.future.cancel()
        self._executor.shutdown()

    def __enter__(self) -> EncodeWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.close(cancel=kind is not None)

    def _step(self) -> None:
        """One batch.

        1. Take items from the front of the queue.
        2. Encode them together. If that fails, encode each alone, so that only those fail that fail alone.
        3. Resolve their futures.
        """
        batch = self._take()
        if not batch:
            return
        try:
            embeddings = self._encode(batch)
        except BaseException as error:  # whatever it is, nobody may wait for ever
            if len(batch) == 1:
                self._fail(batch[0], error)
                return
            for job in batch:
                try:
                    self._resolve([job], self._encode([job]))
                except BaseException as alone:
                    self._fail(job, alone)
        else:
            self._resolve(batch, embeddings)

    def _take(self) -> list[_Job]:
        """The next batch, without what was cancelled. Only the worker's thread takes from the queue."""
        batch: list[_Job] = []
        tokens = 0
        while self._waiting and len(batch) < self._max_images:
            tokens += self._waiting[0].tokens
            if batch and self._max_tokens is not None and tokens > self._max_tokens:
                break
            if batch and self._waiting[0].kind != batch[0].kind:
                break
            job = self._waiting.popleft()
            if job.future.set_running_or_notify_cancel():
                batch.append(job)
            else:
                tokens -= job.tokens
        return batch

    def _encode(self, batch: list[_Job]) -> list[Any]:
        self.batches += 1
        stream: AbstractContextManager[Any] = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.no_grad(), stream:  # both are this thread's own affair
            items = [job.item for job in batch]
            scores = None
            if batch[0].scored:
                embeddings, scores = self._encoder.encode_scored(items)  # type: ignore[attr-defined]
            else:
                embeddings = self._encoder.encode(items)
            assert len(embeddings) == len(batch), f"{len(batch)} items were encoded as {len(embeddings)}"
            rows: list[Any] = [row.clone() for row in embeddings]  # a row of the batch would keep all of it alive
            if scores is not None:
                rows = [Encoded(row, own.clone()) for row, own in zip(rows, scores, strict=True)]
            if embeddings.is_cuda:
                torch.cuda.current_stream(embeddings.device).synchronize()
                self._stream = self._stream or torch.cuda.Stream(embeddings.device)  # type: ignore[no-untyped-call]
        return rows

    def _resolve(self, batch: list[_Job], rows: list[Any]) -> None:
        self.encoded += len(batch)
        for job, row in zip(batch, rows, strict=True):
            job.future.set_result(row)

    def _fail(self, job: _Job, error: BaseException) -> None:
        self.failed += 1
        job.future.set_exception(error)
