"""Where page digests live: beside the pool, one row a page, made once and shared with the page."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np
import torch
from torch import Tensor

from octavo.core.interfaces import Digest, ModelSpec
from octavo.core.memory.layer_groups import LayerGroup
from octavo.core.memory.page_pool import PagePool, Pages
from octavo.core.uploads import upload

PAGES_AT_ONCE = 64


class DigestStore:
    """Digests of one kind: each part is ``[units + 1, layers, Hkv, ...]`` in the pool's dtype, a row a first unit. The
    layers are those of ``group``: methods choose pages in layers that see everything.

    A decode step scores all pages of one layer, then those of the next, so in memory the layers come first, and all
    parts of a page and head lie side by side, which is one read (parts "min" and "max" of size D)::

        layer 0                                                                      | layer 1 ...
        row 0                             | row 1                             | ...
        head 0: min, max | head 1 ...     | head 0: min, max | head 1 ...     |
        ^ 2 D elements     ^ 2 Hkv D elements a page: neighbouring pages are neighbours here too

    A row is valid while ``generation`` says that the page has not been given to somebody else since it was made. Rows
    from ``host_rows`` on are of ``host_units`` pages that went to the host tier; who keeps them knows which are valid.
    """

    def __init__(
        self,
        digest: Digest,
        spec: ModelSpec,
        kv: Tensor,
        pool: PagePool,
        group: LayerGroup,
        page_tokens: int,
        host_units: int = 0,
    ) -> None:
        self._digest = digest
        self._kv = kv
        self._pool = pool
        self._slices = group.slices
        self._layers = group.layers
        self._page_units = page_tokens // kv.shape[4]
        self._made = np.full(kv.shape[0], -1, np.int64)
        shapes = digest.spec(page_tokens, spec)
        widths = [prod(shape[1:]) for shape in shapes.values()]
        self.host_rows = kv.shape[0]
        whole = (len(group.layers), kv.shape[0] + host_units, spec.kv_heads, sum(widths))
        self._store = torch.empty(whole, dtype=kv.dtype, device=kv.device)
        pieces = torch.split(self._store.transpose(0, 1), widths, 3)
        self.parts = {
            name: piece.view(*piece.shape[:3], *shape[1:])
            for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
        }

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    def make(self, pages: Iterable[Pages], drafts: bool = False) -> None:
        """Digest the full pages that have none yet, all layers at once. ``drafts`` are pages whose KV is to be written
        over: they are digested for now, and again when they are full of what stands."""
        wanted = np.unique(np.concatenate([np.empty(0, np.int32), *pages]))
        wanted = wanted[wanted > 0]  # holes
        missing = wanted[self._made[wanted] != self._pool.generation[wanted]]
        for start in range(0, len(missing), PAGES_AT_ONCE):
            self._make(missing[start : start + PAGES_AT_ONCE])
        if not drafts:
            self._made[missing] = self._pool.generation[missing]

    def keep(self, pages: Pages, host_pages: Pages) -> None:
        """Copy the digests of device pages, which are made if need be, into the rows of host pages."""
        self.make([pages])
        source, target = (
            upload(side.astype(np.int64), self._store.device) for side in (pages, host_pages + self.host_rows)
        )
        self._store[:, target] = self._store[:, source]

    def _make(self, pages: Pages) -> None:
        _, unit_layers, _, heads, unit_tokens, dim = self._kv.shape
        layers = self._slices * unit_layers
        listed = self._pool.units_of(pages, self._slices * self._page_units).astype(np.int64)
        units = upload(listed, self._kv.device).view(-1, self._slices, self._page_units)
        kv = self._kv[units].permute(0, 1, 3, 4, 5, 2, 6, 7)  # [n, slices, unit_layers, 2, Hkv, page_units, u, D]
        kv = kv.reshape(len(pages), layers, 2, heads, self._page_units * unit_tokens, dim)
        first = upload(pages.astype(np.int64), self._kv.device)
        for name, part in self._digest.compute(kv[:, :, 0], kv[:, :, 1], self._layers).items():
            self.parts[name][first] = part.to(self._store.dtype)
