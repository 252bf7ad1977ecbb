"""What the text behind the images attends to."""

import torch
from torch import Tensor

from octavo.core.compression.interfaces import Context, LayerContext
from octavo.sparse.snapkv import window_attention


def text_attention(layer: LayerContext, context: Context) -> Tensor:
    """The attention of the observed queries behind the last image, fp32 [Hkv, g, t, N], each over what it sees; of all
    that were observed where nothing stands behind it. 0 in padding."""
    behind = context.tokens - context.items[-1].end
    attention = window_attention(layer, context)
    return attention[:, :, -behind:] if 0 < behind < attention.shape[2] else attention


def by_position(attention: Tensor, layer: LayerContext, context: Context) -> Tensor:
    """The mean of ``attention`` [Hkv, g, t, N] over all query heads, fp32 [t, tokens of the sequence]. What a head has
    dropped before gets nothing from it."""
    heads, group, rows, _ = attention.shape
    at = layer.positions.masked_fill(layer.positions < 0, context.tokens)[:, None, None].expand_as(attention)
    wide = attention.new_zeros(heads, group, rows, context.tokens + 1).scatter(3, at, attention)
    return wide[..., :-1].mean((0, 1))


def at_tokens(scores: Tensor, layer: LayerContext) -> Tensor:
    """``scores`` fp32 [tokens of the sequence] for the tokens that each head of a layer holds, [Hkv, N]; in padding
    arbitrary."""
    return scores[layer.positions.clamp(min=0)]


def image_positions(context: Context, device: torch.device) -> Tensor:
    """int64 [V], the positions of all images' tokens."""
    ends = [(start, min(end, context.tokens)) for start, end, _ in context.items]
    return torch.cat([torch.arange(start, end, device=device) for start, end in ends])
