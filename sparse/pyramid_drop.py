"""PyramidDrop (arXiv 2410.17247): fewer tokens of an image the deeper the layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from octavo.core.compression.interfaces import Context, LayerContext
from octavo.sparse.checks import check_integer
from octavo.sparse.snapkv import window_attention
from octavo.sparse.text_attention import at_tokens, by_position
from octavo.sparse.token_scores import Rated
from octavo.sparse.visual_shares import check_keep_share


def stage_of(layer: int, layers: int, stages: int) -> int:
    """The stage of a layer, of ``stages`` of equally many layers, from 0."""
    return layer * stages // layers


@dataclass(frozen=True)
class StageAttention(Rated):
    """The attention of the prompt's last token in the first layer of each stage, the mean over all query heads, for all
    layers of the stage (PyramidDrop, arXiv 2410.17247, section 3)."""

    stages: int = 4
    window: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_integer("scorer.stages", self.stages, 2)

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        layers = context.spec.layers
        stage = stage_of(layer.layer, layers, self.stages)
        source = context.layer(min(n for n in context.layers if stage_of(n, layers, self.stages) == stage))
        return at_tokens(by_position(window_attention(source, context)[:, :, -1:], source, context)[0], layer)


@dataclass(frozen=True)
class StageShares:
    """The first stage keeps everything, and each later one the same ratio of the one before (PyramidDrop, section 3):
    r, r^2, r^3, ... of every image, with r such that their mean is ``share``. The paper sets r = 0.5, which is a share
    of 0.29 with four stages."""

    share: float
    stages: int = 4
    window: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_keep_share(self.share)
        check_integer("budget.stages", self.stages, 2)

    def of_layers(self, context: Context, layers: Sequence[int]) -> list[float]:
        stages = [stage_of(layer, context.spec.layers, self.stages) for layer in layers]
        later = [stage for stage in stages if stage]
        low, high = 0.0, 1.0
        for _ in range(64):  # the mean rises with the ratio
            ratio = (low + high) / 2
            low, high = (ratio, high) if sum(ratio**s for s in later) < self.share * len(later) else (low, ratio)
        return [high**stage for stage in stages]
