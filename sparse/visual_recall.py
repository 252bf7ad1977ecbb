"""How the tokens of an answer ask pages of images back that the method has put away."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor

from octavo.core.interfaces import Digest, ModelSpec, PageView, Scorer
from octavo.sparse.checks import check_share
from octavo.sparse.digests import MinMax
from octavo.sparse.replacement.lru import LeastRecentlyUsed
from octavo.sparse.resident_sets import FrameMaps
from octavo.sparse.scorers import UpperBound


@dataclass(frozen=True)
class Recall:
    """A decoded token rates all pages of the images for each layer and KV head, by digests that stay on the device. It
    reads what the head keeps, and those pages besides that it would keep itself: that are among its best ones, as many
    as the head keeps. So where the question, for whose sake the method has decided, and the answer want the same,
    nothing comes back. (ArkVale, NeurIPS 2024, recalls pages of any text so; there what is kept gives way.)

    Attributes:
        share: of the images' pages, how many may come back for a head at once, rounded up: frames that the device has
            for it. The page that was not read for longest makes room.
        scorer, digest: as in a method that chooses pages; the scorer goes by digests alone.
    """

    share: float = 0.25
    scorer: Scorer = field(default_factory=UpperBound)
    digest: Digest = field(default_factory=MinMax)

    def __post_init__(self) -> None:
        check_share("recall.share", self.share)

    def validate(self, name: str, spec: ModelSpec, page_tokens: int) -> None:
        """Raises ValueError, in the name of a method, unless pages can be rated by their digests."""
        two = 2 * page_tokens
        if self.scorer.elements(two, spec, page_tokens) or self.scorer.narrowing(1, two, spec, page_tokens):
            raise ValueError(
                f"{name}: recall.scorer={self.scorer} reads keys to choose, and those of pages that are put away are "
                "not on the device; take one that goes by digests, as octavo.sparse.scorers.UpperBound"
            )
        if missing := self.scorer.parts - set(self.digest.spec(page_tokens, spec)):
            raise ValueError(
                f"{name}: recall.scorer={self.scorer} needs digest parts {sorted(missing)}, and {self.digest} has none "
                "of them"
            )

    def frames(self, pages: int) -> int:
        return ceil(self.share * pages - 1e-9)

    def sets(self, frames: int, layers: int, heads: int, device: torch.device) -> FrameMaps:
        return FrameMaps(frames, layers, heads, LeastRecentlyUsed(), device)

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        return self.scorer.score(q, pages)
