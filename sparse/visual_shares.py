"""How much of each image the layers keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from octavo.core.compression.interfaces import Context


class Shares(Protocol):
    """Divides a ``share`` of the images' tokens, 0 to 1, among layers, so that it is the mean over them. ``window``:
    queries that it wants to see for that."""

    @property
    def share(self) -> float: ...
    @property
    def window(self) -> int: ...

    def of_layers(self, context: Context, layers: Sequence[int]) -> list[float]:
        """The share of each of some layers, in their order."""
        ...


@dataclass(frozen=True)
class EvenShares:
    """Every layer keeps ``share``."""

    share: float
    window: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_keep_share(self.share)

    def of_layers(self, context: Context, layers: Sequence[int]) -> list[float]:
        return [self.share] * len(layers)


def check_keep_share(share: float) -> None:
    """Refuse, with a ValueError, what is no share of images to keep."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(
            f"budget.share={share!r} must be above 0 and at most 1, where 1 keeps every token of an image; to keep "
            "nothing of an image, leave it out of the prompt"
        )


def spread(weights: Sequence[float], mean: float, least: float) -> list[float]:
    """Shares in proportion to ``weights``, as far as none is below ``least`` or above 1, whose mean is ``mean``. Layers
    without any weight count as nearly so."""
    top = max(weights, default=0.0)
    weights = [max(weight, 1e-6 * top) if top else 1.0 for weight in weights]
    least = min(least, mean)
    low, high = 0.0, 1.0 / min(weights, default=1.0)
    for _ in range(64):  # the mean rises with the factor
        factor = (low + high) / 2
        shares = [min(1.0, max(least, factor * weight)) for weight in weights]
        low, high = (factor, high) if sum(shares) < mean * len(shares) else (low, factor)
    return [min(1.0, max(least, high * weight)) for weight in weights]
