"""The byte cost of decoding, in closed form: what a run will read, known before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.core.compression.interfaces import Compressor
from octavo.core.interfaces import ModelSpec, SparseMethod

Count = TypeVar("Count", int, NDArray[np.int64])


@dataclass(frozen=True)
class DecodeCost:
    """Bytes that ``steps`` decode steps of one sequence read from the pool, and from digests to choose (over all
    layers and KV heads)."""

    steps: int
    kv_bytes: int
    digest_bytes: int

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of K and V a decoded token; 0.0 if nothing was decoded."""
        return self.kv_bytes / self.steps if self.steps else 0.0


def predict_decode(
    spec: ModelSpec,
    method: SparseMethod | None,
    *,
    prompt_tokens: int,
    new_tokens: int,
    page_tokens: int,
    unit_tokens: int,
    itemsize: int,
    unseen_tokens: int = 0,
) -> DecodeCost:
    """Cost of generating ``new_tokens`` after a prompt.

    The first new token comes out of the prompt's last position, so there are ``new_tokens - 1`` decode steps, with
    ``prompt_tokens + 1, prompt_tokens + 2, ...`` tokens in the cache. A layer with a window reads the units that its
    window touches; a dense layer reads ceil(tokens / unit) units; a sparse layer reads the pages that its method
    predicts, the last of which is open and counts its filled units only. A method that drops tokens reads what it has
    kept when it was last due, ``unseen_tokens`` before the prompt's end and every so many from then on, and all since;
    or pages of those, as it predicts.
    """
    units = elements = listed = 0
    compressor: Compressor | None = getattr(method, "compressor", None)
    for tokens in range(prompt_tokens + 1, prompt_tokens + new_tokens):
        for layer, window in enumerate(spec.windows):
            if window or method is None:
                units += dense_units(tokens, window, unit_tokens)
                continue
            if compressor is not None:
                first = prompt_tokens - unseen_tokens
                every = compressor.every or tokens
                due = first + (tokens - 1 - first) // every * every
                kept = compressor.kept_units(due, layer, spec, page_tokens, unit_tokens)
                since = tokens - due // page_tokens * page_tokens
                if compressor.chooser is None:
                    listed += kept
                    units += dense_units(since, 0, unit_tokens)
                    continue
                among = kept // spec.kv_heads * unit_tokens + since
                read = compressor.chooser.predict(among, layer, spec, page_tokens)
            else:
                read = method.predict(tokens, layer, spec, page_tokens)
            open_tokens = (tokens - 1) % page_tokens + 1
            units += (read.pages - 1) * (page_tokens // unit_tokens) + -(-open_tokens // unit_tokens)
            elements += read.scoring_elements
    unit_bytes = 2 * unit_tokens * spec.head_dim * itemsize
    return DecodeCost(
        steps=max(0, new_tokens - 1),
        kv_bytes=(units * spec.kv_heads + listed) * unit_bytes,
        digest_bytes=elements * spec.kv_heads * itemsize,
    )


def dense_units(tokens: Count, window: Count | int, unit_tokens: int) -> Count:
    """Units of one KV head that a query sees, itself included, with ``tokens`` in the cache: a number, or an array of
    them. A ``window`` of 0 is none; an array of windows has no 0 in it."""
    whole = isinstance(window, int) and not window
    first = 0 * tokens if whole else (tokens > window) * (tokens - window) // unit_tokens
    return -(-tokens // unit_tokens) - first
