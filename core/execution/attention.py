"""The attention function that Hugging Face modules call instead of their own.

It is registered under the name "octavo" with no mask function, so a model hands over no mask and causality, sliding
windows, soft caps and sinks are its duty. Everything about the step comes in one keyword argument, ``octavo_step``;
compiled code is given none and asks for the step when it runs (``compiled.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from octavo.core.compression.kept_tables import KeptTables
from octavo.core.compression.observation import Observation
from octavo.core.compression.recall_step import RecallStep
from octavo.core.execution.compiled import attend_in_step
from octavo.core.execution.page_view import StepPages
from octavo.core.execution.query_blocks import BlockGroup, choose_pages
from octavo.core.execution.rotary import Rotary
from octavo.core.hosting.interfaces import Foretold
from octavo.core.inspection.probing import AttentionProbe
from octavo.core.interfaces import AttentionStep, LayerTraits, Selection, SparseMethod, TokenSelection
from octavo.core.memory.layer_groups import LayerPlan
from octavo.kernels import ops, zero_copy
from octavo.kernels.cpu import decode_op
from octavo.kernels.cpu.decode_calls import DecodeCalls
from octavo.kernels.zero_copy import VirtualRows


def octavo_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    octavo_step: AttentionStep | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention interface of transformers 5: ``query [1, Hq, T, D]`` after RoPE, ``key, value [1, Hkv, T, D]``,
    and the result ``[1, T, Hq, D]``."""
    compiling = torch.compiler.is_compiling()
    if octavo_step is None and not compiling:
        raise RuntimeError(
            f"{type(module).__name__} called octavo's attention outside of an engine step, or its model does not pass "
            "keyword arguments on to attention"
        )
    if attention_mask is not None and (compiling or not _is_causal(attention_mask)):
        raise RuntimeError(f"{type(module).__name__} brings to octavo's attention a mask of its own that is not causal")
    traits = LayerTraits(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if octavo_step is None:
        return attend_in_step(q, k, v, traits)[None], None
    return octavo_step.attend(module.layer_idx, q, k, v, traits)[None], None  # type: ignore[arg-type]


def _is_causal(mask: Tensor) -> bool:
    """Whether a mask ``[1, 1, T, T]`` that an older model made by itself hides the future and nothing else, as far as
    its first and last rows tell."""
    seen = mask if mask.dtype == torch.bool else mask == 0
    return bool(seen[..., -1, :].all()) and int(seen[..., 0, :].sum()) == 1


@dataclass
class DecodeGroup:
    """Rows ``start`` to ``stop`` of the step: one query each, of sequences that share a method (None: dense).

    ``tables`` int32 [slices, b, M], ``slots`` int32 [1, b, 1], ``q_pos`` int32 [b]; ``unit_pos`` int32 [1, b, 1, M] if
    stored order is not logical order. What was read is noted as it happens: ``chosen``, slots int32 [1, b, H] of the
    layers with tables of their own, and how many layers read the whole table, by their window.

    Where the rows of a group do not lie side by side, ``members`` int64 [b] says which rows of the step they are, and
    ``places`` int64 [b] where their results go, the number of rows for those that nobody asks for.

    ``runs`` int32 [4, b + 1] are the groups of ``ops.decode_shared``, if there are any: layers without a window read
    a run that several tables share once, and each KV head of such a layer ``slots_spared`` slots less.

    ``probe`` looks on where something is chosen, at rows ``probed`` of the group.
    ``kept`` are the tables of layers without a window, if the sequences have been compressed; ``recall`` adds to them
    what rows ask back. ``lent``: the same tables in parts, where some of their pages are stored for other positions.
    """

    start: int
    stop: int
    tables: Tensor
    slots: Tensor
    q_pos: Tensor
    unit_pos: Tensor | None = None
    method: SparseMethod | None = None
    pages: StepPages | None = None
    chosen: list[Tensor] = field(default_factory=list)
    dense_windows: Counter[int] = field(default_factory=Counter)
    runs: Tensor | None = None
    slots_spared: int = 0
    probe: AttentionProbe | None = None
    probed: list[int] = field(default_factory=list)
    kept: KeptTables | None = None
    recall: RecallStep | None = None
    lent: VirtualRows | None = None
    members: Tensor | None = None
    places: Tensor | None = None

    @property
    def foresees(self) -> bool:
        """Whether its method wants to know what queries the next layer is going to ask."""
        return self.pages is not None and self.pages.away is not None and self.pages.away.foresees

    @property
    def plain(self) -> bool:
        """Whether it reads whole tables in stored order, each its own, and nobody looks on."""
        parts = (self.unit_pos, self.runs, self.method, self.pages, self.kept, self.recall, self.lent, self.members)
        return all(part is None for part in (*parts, self.probe))

    def units_read(self, kv: Tensor) -> Tensor:
        """Table entries that the kernels were given, over all layers and KV heads so far, int64 [b].

        A row's entries count whether it reads them by itself or with others: what a sequence costs does not depend on
        who decodes beside it.
        """
        units = torch.zeros_like(self.q_pos, dtype=torch.int64)
        for _, alike in groupby(sorted(self.chosen, key=_heads), _heads):  # all layers at once: few operations
            units = units + _units(torch.cat([*alike]), self.q_pos, 0, kv)
        for window, layers in self.dense_windows.items():
            units = units + layers * _units(self.slots, self.q_pos, window, kv)
        return units

    def units_spared(self, kv: Tensor) -> int:
        """Table entries among them that were not read, since the run that they belong to was read for another row."""
        return self.dense_windows[0] * kv.shape[3] * (self.slots_spared // kv.shape[4])


@dataclass
class PrefillGroup:
    """Rows ``start`` to ``stop``: chunks of several queries. ``cu_q`` int32 [b + 1] counts from ``start``.

    ``q_span`` int32 [T, 2]: bidirectional spans of the queries, if there are any. ``counts`` and ``contexts`` [b]: the
    queries of each chunk and the tokens before it as the host knows them, if every sequence is stored in logical order.
    ``kept`` as in ``DecodeGroup``.
    """

    start: int
    stop: int
    tables: Tensor
    slots: Tensor
    cu_q: Tensor
    q_pos: Tensor
    max_q: int
    unit_pos: Tensor | None = None
    q_span: Tensor | None = None
    counts: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    kept: KeptTables | None = None
    lent: VirtualRows | None = None


@dataclass
class PagedStep:
    """One engine step over the paged pool. ``slots`` int64 [slices, T] is where each token's K and V go.

    ``observed`` lists who wants to see queries: row of the first, row past the last, its position. ``foretold`` are the
    queries that the next layer is expected to ask, for methods that look ahead. ``q_heads`` of the model, if compiled
    layers may be served without Python."""

    kv: Tensor
    plan: LayerPlan
    backend: str
    slots: Tensor
    decodes: list[DecodeGroup] = field(default_factory=list)
    blocks: list[BlockGroup] = field(default_factory=list)
    prefills: list[PrefillGroup] = field(default_factory=list)
    observed: list[tuple[Observation, int, int, int]] = field(default_factory=list)
    rotary: Rotary | None = None
    foretold: Foretold | None = None
    q_heads: int = 0

    @contextmanager
    def in_c(self) -> Iterator[None]:
        """Within the block, one forward pass of compiled layers, C serves those of a plain step by itself."""
        told = self._calls.told(self.plan.columns, self.q_heads) if self.q_heads and self._plain else None
        if told is None:
            yield
            return
        step, windows = told
        decode_op.begin(step)
        yield
        self.decodes[0].dense_windows.update(window for window in windows.tolist() if window >= 0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: LayerTraits) -> Tensor:
        place = self.plan.places[layer]
        if self._plain:
            out = self._attend_plain(layer, q, k, v, None, None, traits)
            if out is not None:
                return out
        ops.append(k, v, self.kv, place.unit_layer, self.slots[place.slice], self.backend)
        return self.read(layer, q, traits)

    @property
    def turns(self) -> bool:
        """Whether a layer may leave RoPE to ``attend_turning``."""
        return self._plain and self.backend != "cpu"

    def attend_turning(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, traits: LayerTraits
    ) -> Tensor:
        """``attend`` in a step that ``turns``."""
        out = self._attend_plain(layer, q, k, v, cos, sin, traits)
        assert out is not None, "only on a CPU is there a call that cannot be made"
        return out

    @cached_property
    def _plain(self) -> bool:
        """Whether it decodes whole tables and nothing else: then a layer stores and attends in one call."""
        others = self.blocks or self.prefills or self.observed
        return len(self.decodes) == 1 and self.decodes[0].plain and not others

    @cached_property
    def _calls(self) -> DecodeCalls:
        """Of a plain step on a CPU."""
        (group,) = self.decodes
        return DecodeCalls(self.kv, group.tables, self.slots, group.slots[0, :, 0], group.q_pos)

    def _attend_plain(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, traits: LayerTraits
    ) -> Tensor | None:
        """The same for a plain step, in one call; None, with nothing done, where that cannot be made."""
        place, group = self.plan.places[layer], self.decodes[0]
        scores = (traits.sinks, traits.scale, traits.window, traits.softcap)
        out: Tensor | None
        if self.backend == "cpu":
            out = self._calls.attend(place.unit_layer, place.slice, q, k, v, *scores)
        else:
            table, slots = group.tables[place.slice][None, :, None], self.slots[place.slice]
            out = ops.append_decode(
                q, k, v, self.kv, place.unit_layer, slots, table, group.slots, group.q_pos, cos, sin, *scores,
                self.backend,
            )  # fmt: skip
        if out is not None:
            group.dense_windows[traits.window] += 1
        return out

    def read(self, layer: int, q: Tensor, traits: LayerTraits) -> Tensor:
        """What ``attend`` gives, once K and V of the step's tokens are stored."""
        if self.decodes and self.decodes[0].members is not None:
            return self._decode_listed(layer, q, traits)
        outputs = [self._decode(group, layer, q[group.start : group.stop], traits) for group in self.decodes]
        outputs += [self._by_blocks(group, layer, q[group.start : group.stop], traits) for group in self.blocks]
        outputs += [self._prefill(group, layer, q[group.start : group.stop], traits) for group in self.prefills]
        for observation, start, stop, position in self.observed:
            observation.take(layer, q[start:stop], position, traits)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode_listed(self, layer: int, q: Tensor, traits: LayerTraits) -> Tensor:
        """The same where all groups list their rows."""
        out = q.new_zeros((len(q) + 1, *q.shape[1:]))
        for group in self.decodes:
            assert group.members is not None and group.places is not None
            out.index_copy_(0, group.places, self._decode(group, layer, q[group.members], traits))
        return out[:-1]

    def _decode(self, group: DecodeGroup, layer: int, q: Tensor, traits: LayerTraits) -> Tensor:
        place = self.plan.places[layer]
        table, slots, unit_pos = group.tables[place.slice][None, :, None], group.slots, group.unit_pos
        kv, unit_layer, selection = self.kv, place.unit_layer, None
        if group.method is not None and group.pages is not None and not traits.window:
            group.pages.enter(layer, traits)
            selection = group.method.select(q, group.pages)
        if group.kept is not None and not traits.window:
            kv, unit_layer = group.kept.kv, 0
        if selection is None and group.kept is not None and not traits.window:
            table, slots, _ = group.kept.of_layer(layer)
            if group.recall is not None:
                table, slots = group.recall.joined(layer, traits, q, table, slots)
            if unit_pos is not None:  # with holes there may be more slots than positions
                unit_pos = torch.zeros_like(table)  # all of it is in front of the query
            group.chosen.append(slots)
        elif selection is None or group.pages is None:
            group.dense_windows[traits.window] += 1
            if group.pages is not None and group.pages.away is not None and not traits.window:
                kv, table = group.pages.away.whole(layer, group.tables[place.slice])
                unit_layer = 0
        elif isinstance(selection, TokenSelection):
            group.chosen.append(selection.counts[None])
            return group.pages.attend(q, selection)
        else:
            table, slots = group.method.resolve(selection, group.pages)  # type: ignore[union-attr]
            group.chosen.append(slots)
        if group.pages is not None and group.pages.away is not None:
            self._look_ahead(group, selection)
        if group.lent is not None:
            return self._lent(group.lent, layer, q, traits)
        if group.runs is not None and not traits.window:
            return ops.decode_shared(  # type: ignore[no-any-return]
                q, self.kv, place.unit_layer, table, slots, group.q_pos, group.runs, traits.sinks,
                traits.scale, traits.softcap, self.backend,
            )  # fmt: skip
        out, _, _ = ops.decode(
            q, kv, unit_layer, table, slots, group.q_pos, unit_pos, traits.sinks,
            traits.scale, traits.window, traits.softcap, False, False, self.backend,
        )  # fmt: skip
        if group.probe is not None and selection is not None:
            group.probe.observe(group.method, q, out, selection, group.pages, group.probed)  # type: ignore[arg-type]
        return out  # type: ignore[no-any-return]

    def _look_ahead(self, group: DecodeGroup, selection: Selection | TokenSelection | None) -> None:
        assert not isinstance(selection, TokenSelection), "single tokens are chosen on the device alone"
        foretold = self.foretold if group.foresees else None
        if foretold is not None:
            first = group.start - foretold.start
            q = foretold.q[first : first + group.stop - group.start]
            foretold = replace(foretold, start=group.start, q=q)
        group.method.look_ahead(selection, foretold, group.pages)  # type: ignore[union-attr]

    def _lent(self, rows: VirtualRows, layer: int, q: Tensor, traits: LayerTraits) -> Tensor:
        rotary, unit_layer = self.rotary, self.plan.places[layer].unit_layer
        assert rotary is not None and len(rows.table) == 1, "pages are lent where all layers share a table"
        out, _ = zero_copy.attend(
            q, self.kv, unit_layer, rows, rotary.of_layer(layer), traits.sinks, traits.scale, traits.window,
            traits.softcap, rotary.interleaved, self.backend,
        )  # fmt: skip
        return out

    def _by_blocks(self, group: BlockGroup, layer: int, q: Tensor, traits: LayerTraits) -> Tensor:
        """Each block of queries is a sequence of its own to the kernel, with the table that its pattern gave it. Layers
        with a window read their window; where every block reads all pages in front of it, the chunk goes as one."""
        chosen = None if traits.window else choose_pages(group, layer, q, traits)
        if chosen is None:
            return self._prefill(group.whole, layer, q, traits)
        blocks, watched = group.blocks, group.watch is not None
        out, lse = ops.prefill(
            q, self.kv, self.plan.places[layer].unit_layer, chosen.table, chosen.slots, blocks.cu_q, group.whole.q_pos,
            chosen.unit_pos, None, traits.scale, 0, traits.softcap, blocks.block_tokens, watched, self.backend,
        )  # fmt: skip
        if group.watch is not None:
            group.watch(group.pattern, layer, out, lse, *self._dense(group.whole, layer, q, traits, want_lse=True))
        return out  # type: ignore[no-any-return]

    def _prefill(self, group: PrefillGroup, layer: int, q: Tensor, traits: LayerTraits) -> Tensor:
        if group.lent is not None:
            return self._lent(group.lent, layer, q, traits)
        return self._dense(group, layer, q, traits)[0]

    def _dense(
        self, group: PrefillGroup, layer: int, q: Tensor, traits: LayerTraits, want_lse: bool = False
    ) -> tuple[Tensor, Tensor]:
        place = self.plan.places[layer]
        kv, unit_layer, table = self.kv, place.unit_layer, group.tables[place.slice][None, :, None]
        slots, unit_pos, counts, contexts = group.slots, group.unit_pos, group.counts, group.contexts
        if group.kept is not None and not traits.window:
            kv, unit_layer, counts, contexts = group.kept.kv, 0, [], []
            table, slots, unit_pos = group.kept.of_layer(layer)
        out, lse = ops.prefill(
            q, kv, unit_layer, table, slots, group.cu_q, group.q_pos, unit_pos, traits.sinks,
            traits.scale, traits.window, traits.softcap, group.max_q, want_lse, self.backend,
            q_span=group.q_span, counts=counts, contexts=contexts,
        )  # fmt: skip
        return out, lse


def _units(slots: Tensor, q_pos: Tensor, window: int, kv: Tensor) -> Tensor:
    """Table entries that the kernel calls of n layers look at in a row, ``slots`` [n, b, H], summed over layers and KV
    heads: int64 [b]. Entries behind a window are skipped."""
    heads, unit_tokens = kv.shape[3], kv.shape[4]
    units = (slots.long() + unit_tokens - 1) // unit_tokens
    if window:
        units = units - ((q_pos[:, None] - window + 1).clamp(min=0) // unit_tokens)
    return units.sum((0, 2)) * (heads // units.shape[2])


def _heads(slots: Tensor) -> int:
    return slots.shape[2]
