"""Embeddings of images, from the step that computes an image's first token to the one that computes its last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from octavo.core import interrupts
from octavo.core.encoding.item import Item
from octavo.core.hf_model import HFModel
from octavo.core.interfaces import SegmentEncoder
from octavo.core.memory.prefix_cache import Tags
from octavo.core.scheduler import Chunk
from octavo.core.sequence import Request
from octavo.core.sequence import Sequence as TokenSequence


class EncodedItems:
    """What the steps of an engine need of its encoder's output.

    An item is encoded in the step that computes its first token (or, after a prefix hit that ends inside of it, the
    first one that is left), and its embeddings are kept until no running sequence is in the middle of it. So a prompt
    whose images are all found in the prefix cache never asks the encoder, and one that is preempted inside an image
    asks again. Encoders that are slow can keep more, for several requests, behind ``encode``.
    """

    def __init__(self, encoder: SegmentEncoder | None, model: HFModel) -> None:
        self._encoder = encoder
        self._width = model.embedding_width() if encoder is not None else 0
        self._device = model.device
        self._embeddings: dict[Tags, Tensor] = {}

    def encode(self, chunks: Sequence[Chunk]) -> list[tuple[Request, ValueError]]:
        """Encode what the chunks need and is not there, equal items once, items of as many tokens in one call.

        If a call fails, its items are encoded one by one. Gives the requests whose items fail alone, and why.
        """
        if self._encoder is None:
            return []
        needed = [(c.sequence.request, item) for c in chunks for item, *_ in c.sequence.layout.items(c.start, c.end)]
        missing = {item.name: item for _, item in needed if item.name not in self._embeddings}
        errors: dict[Tags, ValueError] = {}
        for _, group in groupby(sorted(missing.values(), key=_tokens), _tokens):
            errors |= self._encode_group(list(group))
        failed = {request.request_id: (request, errors[item.name]) for request, item in needed if item.name in errors}
        return list(failed.values())

    def placed(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor] | None:
        """Where among the chunks' tokens, packed in one row, items stand: indices int64 [E], and the embeddings [E, D]
        of those tokens; None if there are none. Precondition: ``encode`` has been called for these chunks."""
        if not self._embeddings:  # a step of text pays nothing
            return None
        at: list[Tensor] = []
        rows: list[Tensor] = []
        first = 0
        for chunk in chunks:
            for item, start, end in chunk.sequence.layout.items(chunk.start, chunk.end):
                begin, stop = max(start, chunk.start), min(end, chunk.end)
                at.append(torch.arange(begin, stop) - chunk.start + first)
                rows.append(self._embeddings[item.name][begin - start : stop - start])
            first += chunk.count
        return (torch.cat(at).to(self._device), torch.cat(rows)) if rows else None

    def spans(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Bidirectional spans of the chunks' tokens, packed in one row: ``q_span`` int32 [T, 2] of ``ops.prefill``, or
        None if there are none."""
        if not self._embeddings:
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

    def keep(self, running: Iterable[TokenSequence]) -> None:
        """Let go of all but what sequences are in the middle of."""
        if self._embeddings:
            names = self._begun(running)
            self._embeddings = {name: rows for name, rows in self._embeddings.items() if name in names}

    def check(self, running: Iterable[TokenSequence]) -> None:
        stale = self._embeddings.keys() - self._begun(running)
        if stale:
            raise AssertionError(f"embeddings of {len(stale)} items are kept, and no running sequence is inside them")

    def _begun(self, running: Iterable[TokenSequence]) -> set[Tags]:
        at = ((sequence, sequence.computed) for sequence in running)
        spans = (
            span for sequence, token in at for span in sequence.layout.items(token, token + 1) if token > span.start
        )
        return {span.item.name for span in spans}

    def _encode_group(self, items: list[Item]) -> dict[Tags, ValueError]:
        try:
            self._embeddings |= {i.name: rows for i, rows in zip(items, self._encoded(items), strict=True)}
        except Exception as error:  # an encoder is the user's: whatever it raises, others go on
            if len(items) > 1:
                return {name: alone for item in items for name, alone in self._encode_group([item]).items()}
            if isinstance(error, ValueError):
                return {items[0].name: error}
            refusal = ValueError(f"the {items[0].kind} encoder failed: {error!r}")
            refusal.__cause__ = error
            return {items[0].name: refusal}
        return {}

    def _encoded(self, items: list[Item]) -> Sequence[Tensor]:
        """Embeddings [N, D] of items of N tokens each."""
        assert self._encoder is not None
        plain = torch.autocast(self._device.type, enabled=False)  # what is cached does not depend on the caller's
        with torch.no_grad(), plain, interrupts.let_through():
            embeddings = self._encoder.encode([item.value for item in items])
        wanted = (len(items), items[0].tokens, self._width)
        shape = tuple(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__
        if shape != wanted:
            raise ValueError(
                f"the {items[0].kind} encoder gave embeddings of {shape}, and {wanted} were due: items, tokens of each "
                "by n_tokens, and the width of the language model"
            )
        return embeddings.to(self._device).unbind()


def _tokens(item: Item) -> int:
    return item.tokens
