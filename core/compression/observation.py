"""Queries that a compressor wants to see, kept while the tokens in front of a compression are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.core.compression.interfaces import Compressor
from octavo.core.compression.kept_set import Point
from octavo.core.interfaces import LayerTraits, ModelSpec
from octavo.core.memory.page_layout import PageLayout


def observed_tokens(compressor: Compressor, layout: PageLayout, at: int) -> int:
    """How many of a prompt's first ``at`` tokens have queries that a compressor wants to see: the last so many."""
    window = min(compressor.window, at)
    if not compressor.behind_items or not window:
        return window
    images = layout.items(0, at)
    behind = at - min(images[-1].end, at) if images else at
    return min(window, behind) or 1


class Observation:
    """The queries of the last ``point.window`` tokens before a compression: ``queries [layers, window, Hq, D]``, and
    how each layer attended. What is not observed yet is NaN."""

    def __init__(self, point: Point, spec: ModelSpec, device: torch.device) -> None:
        self.point = point
        shape = (spec.layers, point.window, spec.q_heads, spec.head_dim)
        self.queries = torch.full(shape, torch.nan, dtype=spec.kv_dtype, device=device)
        self.traits: dict[int, LayerTraits] = {}

    @property
    def start(self) -> int:
        """The first token whose query is kept."""
        return self.point.at - self.point.window

    def take(self, layer: int, q: Tensor, first: int, traits: LayerTraits) -> None:
        """Keep the queries ``q [T, Hq, D]`` of tokens from ``first`` on, as far as they are wanted."""
        skipped = max(0, self.start - first)
        if layer not in self.traits:
            self.traits[layer] = traits
        if skipped < len(q):
            at = first + skipped - self.start
            self.queries[layer, at : at + len(q) - skipped] = q[skipped:]

    def fork(self) -> Observation:
        twin = object.__new__(Observation)
        twin.point, twin.queries, twin.traits = self.point, self.queries.clone(), dict(self.traits)
        return twin
