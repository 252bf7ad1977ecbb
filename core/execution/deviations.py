"""How much the KV that a reused image has in its place differs from the copied one, in an early layer.

CacheBlend (Yao et al., arXiv 2405.16444, section 4): the tokens of which K and V differ most early on are those that
differ most in the layers behind, so computing these repairs most. The pass ends at the layer that is compared: up to
there every token has its exact KV afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.core.execution.attention import PagedStep
from octavo.core.interfaces import LayerTraits


class Enough(Exception):
    """Ends a forward pass: the layers behind have nothing to say."""


@dataclass
class Comparison:
    """Serves a pass up to ``layer``. ``deviations`` fp32 [T]: squared distance of each token's new K and V there to
    what its slot held, summed over heads and elements; where a slot held nothing it says nothing."""

    step: PagedStep
    layer: int
    deviations: Tensor = field(default_factory=lambda: torch.empty(0))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: LayerTraits) -> Tensor:
        if layer < self.layer:
            return self.step.attend(layer, q, k, v, traits)
        kv, place = self.step.kv, self.step.plan.places[layer]
        slots, unit_tokens = self.step.slots[place.slice], kv.shape[4]
        held = kv[slots // unit_tokens, place.unit_layer, :, :, slots % unit_tokens].float()  # [T, 2, Hkv, D]
        self.deviations = (torch.stack([k, v], 1).float() - held).square().sum((1, 2, 3))
        self.step.attend(layer, q, k, v, traits)  # which stores K and V
        raise Enough
