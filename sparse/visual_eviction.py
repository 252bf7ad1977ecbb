"""Methods that keep some tokens of each image and all text, by a score of the images' tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar, Literal

import torch
from torch import Tensor

from octavo.core.compression.interfaces import Context, Kept, LayerContext, Recalling, TokenScorer
from octavo.core.interfaces import ModelSpec, SparseMethod
from octavo.sparse.checks import layer_numbers
from octavo.sparse.eviction import ReadsKept
from octavo.sparse.visual_recall import Recall
from octavo.sparse.visual_shares import Shares


@dataclass(frozen=True)
class VisualEviction(ReadsKept):
    """When the prompt is computed, for each layer: the *scorer* rates the tokens of the images, the *budget* says which
    share of each image is kept, and the best of it are. Text is kept whole, whatever its score. From then on decoding
    reads what was kept and everything since; keys keep their positions.

    Where the papers below drop tokens while a prompt is computed, here it is computed with all of them in all layers,
    and its KV is what is spared: memory and the reads of decoding, not the prompt's arithmetic.

    Attributes:
        grain: what is kept or not: a "token", or a "page" of the image, whose score is the mean of its tokens'. A share
            is rounded up to whole ones.
        per: a share of each "image", or of all images of the "prompt" together, some of which may then lose everything.
        placement: "drop" gives the memory of what is not kept back to the pool. "host" does the same, and moves the
            pages that this answer does without to the host tier, where a later turn of the session finds them: it
            sees all of every image again, and decides anew for its own question. "visible" only hides what is not kept,
            and moves nothing: it reads, and recalls, what "host" does.
        recall: how decoded tokens ask pages back that their head does not keep, from wherever the placement has them;
            None: what an answer does without it does not see again. It takes whole pages.
        nested: what a layer drops, no later one keeps.
        dense_layers: layers that keep everything, and are no part of the budget.
    """

    name: str
    scorer: TokenScorer
    budget: Shares
    grain: Literal["token", "page"] = "token"
    per: Literal["image", "prompt"] = "image"
    placement: Literal["drop", "host", "visible"] = "drop"
    recall: Recall | None = None
    nested: bool = False
    dense_layers: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", layer_numbers(f"{self.name}: dense_layers", self.dense_layers))
        words = {"grain": ("token", "page"), "per": ("image", "prompt"), "placement": ("drop", "host", "visible")}
        for key, known in words.items():
            if (given := getattr(self, key)) not in known:
                raise ValueError(f"{self.name}: {key} must be {' or '.join(map(repr, known))}, got {given!r}")
        if not isinstance(self.nested, bool):
            raise ValueError(f"{self.name}: nested must be true or false, got {self.nested!r}")
        if self.grain == "token" and (self.placement == "visible" or self.recall is not None):
            what = "placement=visible moves nothing" if self.recall is None else "recall brings whole pages back"
            raise ValueError(f"{self.name}: {what}, and grain=token keeps parts of pages; set grain=page")
        if self.placement == "drop" and self.recall is not None:
            raise ValueError(
                f"{self.name}: placement=drop leaves nothing to recall; take host, or visible, or recall=null"
            )

    @property
    def compressor(self) -> _VisualEviction:
        """What the engine asks, when the prompt is computed."""
        return _VisualEviction(self)

    def validate(self, spec: ModelSpec, page_tokens: int) -> None:
        if self.recall is not None:
            self.recall.validate(self.name, spec, page_tokens)
        outside = [layer for layer in self.dense_layers if not 0 <= layer < spec.layers]
        if outside:
            raise ValueError(
                f"{self.name}: dense_layers {outside} are not among the {spec.layers} layers of {spec.name}"
            )
        source = getattr(self.scorer, "layer", None)
        if source is not None and (not 0 <= source < spec.layers or spec.windows[source]):
            whole = [layer for layer, window in enumerate(spec.windows) if not window]
            raise ValueError(
                f"{self.name}: scorer.layer={source} is none of the layers of {spec.name} that see everything: {whole}"
            )


@dataclass(frozen=True)
class _VisualEviction:
    """``interfaces.Compressor`` of a method."""

    method: VisualEviction
    every: ClassVar[int] = 0
    any_pages: ClassVar[bool] = True
    chooser: ClassVar[SparseMethod | None] = None
    items: ClassVar[bool] = True

    @property
    def window(self) -> int:
        return max(self.method.scorer.window, self.method.budget.window)

    @property
    def behind_items(self) -> bool:
        return bool(getattr(self.method.scorer, "behind_items", False))

    @property
    def drops(self) -> bool:
        return self.method.placement != "visible"

    @property
    def demotes(self) -> bool:
        return self.method.placement == "host"

    @property
    def renews(self) -> bool:
        return self.method.placement != "drop"

    @property
    def recall(self) -> Recalling | None:
        return self.method.recall

    @property
    def item_scores(self) -> bool:
        return bool(getattr(self.method.scorer, "item_scores", False))

    def behind(self, tokens: int, read: Callable[[str | Sequence[int]], list[int]]) -> int:
        return 0

    def keep(self, context: Context) -> Kept | None:
        method = self.method
        if not context.items:
            return None
        sparse = [number for number in context.layers if number not in method.dense_layers]
        shares = dict(zip(sparse, method.budget.of_layers(context, sparse), strict=True))
        images = _Images(context, method.grain, method.per)
        masks, carried, left = [], [], None
        for number in context.layers:
            layer = context.layer(number)
            share, scores = shares.get(number, 1.0), layer.carried
            if number in sparse:  # also where all is kept: some scorers go on from what they have said before
                scores = method.scorer.score(layer, context)
            if share < 1:
                kept = images.best(scores, layer, share, left)
                left = kept if method.nested else None
                masks.append(images.mask(kept, layer))
            else:
                masks.append(torch.ones_like(layer.positions, dtype=torch.bool))
            carried.append(scores)
        return Kept(torch.stack(masks), torch.stack(carried) if method.scorer.carries else None)

    def kept_units(self, tokens: int, layer: int, spec: ModelSpec, page_tokens: int, unit_tokens: int) -> int:
        """The most, which a prompt without images keeps: how much of a prompt is images is not known here."""
        return tokens // page_tokens * page_tokens // unit_tokens * spec.kv_heads


class _Images:
    """The *candidates* of a sequence, tokens or pages of its images, numbered from 0 to C in their order; C stands for
    whatever is none."""

    def __init__(self, context: Context, grain: str, per: str) -> None:
        device = context.layer(context.layers[0]).positions.device
        self._candidate = torch.zeros(context.tokens, dtype=torch.int64)
        self._groups: list[tuple[int, int]] = []
        inside = torch.zeros(context.tokens, dtype=torch.bool)
        count = 0
        for start, end, page_tokens in context.items:
            step = page_tokens if grain == "page" else 1
            end = min(end, context.tokens)
            self._candidate[start:end] = count + torch.arange(end - start) // step
            inside[start:end] = True
            more = -(-(end - start) // step)
            self._groups.append((count, count + more))
            count += more
        if per == "prompt":
            self._groups = [(0, count)]
        self._candidate = self._candidate.masked_fill(~inside, count).to(device)
        self._count = count

    def best(self, scores: Tensor, layer: LayerContext, share: float, left: Tensor | None) -> Tensor:
        """bool [Hkv, C + 1], the candidates that a layer keeps, by ``scores`` fp32 [Hkv, N]: of each group the best, as
        many as are ``share`` of those that the prompt had. Equal scores go to the earlier one. Only those in ``left``
        can be, if that is given; the last column, of what is no candidate, is true."""
        at = self._of(layer)
        ones = torch.ones_like(scores)
        tokens = torch.zeros(len(at), self._count + 1, device=scores.device).scatter_add(1, at, ones)
        summed = torch.zeros_like(tokens).scatter_add(1, at, scores.float().nan_to_num(nan=torch.finfo().min / 2))
        rated = (summed / tokens).masked_fill(tokens == 0, -torch.inf)
        if left is not None:
            rated = rated.masked_fill(~left, -torch.inf)
        kept = torch.zeros_like(rated, dtype=torch.bool)
        for first, end in self._groups:
            order = rated[:, first:end].argsort(dim=1, descending=True, stable=True)
            wanted = order[:, : ceil(share * (end - first) - 1e-9)]
            kept[:, first:end] = kept[:, first:end].scatter(1, wanted, True)
        kept &= rated > -torch.inf
        kept[:, self._count] = True
        return kept

    def mask(self, kept: Tensor, layer: LayerContext) -> Tensor:
        """bool [Hkv, N]"""
        return kept.gather(1, self._of(layer))

    def _of(self, layer: LayerContext) -> Tensor:
        """int64 [Hkv, N], the candidate that each token is of."""
        return self._candidate[layer.positions.clamp(min=0)].masked_fill(layer.positions < 0, self._count)
