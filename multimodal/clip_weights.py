"""CLIP's vision weights under two names: open_clip's ``VisionTransformer`` and Hugging Face's ``CLIPVisionModel``.

They are the same function. Hugging Face has q, k and v of a block apart, open_clip one above the other::

    self_attn.q_proj [W, W]                                q
    self_attn.k_proj [W, W]    <->    attn.in_proj [3 W, W]  k
    self_attn.v_proj [W, W]                                v
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.multimodal.tensor_accounts import require_tensors

Tower = Any
"""open_clip's VisionTransformer."""

JOINT_SPACE = "proj"
"""open_clip's projection into the space of texts, which Hugging Face keeps in another model."""


def clip_config(vision: Any) -> dict[str, Any]:
    """open_clip's config, as ``OpenClipEncoder.from_config`` takes it, of a ``CLIPVisionConfig``.

    Raises:
        ValueError: a tower that open_clip has no such ViT for.
    """
    if vision.model_type != "clip_vision_model":
        raise ValueError(
            f"the vision tower is {vision.model_type!r}; only 'clip_vision_model' is read into open_clip's"
        )
    if vision.hidden_act not in ("gelu", "quick_gelu"):
        raise ValueError(f"the vision tower has hidden_act={vision.hidden_act!r}; known: 'gelu', 'quick_gelu'")
    width, heads = vision.hidden_size, vision.num_attention_heads
    if width % heads:
        raise ValueError(f"the vision tower's {heads} heads do not divide its width of {width}")
    return {
        "embed_dim": width,
        "quick_gelu": vision.hidden_act == "quick_gelu",
        "vision_cfg": {
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "layers": vision.num_hidden_layers,
            "width": width,
            "head_width": width // heads,
            "mlp_ratio": (vision.intermediate_size + 0.5) / width,  # open_clip rounds the product down
            "norm_kwargs": {"eps": vision.layer_norm_eps},
        },
    }


def vision_config(tower: Tower) -> dict[str, Any]:
    """Fields of the ``CLIPVisionConfig`` of an open_clip tower.

    Raises:
        ValueError: a tower that Hugging Face's CLIP cannot be.
    """
    block = tower.transformer.resblocks[0]
    activation = type(block.mlp.gelu).__name__
    if activation != "QuickGELU" and not (isinstance(block.mlp.gelu, nn.GELU) and block.mlp.gelu.approximate == "none"):
        raise ValueError(f"the tower's activation is {block.mlp.gelu}; Hugging Face's CLIP has GELU or QuickGELU")
    (height, columns), (patch, _) = tower.image_size, tower.patch_size
    if height != columns:
        raise ValueError(f"Hugging Face's CLIP takes square images, and the tower {height} x {columns} pixels")
    return {
        "model_type": "clip_vision_model",
        "hidden_size": tower.transformer.width,
        "intermediate_size": block.mlp.c_fc.out_features,
        "num_hidden_layers": len(tower.transformer.resblocks),
        "num_attention_heads": block.attn.num_heads,
        "image_size": height,
        "patch_size": patch,
        "hidden_act": "quick_gelu" if activation == "QuickGELU" else "gelu",
        "layer_norm_eps": block.ln_1.eps,
    }


def load_clip(tower: Tower, weights: Mapping[str, Tensor]) -> None:
    """Give an open_clip tower, which may be on "meta", the weights of a ``CLIPVisionModel``; they are shared where they
    are whole. The tower loses its projection into the space of texts: there are no weights for it.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape, all by Hugging Face's names.
    """
    names = _names(len(tower.transformer.resblocks))
    tower.proj = None
    require_tensors("the vision tower", _shapes(weights), _shapes(_renamed(tower.state_dict(), names)))
    parts = {ours: [weights[name] for name in theirs] for ours, theirs in names.items()}
    joined = {ours: torch.cat(own) if len(own) > 1 else own[0] for ours, own in parts.items()}
    tower.load_state_dict(joined, assign=True)


def clip_weights(tower: Tower) -> dict[str, Tensor]:
    """The tower's weights by the names of a ``CLIPVisionModel``, as views. Without the projection into the space of
    texts; a last norm that was cut off is written as one that changes no scale, since nothing reads it.

    Raises:
        ValueError: the tower has tensors that a ``CLIPVisionModel`` has not, or lacks some.
    """
    found = {name: tensor for name, tensor in tower.state_dict().items() if name != JOINT_SPACE}
    names = _names(len(tower.transformer.resblocks))
    if isinstance(tower.ln_post, nn.Identity):
        found |= {"ln_post.weight": torch.ones_like(found["class_embedding"])}
        found |= {"ln_post.bias": torch.zeros_like(found["class_embedding"])}
    shapes = _shapes(found)
    require_tensors("the open_clip tower", shapes, {name: shapes.get(name) for name in names})
    return _renamed(found, names)


def _names(blocks: int) -> dict[str, tuple[str, ...]]:
    """Of each tensor of a tower: open_clip's name, and Hugging Face's; several, where these are its parts in order."""
    names: dict[str, tuple[str, ...]] = {
        "class_embedding": ("embeddings.class_embedding",),
        "positional_embedding": ("embeddings.position_embedding.weight",),
        "conv1.weight": ("embeddings.patch_embedding.weight",),
    }
    for kind in ("weight", "bias"):
        names[f"ln_pre.{kind}"] = (f"pre_layrnorm.{kind}",)  # spelt so there
        names[f"ln_post.{kind}"] = (f"post_layernorm.{kind}",)
        for block in range(blocks):
            ours, theirs = f"transformer.resblocks.{block}", f"encoder.layers.{block}"
            names[f"{ours}.attn.in_proj_{kind}"] = tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv")
            names[f"{ours}.attn.out_proj.{kind}"] = (f"{theirs}.self_attn.out_proj.{kind}",)
            names[f"{ours}.ln_1.{kind}"] = (f"{theirs}.layer_norm1.{kind}",)
            names[f"{ours}.ln_2.{kind}"] = (f"{theirs}.layer_norm2.{kind}",)
            names[f"{ours}.mlp.c_fc.{kind}"] = (f"{theirs}.mlp.fc1.{kind}",)
            names[f"{ours}.mlp.c_proj.{kind}"] = (f"{theirs}.mlp.fc2.{kind}",)
    return names


def _renamed(weights: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """open_clip's weights by Hugging Face's names."""
    parts = ((theirs, weights[ours].chunk(len(theirs))) for ours, theirs in names.items())
    return {name: part for theirs, chunks in parts for name, part in zip(theirs, chunks, strict=True)}


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}
