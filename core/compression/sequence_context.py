"""What a compressor may look at of a sequence in the pool."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequential
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo.core.compression.continuation import PoolContinuation
from octavo.core.compression.interfaces import Continuation, ItemTokens
from octavo.core.compression.kept_tables import KeptTables
from octavo.core.encoding.encoded_items import EncodedItems
from octavo.core.execution.step_runner import StepRunner
from octavo.core.hf_model import HFModel
from octavo.core.interfaces import LayerTraits, ModelSpec
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.sequence import NEVER, Sequence
from octavo.kernels import ops


class UnscoredItem(Exception):
    """An encoder could not say what the tokens of an image are worth, for the ``reason`` that its user gets."""

    def __init__(self, reason: ValueError) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass
class _Layer:
    """``interfaces.LayerContext``."""

    layer: int
    traits: LayerTraits
    positions: Tensor
    keys: Tensor
    values: Tensor
    queries: Tensor
    carried: Tensor
    module: nn.Module


class Held(NamedTuple):
    """K and V [Hkv, N, D] of one layer of a sequence, and the positions int64 [Hkv, N] of the tokens, -1 in padding."""

    positions: Tensor
    keys: Tensor
    values: Tensor


class SequenceContext:
    """``interfaces.Context`` of a sequence in the pool."""

    def __init__(
        self,
        model: HFModel,
        runner: StepRunner,
        plan: LayerPlan,
        sequence: Sequence,
        read: Callable[[str | Sequential[int]], list[int]],
        items: EncodedItems,
    ) -> None:
        layout = sequence.layout
        self.tokens = sequence.computed
        self.open_tokens = self.tokens - layout.first_token(layout.full_pages(self.tokens))
        self.page_tokens = layout.page_slots(layout.page_of(NEVER))  # of the text that is open
        self._spans = layout.items(0, self.tokens)
        self.items = tuple(ItemTokens(s.start, s.end, layout.page_slots(layout.page_of(s.start))) for s in self._spans)
        self._encoded = items
        self.layers = plan.groups[0].layers
        self.model = model.model
        self.spec: ModelSpec = model.spec
        self.read = read
        self.eos = model.eos_token_ids
        self.token_ids = sequence.tokens[: self.tokens]
        request = sequence.request
        is_last = self.tokens + request.unseen_tokens == len(request.prompt)  # not that of an earlier turn
        self.question = request.prompt[self.tokens :] if is_last else []
        self.answer = sequence.tokens[len(request.prompt) :] if sequence.forced else []
        self._sequence = sequence
        self._plan = plan
        self._model = model
        self._runner = runner
        self._observation = sequence.observation
        self._kept = sequence.kept
        self.tables = KeptTables.of(runner.kv, plan, runner.tables, [sequence], [self.tokens])
        self.positions = self._positions()

    def _positions(self) -> Tensor:
        """int64 [L, Hkv, N]: those of what was kept, then all since."""
        kept, device, heads = self._kept, self._runner.kv.device, self.spec.kv_heads
        since = torch.arange(0 if kept is None else kept.end, self.tokens, device=device)
        if kept is None:
            return since.expand(len(self.layers), heads, -1)
        count = (kept.positions >= 0).sum(2, keepdim=True)
        at = torch.arange(kept.positions.shape[2] + len(since), device=device) - count  # [L, Hkv, N]
        old = torch.nn.functional.pad(kept.positions, (0, len(since)), value=-1)
        new = since[at.clamp(0, len(since) - 1)].masked_fill(at >= len(since), -1)
        return old.where(at < 0, new)

    def continuation(self, overlap: int = 0) -> Continuation:
        return PoolContinuation(self._model, self, overlap)

    def computed_behind(self, tokens: int) -> None:
        """Count tokens that were computed for the decision alone."""
        self._sequence.extra_tokens += tokens

    def held(self, number: int) -> Held:
        """What the pool holds of the tokens, in any layer; of one with a window no more than the next token sees."""
        if number in self.layers:
            at = self.layers.index(number)
            return Held(self.positions[at], *self._read(at))
        kv, place, unit_tokens = self._runner.kv, self._plan.places[number], self._sequence.layout.unit_tokens
        first = max(0, self.tokens - self.spec.windows[number]) // unit_tokens
        table = self._runner.tables.entries[place.slice, self._runner.tables.row(self._sequence)]
        table = table[first : -(-self.tokens // unit_tokens)][None, None, None]
        count = self.tokens - first * unit_tokens
        slots = torch.full((1, 1, 1), count, dtype=torch.int32, device=kv.device)
        keys, values = ops.gather(kv, place.unit_layer, table, slots, count, self._runner.backend)
        positions = torch.arange(first * unit_tokens, self.tokens, device=kv.device)
        return Held(positions.expand(self.spec.kv_heads, -1), keys[0], values[0])

    def layer(self, number: int) -> _Layer:
        at = self.layers.index(number)
        keys, values = self._read(at)
        carried = torch.zeros(keys.shape[:2], device=keys.device)
        if self._kept is not None and self._kept.carry is not None:
            carried[:, : self._kept.carry.shape[2]] = self._kept.carry[at]
        observation = self._observation
        assert observation is not None
        return _Layer(
            number, observation.traits[number], self.positions[at], keys, values, observation.queries[number], carried,
            self._model.attention(number),
        )  # fmt: skip

    def item_scores(self, number: int) -> Tensor:
        try:
            return self._encoded.scores(self._spans[number].item)
        except ValueError as error:
            raise UnscoredItem(error) from error

    def gathered(self, at: int, order: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [Hkv, n, D] of some tokens int64 [Hkv, n] of the ``at``-th layer."""
        wide = order[..., None].expand(-1, -1, self.spec.head_dim)
        keys, values = self._read(at)
        return keys.gather(1, wide), values.gather(1, wide)

    def _read(self, at: int) -> tuple[Tensor, Tensor]:
        table, slots, _ = self.tables.of_layer(self.layers[at])
        keys, values = ops.gather(self.tables.kv, 0, table, slots, self.positions.shape[2], self._runner.backend)
        return keys[0], values[0]
