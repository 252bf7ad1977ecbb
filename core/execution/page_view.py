"""What a sparse method may look at in one layer of one step (interfaces.PageView)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from octavo.core.hosting.away import StepAway
from octavo.core.interfaces import LayerTraits, Selection, TokenSelection
from octavo.core.memory.layer_groups import LayerPlan
from octavo.kernels import ops
from octavo.kernels.layout import entry_units


@dataclass
class StepPages:
    """The pages of b sequences of one method, the same for all layers of a step; ``layer`` and ``traits`` move on.

    ``tables`` int32 [slices, b, M], ``slots`` int32 [1, b, 1] and ``q_pos`` int32 [b] are what a dense decode would be
    given; ``first_units`` int64 [b, P] index the digests. ``away`` is about pages in the host tier. What is read to
    choose is counted as elements of every sealed page and of every token, over layers and KV heads, so that counting
    costs no operation, or of certain pages.
    """

    kv: Tensor
    backend: str
    plan: LayerPlan
    page_tokens: int
    tables: Tensor
    slots: Tensor
    q_pos: Tensor
    n_pages: Tensor
    max_pages: int
    seeds: Tensor
    first_units: Tensor
    parts: Mapping[str, Tensor]
    away: StepAway | None = None
    prior: Tensor | None = None
    layer: int = 0
    budget: int = 0
    traits: LayerTraits = field(default_factory=lambda: LayerTraits(1.0))
    reusable: Selection | TokenSelection | None = None
    _page_elements: int = 0
    _token_elements: int = 0
    _chosen_elements: Tensor | None = None
    _known: dict[Hashable, Tensor] = field(default_factory=dict)
    _scores: Tensor | None = None
    _aside: StepPages | None = None
    _listed: tuple[Selection, int, Tensor, Tensor] | None = None
    """The last selection of ``top``, the slice it was made for, and the table and slots that came with it."""

    def enter(self, layer: int, traits: LayerTraits) -> None:
        """Go on to a layer."""
        self.layer, self.traits = layer, traits

    def of_layer(self, layer: int, traits: LayerTraits) -> StepPages:
        if self._aside is None:
            self._aside = replace(self, _page_elements=0, _token_elements=0, _chosen_elements=None, _listed=None)
        self._aside.enter(layer, traits)
        self._aside.reusable, self._aside._scores = self.reusable, self._scores
        return self._aside

    @property
    def table(self) -> Tensor:
        """int32 [1, b, H, M] of the present layer; here H is 1."""
        return self.tables[self._slice][None, :, None]

    @property
    def unit_layer(self) -> int:
        """Where the present layer is in a unit of ``kv``."""
        return self.plan.places[self.layer].unit_layer

    @property
    def _slice(self) -> int:
        return self.plan.places[self.layer].slice

    @property
    def page_units(self) -> int:
        return self.page_tokens // self.kv.shape[4]

    @property
    def layers(self) -> int:
        return len(self.plan.places)

    @property
    def kv_heads(self) -> int:
        return self.kv.shape[3]

    @property
    def group_layer(self) -> int:
        return self.plan.places[self.layer].group_layer

    @property
    def scores(self) -> Tensor:
        assert self._scores is not None, "nothing was chosen by scores"
        return self._scores

    @property
    def lengths(self) -> Tensor:
        return self.slots[0, :, 0].contiguous()  # heads that keep different tokens have slots of their own

    @property
    def elements_read(self) -> Tensor:
        """int64 [b], so far."""
        whole = (self.n_pages.long() - 1) * self._page_elements + self.lengths.long() * self._token_elements
        return whole if self._chosen_elements is None else whole + self._chosen_elements

    @property
    def elements_read_ahead(self) -> Tensor:
        """int64 [b], so far: what was read to choose for layers to come."""
        return torch.zeros_like(self.n_pages, dtype=torch.int64) if self._aside is None else self._aside.elements_read

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def digest(self, part: str, channels: Tensor | None = None) -> Tensor:
        store = self.parts[part]
        if channels is None:
            self._page_elements += store[0, 0].numel()
            return store[self.first_units, self.group_layer]
        self._page_elements += store[0, 0, ..., 0].numel() * channels.shape[2]
        heads, vectors = (torch.arange(n, device=self.kv.device) for n in (self.kv_heads, store.shape[3]))
        # Each index has the axes [b, P, Hkv, s, r], so that nothing but the wanted elements is touched.
        at = self.first_units[:, :, None, None, None], self.group_layer, heads[:, None, None], vectors[:, None]
        return store[(*at, channels[:, None, :, None])]

    def digest_at(self, part: str, at: Tensor) -> Tensor:
        store, heads = self.parts[part], torch.arange(self.kv_heads, device=at.device)[:, None]
        self._count_full(at, store[0, 0, 0].numel())
        units = self.first_units.gather(1, at.flatten(1)).view_as(at)
        return store[units, self.group_layer, heads]

    def keys_at(self, at: Tensor) -> Tensor:
        self._count_full(at, self.page_tokens * self.kv.shape[5])
        heads = torch.arange(self.kv_heads, device=at.device)[:, None, None]
        entries = at[..., None] * self.page_units + torch.arange(self.page_units, device=at.device)
        listed = entry_units(self.table[0]).expand(-1, self.kv_heads, -1)
        units = listed.gather(2, entries.flatten(2)).view_as(entries)
        return self.kv[units, self.unit_layer, 0, heads].flatten(3, 4)

    def _count_full(self, at: Tensor, elements: int) -> None:
        """Count ``elements`` for each full page that ``at`` lists."""
        read = (at < (self.n_pages - 1)[:, None, None]).sum((1, 2)) * elements
        self._chosen_elements = read if self._chosen_elements is None else self._chosen_elements + read

    def keys(self, channels: Tensor) -> Tensor:
        self._token_elements += self.kv_heads * channels.shape[2]
        units = entry_units(self.table[0, :, :, : self.max_pages * self.page_units])  # [b, H, M]
        heads, slots = (torch.arange(n, device=self.kv.device) for n in self.kv.shape[3:5])
        # Each index has the axes [b, Hkv, M, unit_tokens, r], so that nothing but the wanted elements is touched.
        at = units[..., None, None], self.unit_layer, 0, heads[:, None, None, None], slots[:, None]
        return self.kv[(*at, channels[:, :, None, None])].flatten(2, 3)

    def contents(self) -> tuple[Tensor, Tensor]:
        self._token_elements += 2 * self.kv_heads * self.kv.shape[5]
        tokens = self.max_pages * self.page_tokens
        keys, values = ops.gather(self.kv, self.unit_layer, self.table, self.slots, tokens, self.backend)
        return keys, values

    def bounds(self, q: Tensor, per_query_head: bool = False) -> Tensor:
        low, high = self.parts["min"], self.parts["max"]
        self._page_elements += 2 * low[0, 0].numel()
        bounds: Tensor = ops.page_score(
            q, low, high, self.group_layer, self.first_units, self.n_pages, per_query_head, self.backend
        )
        return bounds

    def top(self, scores: Tensor, budget: Tensor, keep: Tensor, most: int) -> Selection:
        pages, counts, entries, slots = ops.page_topk(
            scores, budget, keep, self.n_pages, self.lengths, self.tables[self._slice],
            self.page_tokens, self.page_units, most, self.backend,
        )  # fmt: skip
        selection, self._scores = Selection(pages, counts), scores
        self._listed = selection, self._slice, entries[None], slots[None]
        return selection

    def mass(self, q: Tensor) -> Tensor:
        self._token_elements += self.kv.shape[3] * self.kv.shape[5]
        _, _, mass = ops.decode(
            q, self.kv, self.unit_layer, self.table, self.slots, self.q_pos, None, self.traits.sinks,
            self.traits.scale, 0, self.traits.softcap, True, False, self.backend,
        )  # fmt: skip
        pages: Tensor = mass.unflatten(2, (-1, self.page_units)).sum(3)[:, :, : self.max_pages]
        return pages

    def apart(self, q: Tensor, row: int) -> tuple[Tensor, Tensor]:
        n, traits = int(self.n_pages[row]), self.traits
        table = self.table[0, row, :, : n * self.page_units].reshape(-1, n, self.page_units).transpose(0, 1)[None]
        slots = torch.full((1, n, 1), self.page_tokens, dtype=torch.int32, device=q.device)
        slots[0, -1] = self.lengths[row] - (n - 1) * self.page_tokens
        out, lse, _ = ops.decode(
            q[row].expand(n, -1, -1).contiguous(), self.kv, self.unit_layer, table.contiguous(), slots,
            self.q_pos[row].repeat(n), None, None, traits.scale, 0, traits.softcap, False, True, self.backend,
        )  # fmt: skip
        return out, lse

    def attend(self, q: Tensor, tokens: TokenSelection) -> Tensor:
        heads, unit_tokens = self.kv.shape[3:5]
        entry, slot = tokens.tokens // unit_tokens, tokens.tokens % unit_tokens  # [b, Hkv, S]
        units = entry_units(self.table[0].expand(-1, heads, -1).gather(2, entry))
        head = torch.arange(heads, device=q.device)[:, None]
        k, v = (self.kv[units, self.unit_layer, part, head, slot].float() for part in (0, 1))
        past = torch.arange(entry.shape[2], device=q.device) >= tokens.counts[..., None]
        scores = torch.einsum("bhgd,bhsd->bhgs", q.float().view(len(q), heads, -1, q.shape[2]), k) * self.traits.scale
        if self.traits.softcap:
            scores = self.traits.softcap * torch.tanh(scores / self.traits.softcap)
        scores = scores.masked_fill(past[:, :, None], -torch.inf)
        if self.traits.sinks is not None:
            sinks = self.traits.sinks.float().view(heads, -1, 1).expand(len(q), -1, -1, -1)
            scores = torch.cat([scores, sinks], 3)
        probs = scores.softmax(3)[..., : entry.shape[2]]
        return (probs @ v.masked_fill(past[..., None], 0.0)).flatten(1, 2).to(q.dtype)

    def gather(self, selection: Selection) -> tuple[Tensor, Tensor]:
        """Selected pages are full but for the open one, which comes last, so the tokens fill the first ``slots``
        without gaps. What ``top`` chose for this layer has its table already.
        """
        if self._listed is not None and self._listed[0] is selection and self._listed[1] == self._slice:
            return self._listed[2:]
        offsets = torch.arange(self.page_units, device=self.kv.device)
        heads = max(selection.pages.shape[1], self.table.shape[2])
        units = (selection.pages[..., None] * self.page_units + offsets).flatten(2)  # [b, H, S * page_units]
        table = self.table[0].expand(-1, heads, -1).gather(2, units.expand(-1, heads, -1))
        open_page = self.lengths - (self.n_pages - 1) * self.page_tokens
        slots = ((selection.counts - 1) * self.page_tokens + open_page[:, None]).expand(-1, heads)
        return table[None], slots.to(torch.int32)[None]
