"""How the KV of an image serves a request that holds it elsewhere: policies for ``Engine(reuse=...)``.

What stands in front of an image shapes its KV twice: by the angle of its keys, which can be turned exactly, and by
what its tokens read there, which only computing repairs (arXiv 2405.16444, 2606.23581). The exact policies reuse
nothing that differs; the others take KV that was computed behind ``context_tokens`` tokens of the prompt alone:

    prefix         found behind the very same prefix only                     exact; the default
    encoder_only   never found; embeddings can still be (``CachedEncoder``)   exact
    zero_copy      one physical copy, read with turned queries                approximate
    repair         copies with turned keys, the head of each computed anew    approximate
    blend          the same with the tokens whose KV deviates most            approximate
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class _ByPlace:
    """Which tokens are computed anew does not depend on what they hold."""

    layer = None

    def choose(self, deviations: Tensor) -> Tensor:
        raise AssertionError("nothing is compared")


class _Exact(_ByPlace):
    """All of an image that is not found behind the same prefix is computed."""

    exact = True
    copies = False
    context_tokens = 0
    provenance = ""

    def head(self, tokens: int, page_tokens: int) -> int:
        return tokens


@dataclass(frozen=True)
class PrefixReuse(_Exact):
    """An image is found where everything in front of it is the same. Exact."""

    name = "prefix"
    finds = True


@dataclass(frozen=True)
class EncoderOnlyReuse(_Exact):
    """KV of images, and of what is behind them, is computed by every request: the bar for the others. Exact."""

    name = "encoder_only"
    finds = False


@dataclass(frozen=True)
class ZeroCopyReuse(_ByPlace):
    """One physical copy of an image for all that hold it, wherever: queries are turned by the difference of positions.

    Prompt Cache (Gim et al., arXiv 2311.04934) without copies and without fixed positions.

    Attributes:
        context_tokens: tokens at the head of a prompt that the image sees when it is computed. With a token that
            begins every prompt, 1 lets images lean on it as their attention sink; they are then shared by prompts that
            begin alike.
    """

    context_tokens: int = 0

    name = "zero_copy"
    exact = False
    finds = True
    copies = False

    def __post_init__(self) -> None:
        _at_least_0("context_tokens", self.context_tokens)

    @property
    def provenance(self) -> str:
        return f"{self.name} context_tokens={self.context_tokens}"

    def head(self, tokens: int, page_tokens: int) -> int:
        return 0


@dataclass(frozen=True)
class RepairReuse(_ByPlace):
    """Copies of an image's pages, keys turned to their place, of which the head is computed anew in its place.

    An image that is computed alone makes a sink of its own first tokens, and errors of early tokens spread to later
    ones, so the head is what to repair: LegoLink (EPIC, Hu et al., arXiv 2410.15332), MPIC-k (arXiv 2502.01960),
    VLCache (arXiv 2512.12977; its ratio that differs from layer to layer is not there: a token is computed in all
    layers or in none). Of ``tokens``, ``pages`` and ``share`` the largest counts; all 0 computes nothing anew, and a
    head of the whole image is exact.

    Attributes:
        tokens: of the head. pages: whole pages of it. share: of the image's tokens, rounded up.
        context_tokens: as in ``ZeroCopyReuse``. name: for rows and messages.
    """

    tokens: int = 32
    pages: int = 0
    share: float = 0.0
    context_tokens: int = 0
    name: str = "repair"

    exact = False
    finds = True
    copies = True

    def __post_init__(self) -> None:
        for name in ("tokens", "pages", "context_tokens"):
            _at_least_0(name, getattr(self, name))
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 <= self.share <= 1:
            raise ValueError(f"share must be in [0, 1], got {self.share!r}")

    @property
    def provenance(self) -> str:
        head = f"tokens={self.tokens} pages={self.pages} share={self.share}"
        return f"repair {head} context_tokens={self.context_tokens}"

    def head(self, tokens: int, page_tokens: int) -> int:
        return min(tokens, max(self.tokens, self.pages * page_tokens, math.ceil(self.share * tokens)))


@dataclass(frozen=True)
class BlendReuse:
    """Copies of an image's pages, keys turned to their place, of which the tokens that deviate most are computed anew.

    CacheBlend (Yao et al., arXiv 2405.16444): up to ``layer`` everything is computed; there the ``share`` of an image's
    tokens whose K and V differ most from the copied ones, by squared distance, is chosen, and computed in the layers
    behind it, too. The paper narrows the choice from layer to layer; here it is made once.

    Attributes:
        share: of the image's tokens, rounded up. layer: counted from 0, where KV does not depend on what is in front.
        context_tokens: as in ``ZeroCopyReuse``. name: for rows and messages.
    """

    share: float = 0.15
    layer: int = 1
    context_tokens: int = 0
    name: str = "blend"

    exact = False
    finds = True
    copies = True

    def __post_init__(self) -> None:
        for name in ("layer", "context_tokens"):
            _at_least_0(name, getattr(self, name))
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share!r}")

    @property
    def provenance(self) -> str:
        return f"blend share={self.share} layer={self.layer} context_tokens={self.context_tokens}"

    def head(self, tokens: int, page_tokens: int) -> int:
        return tokens if self.share == 1 else 0

    def choose(self, deviations: Tensor) -> Tensor:
        count = math.ceil(self.share * len(deviations))
        return deviations.argsort(descending=True, stable=True)[:count].sort().values


def _at_least_0(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
