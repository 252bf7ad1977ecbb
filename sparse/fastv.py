"""FastV (arXiv 2403.06764): what the last token attends to in an early layer is all that later layers need."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from octavo.core.compression.interfaces import Context, LayerContext
from octavo.sparse.checks import check_integer
from octavo.sparse.snapkv import window_attention
from octavo.sparse.text_attention import at_tokens, by_position
from octavo.sparse.token_scores import Rated


@dataclass(frozen=True)
class LayerAttention(Rated):
    """The attention of the prompt's last token in layer ``layer``, K - 1 of the paper (counted from 0), the mean over
    all query heads, for every layer behind it (FastV, arXiv 2403.06764, section 4.1). The layers up to it are
    ``dense_layers``.

    Deviations: the paper's text takes the mean over all queries, its code the last one's, as here; the prompt is
    computed with all tokens in all layers.
    """

    layer: int = 1
    window: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_integer("scorer.layer", self.layer, 0)

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        source = context.layer(self.layer)
        return at_tokens(by_position(window_attention(source, context)[:, :, -1:], source, context)[0], layer)
