"""An encoder that encodes an image once for all who come with it, as long as its embeddings fit into some bytes."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.core.interfaces import SegmentEncoder
from octavo.multimodal.encoder_cache import EncoderCache

Name = tuple[bytes, bytes]
"""Identity and witness."""


class VerifiedEncoder(SegmentEncoder, Protocol):
    """One that has a ``witness``, by which a hit is verified."""

    def witness(self, item: Any) -> bytes: ...


class CachedEncoder:
    """A ``SegmentEncoder`` whose embeddings outlive the requests that needed them.

    ::

        encoder = CachedEncoder(ImageEncoder(tower, projector), capacity_bytes=256 << 20)
        engine = Engine(model, tokenizer, config, encoders={"image": encoder})             # in the engine's step, or
        with EncodeWorker(encoder) as worker:                                              # beside it

    An engine holds embeddings while somebody needs them, so a preempted request finds its images whatever is evicted
    here, and lets go of them once an image's KV is computed. Who needs them again finds them here: the same image
    behind another text under ``EncoderOnlyReuse``, after its pages are evicted, or in another engine. One cache may
    serve several threads and engines.

    Scores of tokens (``encode_scored``) are not kept here, and who asks for them has the image encoded: an engine keeps
    them itself.

    Attributes:
        cache: the ``EncoderCache``, with its counts.

    Raises:
        ValueError: an encoder without ``witness``, or a capacity below 0.
    """

    def __init__(self, encoder: VerifiedEncoder, capacity_bytes: int) -> None:
        if not callable(getattr(encoder, "witness", None)):
            raise ValueError(f"{encoder!r:.80} has no witness(item), a second digest by which a hit is verified")
        self.cache = EncoderCache(capacity_bytes)
        self._encoder = encoder
        self._lock = Lock()
        self.bidirectional = encoder.bidirectional
        self.identity, self.n_tokens, self.witness = encoder.identity, encoder.n_tokens, encoder.witness
        # What an encoder may lack, this lacks, too.
        for name in ("read", "scores_tokens", "encode_scored"):
            if hasattr(encoder, name):
                setattr(self, name, getattr(encoder, name))

    def encode(self, items: Sequence[Any]) -> Tensor:
        """Embeddings [I, N, D] of I items of N tokens each.

        1. What is in the cache is pinned for this call, so that what is put there cannot evict it.
        2. The others are encoded together, equal ones once, and put there, once the device has computed them, as far as
           there is room. So whoever finds them may read them at once, on whatever stream.
        3. All pins end.
        """
        if not items:
            return self._encoder.encode(items)
        names: list[Name] = [(self.identity(item), self.witness(item)) for item in items]
        wanted = dict(zip(names, items, strict=True))
        call = object()
        with self._lock:
            known = {name: self.cache.acquire(*name, call) for name in wanted}
        found = {name: rows for name, rows in known.items() if rows is not None}
        pinned = [*found]
        missing = [name for name in wanted if name not in found]
        try:
            if missing:
                encoded = self._encoder.encode([wanted[name] for name in missing])
                if encoded.is_cuda:
                    torch.cuda.current_stream(encoded.device).synchronize()
                found |= zip(missing, encoded, strict=True)
                with self._lock:
                    pinned += [name for name in missing if self.cache.insert(*name, found[name], call)]
            for rows in found.values():
                if rows.is_cuda:  # evicted while this stream still reads them, they must not have their memory back
                    rows.record_stream(torch.cuda.current_stream(rows.device))
            return torch.stack([found[name] for name in names])
        finally:
            with self._lock:
                for identity, _ in pinned:
                    self.cache.release(identity, call)
