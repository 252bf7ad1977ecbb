"""How a model turns its keys by their positions: claimed by its buffers, and seen in its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.core.errors import UnsupportedModelError
from octavo.core.interfaces import LayerTraits
from octavo.kernels.reference.rotation import rotate_queries

if TYPE_CHECKING:
    from octavo.core.hf_model import HFModel

TOLERANCE = 2e-2
"""Of a turned key against the key that the model writes there, relative to the largest element: what bf16 loses at two
positions."""

FAR = (97, 100_000)
"""Positions to compare, besides the first two, as far as the model has them."""


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of every layer, as the ops take it (``kernels/reference/rotation.py``).

    ``inv_freq`` fp32 [kinds, Dr/2]; ``kinds`` int32 [layers] says which row a layer takes, and ``rows`` says it to the
    host. A layer without rotary embedding has a row of zeros.
    """

    inv_freq: Tensor
    kinds: Tensor
    rows: tuple[int, ...]
    interleaved: bool

    def of_layer(self, layer: int) -> Tensor:
        """fp32 [Dr/2]."""
        return self.inv_freq[self.rows[layer]]


def find_rotary(model: HFModel) -> Rotary:
    """The rotary embedding by which a cached key can be moved from one position to another.

    1. A ``rope_type`` whose frequencies change with the length, and positions on several axes, are refused by name.
    2. The model is asked for the keys of one token alone at several positions. A token that sees nothing but itself
       has the same hidden states everywhere, so its keys differ by their positions only.
    3. For each layer, one of the model's own ``inv_freq`` buffers (or none: zeros) must turn the first key into the
       others. So learned positions, a norm behind the rotation, and whatever else does not commute with a turn are
       found out, whatever the config says.

    Raises:
        UnsupportedModelError: naming the model and what its positions are.
    """
    name, spec = model.spec.name, model.spec
    for rope in _rope_parameters(model.model.config):
        kind = rope.get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"{name} has rope_type={kind!r}, whose frequencies change with the length, so cached keys cannot be "
                "moved; use reuse='prefix'"
            )
        if rope.get("mrope_section"):
            raise UnsupportedModelError(
                f"{name} has M-RoPE (mrope_section={rope['mrope_section']}): positions of images on several axes, "
                "which octavo does not give, so cached keys cannot be moved; use reuse='prefix'"
            )
    deltas = sorted({1, *(min(far, spec.max_tokens - 1) for far in FAR)})
    home = _keys_at(model, 0)
    moved = {delta: _keys_at(model, delta) for delta in deltas}
    frequencies = _frequencies(model, home.shape[2])
    for interleaved in (False, True):
        rows = [
            row
            for layer in range(spec.layers)
            for row in [
                next(
                    (
                        number
                        for number, inv_freq in enumerate(frequencies)
                        if _turns(home[layer], {d: keys[layer] for d, keys in moved.items()}, inv_freq, interleaved)
                    ),
                    None,
                )
            ]
            if row is not None
        ]
        if len(rows) == spec.layers:
            return Rotary(
                torch.stack(frequencies).to(model.device),
                torch.tensor(rows, dtype=torch.int32, device=model.device),
                tuple(rows),
                interleaved,
            )
    raise UnsupportedModelError(
        f"the keys of {name} at two positions differ by more than a turn of fixed frequency (learned positions, ALiBi, "
        "or a norm behind the rotation), so cached keys cannot be moved; use reuse='prefix'"
    )


class _Keys:
    """Serves a pass over one token, which sees itself alone, and keeps its keys."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: LayerTraits) -> Tensor:
        self.keys.append(k[0].float().cpu())
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _keys_at(model: HFModel, position: int) -> Tensor:
    """fp32 [layers, Hkv, D], keys of token 1 alone at a position."""
    step = _Keys()
    ids = torch.ones(1, dtype=torch.int64, device=model.device)
    model.forward(ids, ids * position, None, step)
    return torch.stack(step.keys)


def _frequencies(model: HFModel, head_dim: int) -> list[Tensor]:
    """The different ``inv_freq`` of the model's modules, fp32 [Dr/2] each, and zeros, which turn nothing."""
    found: list[Tensor] = []
    for name, buffer in model.model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name and buffer.dim() == 1 and 2 * len(buffer) <= head_dim:
            values = buffer.detach().float().cpu()
            same_width = not found or values.shape == found[0].shape
            if same_width and not any(torch.equal(values, other) for other in found):
                found.append(values)
    return [*found, torch.zeros(len(found[0]) if found else 1)]


def _turns(home: Tensor, moved: Mapping[int, Tensor], inv_freq: Tensor, interleaved: bool) -> bool:
    """Whether turning a layer's keys ``home [Hkv, D]`` at position 0 gives those at all the other positions."""
    row, bound = torch.zeros(1, dtype=torch.int32), TOLERANCE * float(home.abs().max())
    return all(
        torch.allclose(
            rotate_queries(home[None], row, torch.tensor([-delta]), inv_freq, interleaved)[0], keys, rtol=0, atol=bound
        )
        for delta, keys in moved.items()
    )


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Every dictionary of rotary settings in a config: one, or one for each kind of layer."""
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [found, *(part for part in found.values() if isinstance(part, dict))]
