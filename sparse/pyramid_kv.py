"""PyramidKV (arXiv 2406.02069): more budget for lower layers."""

from dataclasses import dataclass

from octavo.sparse.budgets import Uniform
from octavo.sparse.checks import check_integer


@dataclass(frozen=True)
class Pyramid(Uniform):
    """``tokens`` a layer on average, falling in a straight line from the first layer to the last (PyramidKV, arXiv
    2406.02069, section 4.1): of what is above ``kept_tokens``, the last layer gets 1 / ``slope`` and the first as much
    more than the average as the last gets less.

    Args:
        kept_tokens: what every layer gets, the observation window of the paper; give it what ``keep`` takes.
        slope: beta of the paper.
        first_layer: where the line begins; the layers before it are dense and not part of the average.

    Deviations: each layer's budget rounds up to whole pages, and pages are chosen at every step and kept in the pool;
    the paper drops tokens once, by SnapKV's scores.
    """

    kept_tokens: int = 0
    slope: int = 20
    first_layer: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("budget.slope", self.slope, 1)
        if not 0 <= self.kept_tokens <= self.tokens:
            raise ValueError(f"budget.kept_tokens={self.kept_tokens} must be 0 to budget.tokens={self.tokens}")
        check_integer("budget.first_layer", self.first_layer, 0)

    def pages(self, layer: int, layers: int, page_tokens: int) -> int:
        spread = self.tokens - self.kept_tokens
        least = spread // self.slope
        steps = layers - 1 - self.first_layer
        if steps < 1:
            return -(-self.tokens // page_tokens)
        below = min(max(layer - self.first_layer, 0), steps)
        fall = 2 * (spread - least)  # from the first layer of the line to the last
        tokens = self.kept_tokens + 2 * spread - least - fall * below // steps
        return -(-tokens // page_tokens)
