"""The vision encoder's own account of its tokens: VisionZip (arXiv 2412.04467)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.compression.interfaces import Context, LayerContext
from octavo.sparse.text_attention import at_tokens
from octavo.sparse.token_scores import Rated


@dataclass(frozen=True)
class EncoderScores(Rated):
    """What the encoder says of each token of an image (``Encoded.scores``): of a CLIP tower, the attention of its class
    token in the block that is read, the mean over heads (VisionZip's dominant tokens, arXiv 2412.04467, section 3). It
    knows no question, so it is the same for all of them, and for all layers and heads of the language model.

    Deviations: tokens are dropped from the cache, not in front of the language model; those that are not dominant are
    not merged into contextual ones.
    """

    item_scores: ClassVar[bool] = True

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        scores = torch.zeros(context.tokens, device=layer.keys.device)
        for number, (start, end, _) in enumerate(context.items):
            scores[start:end] = context.item_scores(number)[: context.tokens - start]
        return at_tokens(scores, layer)
