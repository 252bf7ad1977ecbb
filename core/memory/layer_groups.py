"""Layers that see equally far share a block table; layers that see a window let go of the pages behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LayerGroup:
    """Layers with one sliding window (0: none), in the order of the model.

    ``slices`` is how many units the group needs for ``unit_tokens`` tokens, since a unit has room for
    ``LayerPlan.unit_layers`` layers.
    """

    layers: tuple[int, ...]
    window: int
    slices: int

    def first_seen(self, position: int) -> int:
        """The first position that a query at ``position`` sees."""
        return max(0, position - self.window + 1) if self.window else 0


@dataclass(frozen=True)
class LayerPlace:
    """Where a model's layer keeps its KV: in which group and in which slice, counted over all groups, as which layer of
    a unit, and as which layer of the group."""

    group: int
    slice: int
    unit_layer: int
    group_layer: int


@dataclass(frozen=True)
class LayerPlan:
    """How the layers of a model share the units of one pool.

    Groups of different size still deal in one kind of unit, of as many layers as divide both: the greatest common
    divisor. Gemma-3-270M has 3 full layers and 15 with a window, so a unit holds 3 layers::

        model layer   0 1 2 3 4 | 5 | 6 7 8 9 10 | 11 | 12 13 14 15 16 | 17
        full                      x                x                     x     1 slice  [5 11 17]
        window 512    x x x x x     x x x x x         x  x  x  x  x            5 slices [0 1 2] [3 4 6] ...

    Full groups come first. A model whose layers are all alike has one group of one slice.
    """

    groups: tuple[LayerGroup, ...]
    unit_layers: int
    places: tuple[LayerPlace, ...]

    @property
    def slices(self) -> int:
        """Units that ``unit_tokens`` tokens take where no layer lets go of them."""
        return sum(group.slices for group in self.groups)

    @cached_property
    def columns(self) -> NDArray[np.int64]:
        """Of each layer the layer in a unit, and the slice: int64 [2, layers]."""
        return np.array([(place.unit_layer, place.slice) for place in self.places], np.int64).T.copy()

    @classmethod
    def of(cls, windows: Sequence[int], grouped: bool = True) -> LayerPlan:
        """The plan for layers with these windows (0: none); not ``grouped``: one group that keeps everything."""
        kinds = sorted(set(windows)) if grouped else [0]
        members = {w: [layer for layer, x in enumerate(windows) if x == w or not grouped] for w in kinds}
        unit_layers = gcd(*map(len, members.values()))
        groups, places, first_slice = [], {}, 0
        for number, window in enumerate(kinds):
            layers = members[window]
            groups.append(LayerGroup(tuple(layers), window, len(layers) // unit_layers))
            for at, layer in enumerate(layers):
                places[layer] = LayerPlace(number, first_slice + at // unit_layers, at % unit_layers, at)
            first_slice += groups[-1].slices
        return cls(tuple(groups), unit_layers, tuple(places[layer] for layer in range(len(windows))))
