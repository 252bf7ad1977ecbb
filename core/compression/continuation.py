"""Tokens that are computed behind a context for a decision alone: what would they attend to?"""

from __future__ import annotations

from collections.abc import Sequence as Sequential
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from octavo.core.compression.interfaces import Watch
from octavo.core.interfaces import LayerTraits

if TYPE_CHECKING:
    from octavo.core.compression.sequence_context import SequenceContext
    from octavo.core.hf_model import HFModel

PASS_TOKENS = 2048
"""Tokens of one forward pass."""

LOGITS_AT_ONCE = 1 << 24
"""Elements of fp32 attention logits, 64 MiB, that are there at the same time."""


class _Behind(NamedTuple):
    """K and V [n, Hkv, D] that a layer has made of the tokens behind the context."""

    keys: Tensor
    values: Tensor


class PoolContinuation:
    """``interfaces.Continuation``. Serves the attention of its own forward passes (``AttentionStep``): the context is
    read from the pool, a layer at a time, and what comes behind it never gets there::

        queries of a pass  ->  [ context: the pool's K and V | tokens behind it, kept here until the end ]

    In plain torch and fp32. Layers with a window see their window. Tokens that begin in front of the context's end are
    those that stand there: they attend to what is before them, and the context's K and V are seen in their place.
    Nothing is shared with other sequences, which wait meanwhile.
    """

    def __init__(self, model: HFModel, context: SequenceContext, overlap: int) -> None:
        self._model = model
        self._context = context
        self._begin = self._end = context.tokens - overlap
        self._behind: dict[int, _Behind] = {}
        self._watch: Watch | None = None
        self._device = context.positions.device

    def compute(self, token_ids: Sequential[int], watch: Watch | None = None) -> int:
        assert token_ids, "nothing follows nothing"
        self._watch = watch
        logits = torch.empty(0)
        for start in range(0, len(token_ids), PASS_TOKENS):
            ids = torch.tensor(token_ids[start : start + PASS_TOKENS], device=self._device)
            positions = torch.arange(self._end, self._end + len(ids), device=self._device)
            logits = self._model.forward(ids, positions, positions[-1:] - self._end, self)
            self._end += len(ids)
        self._context.computed_behind(len(token_ids))
        return int(logits[0].argmax())

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: LayerTraits) -> Tensor:
        """1. K and V of these tokens join those of the tokens before them.
        2. A part of the queries at a time, so that few logits are there at once: those of the context and of what is
           behind it, minus infinity where a query does not see a key, are shown to whoever watches.
        3. Their softmax, with the sinks of the layer, takes the values.
        """
        before = self._behind.get(layer)
        behind = _Behind(k, v) if before is None else _Behind(torch.cat([before[0], k]), torch.cat([before[1], v]))
        self._behind[layer] = behind
        held = self._context.held(layer)
        keys = torch.cat([held.keys, behind.keys.transpose(0, 1)], 1).float()  # [Hkv, n, D]
        values = torch.cat([held.values, behind.values.transpose(0, 1)], 1).float()
        later = torch.arange(self._begin, self._end + len(q), device=q.device)
        behind_all = later.masked_fill(later < self._context.tokens, -1)  # the context has those
        at = torch.cat([held.positions, behind_all.expand(len(keys), -1)], 1)  # [Hkv, n]
        heads, dim = len(keys), q.shape[2]
        queries = q.float().view(len(q), heads, -1, dim).permute(1, 2, 0, 3)  # [Hkv, g, T, D]
        rows, outputs = max(1, LOGITS_AT_ONCE // (q.shape[1] * keys.shape[1])), []
        for start in range(0, len(q), rows):
            own = later[len(later) - len(q) :][start : start + rows]
            logits = (queries[:, :, start : start + rows] @ keys.mT[:, None]) * traits.scale
            if traits.softcap:
                logits = traits.softcap * (logits / traits.softcap).tanh()
            seen = (at[:, None] >= 0) & (at[:, None] <= own[:, None])  # [Hkv, t, n]
            if traits.window:
                seen &= at[:, None] > own[:, None] - traits.window
            logits = logits.masked_fill(~seen[:, None], -torch.inf)
            if self._watch is not None and not traits.window:
                self._watch(layer, held.positions, logits)
            if traits.sinks is not None:
                sinks = traits.sinks.float().view(heads, -1, 1, 1).expand(-1, -1, logits.shape[2], -1)
                logits = torch.cat([logits, sinks], 3)
            outputs.append(logits.softmax(3)[..., : keys.shape[1]] @ values[:, None])
        return torch.cat(outputs, 2).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
