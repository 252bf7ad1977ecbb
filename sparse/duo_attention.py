"""DuoAttention (arXiv 2410.10819): some heads keep everything, the others the first and the latest tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from octavo.core.compression.interfaces import Context, Kept, OfTokens
from octavo.core.interfaces import ModelSpec
from octavo.sparse.checks import check_integer
from octavo.sparse.eviction import ReadsKept
from octavo.sparse.keep import Keep
from octavo.sparse.snapkv import window_attention


@dataclass(frozen=True)
class DuoAttention(ReadsKept):
    """A share of all KV heads, the *retrieval* heads, keep every token; the others *stream*: they keep what ``keep``
    says, in whole pages (DuoAttention, arXiv 2410.10819, section 3).

    Which heads these are says a gate of each layer and head; those with the largest gates retrieve. The paper learns
    gates on synthetic texts. A ``file`` of such gates is a text of numbers, a row a layer and a column a KV head.
    Without one they are estimated anew for each prompt: the share of the attention of its last ``window`` queries that
    falls on what a streaming head would not have kept.

    Deviations: the prompt is computed with everything in all heads; what a streaming head keeps does not slide on while
    tokens are decoded.
    """

    name: str
    keep: Keep = field(default_factory=Keep)
    retrieval_share: float = 0.5
    window: int = 32
    file: str | None = None
    placement: Literal["drop", "visible"] = "drop"

    def __post_init__(self) -> None:
        check_integer("window", self.window, 1)
        if not 0 <= self.retrieval_share <= 1:
            raise ValueError(f"{self.name}: retrieval_share must be 0 to 1, got {self.retrieval_share!r}")
        if self.placement not in ("drop", "visible"):
            raise ValueError(f"{self.name}: placement must be 'drop' or 'visible', got {self.placement!r}")
        if self.file is not None and not Path(str(self.file)).is_file():
            raise ValueError(f"{self.name}: file={self.file}: no such file of gates")

    @property
    def compressor(self) -> _Gates:
        return _Gates(self)

    def validate(self, spec: ModelSpec, page_tokens: int) -> None:
        if self.file is not None and self.gates().shape != (spec.layers, spec.kv_heads):
            raise ValueError(
                f"{self.name}: file={self.file} has gates of {' x '.join(map(str, self.gates().shape))} layers and "
                f"heads; {spec.name} has {spec.layers} x {spec.kv_heads}"
            )

    def gates(self) -> Tensor:
        """Those of the file, fp32 [layers, Hkv]."""
        return torch.from_numpy(np.loadtxt(str(self.file), dtype=np.float32, ndmin=2))


@dataclass(frozen=True)
class _Gates(OfTokens):
    """``interfaces.Compressor`` of the method."""

    method: DuoAttention
    every: int = 0
    chooser: None = None

    @property
    def window(self) -> int:
        return 0 if self.method.file is not None else self.method.window

    @property
    def drops(self) -> bool:
        return self.method.placement == "drop"

    @property
    def any_pages(self) -> bool:
        return False

    def behind(self, tokens: int, read: Callable[[str | Sequence[int]], list[int]]) -> int:
        return 0

    def keep(self, context: Context) -> Kept | None:
        streams, gates = [], []
        known = None if self.method.file is None else self.method.gates()
        for number in context.layers:
            layer = context.layer(number)
            page = context.page_tokens
            sinks = -(-self.method.keep.sink_tokens // page) * page
            recent = max(0, context.tokens - self.method.keep.recent_tokens) // page * page
            stream = (layer.positions < sinks) | (layer.positions >= recent)
            streams.append(stream)
            if known is None:
                outside = window_attention(layer, context).masked_fill(stream[:, None, None], 0.0)
                gates.append(outside.sum(3).mean((1, 2)))
            else:
                gates.append(known[number].to(layer.keys.device))
        by_gate = torch.stack(gates)  # [L, Hkv]
        order = by_gate.flatten().argsort(descending=True, stable=True)
        retrieves = torch.zeros_like(order, dtype=torch.bool)
        retrieves[order[: round(self.method.retrieval_share * len(order))]] = True
        return Kept(torch.stack(streams) | retrieves.view_as(by_gate).unsqueeze(2))

    def kept_units(self, tokens: int, layer: int, spec: ModelSpec, page_tokens: int, unit_tokens: int) -> int:
        """The most: which layer the retrieval heads are in is not known before."""
        return tokens // page_tokens * page_tokens // unit_tokens * spec.kv_heads
