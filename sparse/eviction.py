"""Methods that decide once, when the prompt is computed, which tokens each layer and KV head keeps; and, if they like,
at every step which of those are read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor

from octavo.core.compression.interfaces import Context, ContextScorer, Kept, OfTokens, TokenScorer
from octavo.core.interfaces import (
    Budget,
    Digest,
    ModelSpec,
    PagesRead,
    PageView,
    Scorer,
    Selection,
    Selector,
    SparseMethod,
    TokenSelection,
)
from octavo.sparse.budgets import JointBudget
from octavo.sparse.checks import check_integer, layer_numbers
from octavo.sparse.keep import Keep
from octavo.sparse.method import Method
from octavo.sparse.selectors import TopK


@dataclass(frozen=True)
class Candidates:
    """What a budget asks of pages, of tokens that are to be kept or not: each is a page of ``page_tokens``."""

    layer: int
    layers: int
    page_tokens: int
    max_pages: int
    n_pages: Tensor

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        return make()


class ReadsKept:
    """What all methods that keep some tokens for good have in common: a step reads whatever was kept, so there is
    nothing to choose. They are dataclasses, whose fields make their provenance."""

    draws: ClassVar[bool] = False

    @property
    def digest(self) -> Digest | None:
        return None

    @cached_property
    def provenance(self) -> str:
        return repr(self)

    def reads_all(self, tokens: int, spec: ModelSpec, page_tokens: int) -> bool:
        return True

    def select(self, q: Tensor, pages: PageView) -> Selection | TokenSelection | None:
        return None

    def resolve(self, selection: Selection, pages: PageView) -> tuple[Tensor, Tensor]:
        return pages.gather(selection)

    def predict(self, tokens: int, layer: int, spec: ModelSpec, page_tokens: int) -> PagesRead:
        return PagesRead(-(-tokens // page_tokens), 0)


class KeptRule(Protocol):
    """How much is kept where a step reads less than that."""

    def tokens(self, read: int, sequence: int) -> int:
        """Tokens that a head keeps of a ``sequence`` of more than ``read``, at least that many, which a step reads."""
        ...


@dataclass(frozen=True)
class Times:
    """So many times what a step reads, ``factor``."""

    factor: float

    def __post_init__(self) -> None:
        if isinstance(self.factor, bool) or not isinstance(self.factor, int | float) or not 1 <= self.factor < inf:
            raise ValueError(f"choosing.kept.factor must be a number of at least 1, got {self.factor!r}")

    def tokens(self, read: int, sequence: int) -> int:
        return ceil(self.factor * read)


@dataclass(frozen=True)
class Choosing:
    """The second stage of a method that drops tokens: the parts of a ``Method``, but for its budget, what it keeps and
    its dense layers, which are those of the first. ``kept`` says how much more the first one keeps."""

    kept: KeptRule
    scorer: Scorer
    digest: Digest | None = None
    selector: Selector = field(default_factory=TopK)


@dataclass(frozen=True)
class Evicting(ReadsKept):
    """Joins the parts that a YAML file names to a method that keeps some tokens for good, and reads all of those.

    When the prompt is computed, for each layer: the *scorer* rates the tokens of each KV head, the *budget* says how
    many each head keeps, and those that *keep* names and the best are kept. From then on decoding reads what was kept
    and everything since.

    A sequence that fits the budget of a layer keeps everything there.

    With a ``choosing`` part the budget is what a step reads of a head. More than that is kept, in whole pages, and the
    part chooses among those pages and all since, as a ``Method`` does.

    Attributes:
        grain: what is kept or not: a "token", or a "page", whose score is the mean of its tokens'. A budget in tokens
            is exact for tokens, and rounds up to whole pages for pages. The open page is kept, and counts.
        placement: "drop" gives the memory of what is not kept back; "visible" only hides it, and moves nothing, so it
            takes whole pages. Both keep the same pages and give the same tokens.
        every: tokens after which the method decides again, over what it has kept and all since; 0: never.
        dense_layers: layers that keep everything, and read it.
        choosing: how a step chooses among what is kept; None reads all.
    """

    name: str
    scorer: TokenScorer
    budget: Budget
    keep: Keep = field(default_factory=Keep)
    grain: Literal["token", "page"] = "token"
    placement: Literal["drop", "visible"] = "drop"
    every: int = 0
    dense_layers: Sequence[int] = ()
    choosing: Choosing | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", layer_numbers(f"{self.name}: dense_layers", self.dense_layers))
        check_integer("every", self.every, 0)
        if self.grain not in ("token", "page"):
            raise ValueError(f"{self.name}: grain must be 'token' or 'page', got {self.grain!r}")
        if self.placement not in ("drop", "visible"):
            raise ValueError(f"{self.name}: placement must be 'drop' or 'visible', got {self.placement!r}")
        if self.placement == "visible" and self.grain == "token":
            raise ValueError(
                f"{self.name}: placement=visible moves nothing, and a block table lists whole units; set grain=page, "
                "or placement=drop, which brings single tokens together"
            )

    @property
    def compressor(self) -> _Eviction:
        """What the engine asks, when the prompt is computed."""
        return _Eviction(self)

    @cached_property
    def chooser(self) -> Method | None:
        """The choosing part with all that the method says to it."""
        part = self.choosing
        if part is None:
            return None
        return Method(
            self.name, part.scorer, self.budget, part.digest, part.selector, keep=self.keep,
            dense_layers=self.dense_layers,
        )  # fmt: skip

    @property
    def digest(self) -> Digest | None:
        return None if self.choosing is None else self.choosing.digest

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return self.chooser is not None and self.chooser.draws

    def reads_all(self, tokens: int, spec: ModelSpec, page_tokens: int) -> bool:
        return self.chooser is None or self.chooser.reads_all(tokens, spec, page_tokens)

    def select(self, q: Tensor, pages: PageView) -> Selection | TokenSelection | None:
        return None if self.chooser is None else self.chooser.select(q, pages)

    def kept_budget(self, tokens: int) -> Budget:
        """What is kept of a sequence of so many tokens."""
        if self.choosing is None:
            return self.budget
        budget: Any = self.budget
        return cast(Budget, replace(budget, tokens=self.choosing.kept.tokens(budget.tokens, tokens)))

    def validate(self, spec: ModelSpec, page_tokens: int) -> None:
        if self.chooser is not None:
            self.chooser.validate(spec, page_tokens)
            if self.budget.most(0, spec.layers, 1, 2) > self.budget.pages(0, spec.layers, 1):
                raise ValueError(
                    f"{self.name}: {self.budget} lets one head keep more than another, and a step chooses among "
                    "equally many pages for each; take octavo.sparse.budgets.Uniform, or leave out choosing"
                )
        outside = [layer for layer in self.dense_layers if not 0 <= layer < spec.layers]
        if outside:
            raise ValueError(
                f"{self.name}: dense_layers {outside} are not among the {spec.layers} layers of {spec.name}"
            )
        if self.budget.needs_shares and not self.scorer.shares:
            raise ValueError(
                f"{self.name}: {self.budget} divides shares of attention, and the scores of {self.scorer} are none"
            )
        grain = self.grain_tokens(page_tokens)
        kept = self.keep.pages(grain)
        if self.grain == "token":  # the open page may be full but for one token, and is recent
            kept = self.keep.sink_tokens + max(self.keep.recent_tokens, page_tokens)
        sparse = [layer for layer, window in enumerate(spec.windows) if not window and layer not in self.dense_layers]
        least = min((self.budget.pages(layer, spec.layers, grain) for layer in sparse), default=kept)
        if kept > least:
            raise ValueError(
                f"{self.name}: {self.keep} and the open page of {page_tokens} tokens are {kept * grain} tokens, but "
                f"the budget is {least * grain}; raise it, or keep less"
            )

    def grain_tokens(self, page_tokens: int) -> int:
        return page_tokens if self.grain == "page" else 1


@dataclass(frozen=True)
class _Eviction(OfTokens):
    """``interfaces.Compressor`` of a method."""

    method: Evicting

    @property
    def window(self) -> int:
        return self.method.scorer.window

    @property
    def every(self) -> int:
        return self.method.every

    @property
    def drops(self) -> bool:
        return self.method.placement == "drop"

    @property
    def chooser(self) -> SparseMethod | None:
        return self.method.chooser

    @property
    def any_pages(self) -> bool:
        method = self.method
        whole = method.chooser is not None or isinstance(method.scorer, ContextScorer)
        return self.drops and method.grain == "token" and not whole

    def behind(self, tokens: int, read: Callable[[str | Sequence[int]], list[int]]) -> int:
        scorer = self.method.scorer
        return scorer.behind(tokens, read) if isinstance(scorer, ContextScorer) else 0

    def keep(self, context: Context) -> Kept | None:
        """bool [L, Hkv, N] of what is kept.

        1. Tokens are put together to candidates of ``grain`` tokens, each with the mean of its tokens' scores.
        2. Sinks, recent tokens and the open page go first; padding is no candidate.
        3. The budget is divided among the heads of a layer, or, if it is for all layers together, among those of all;
           and each keeps its best. Equal scores go to the earlier candidate.
        """
        method, grain = self.method, self.method.grain_tokens(context.page_tokens)
        budget, spec = method.kept_budget(context.tokens), context.spec
        sparse = [number for number in context.layers if number not in method.dense_layers]
        if isinstance(method.scorer, ContextScorer):
            if all(-(-context.tokens // grain) <= budget.pages(number, spec.layers, grain) for number in sparse):
                return None
            scores = dict(zip(context.layers, method.scorer.score_all(context), strict=True))
        else:
            scores = {}
        masks, carried, ranked = {}, [], {}
        for number in context.layers:
            layer = context.layer(number)
            if number not in sparse:
                masks[number], scores[number] = torch.ones_like(layer.positions, dtype=torch.bool), layer.carried
            else:
                if number not in scores:
                    scores[number] = method.scorer.score(layer, context)
                ranked[number] = self._rank(layer.positions, context, scores[number], grain)
            carried.append(scores[number])
        for number, granted in self._grant(ranked, budget, context, grain).items():
            order = ranked[number].argsort(dim=1, descending=True, stable=True)
            best = torch.arange(order.shape[1], device=order.device) < granted[:, None]
            chosen = torch.zeros_like(best).scatter(1, order, best)
            masks[number] = chosen.repeat_interleave(grain, 1)[:, : scores[number].shape[1]]
        kept = torch.stack([masks[number] for number in context.layers])
        return Kept(kept, torch.stack(carried) if method.scorer.carries else None)

    def _rank(self, positions: Tensor, context: Context, scores: Tensor, grain: int) -> Tensor:
        """fp32 [Hkv, P]: the candidates' scores, infinite for those that are kept in any case, minus infinite for what
        is no candidate."""
        keep = self.method.keep
        positions = _grouped(positions, grain, -1)  # [Hkv, P, grain]
        exists = positions >= 0
        scores = (_grouped(scores, grain, 0.0).where(exists, 0.0)).sum(2) / exists.sum(2).clamp(min=1)
        recent = max(keep.recent_tokens, context.open_tokens)
        first = exists & ((positions < keep.sink_tokens) | (positions >= context.tokens - recent))
        most = torch.finfo(torch.float32).max / 2  # no score is above what is kept in any case
        scores = scores.nan_to_num(nan=-most).clamp(-most, most).masked_fill(first.any(2), torch.inf)
        return scores.where(exists.any(2), -torch.inf)

    def _grant(self, ranked: dict[int, Tensor], budget: Budget, context: Context, grain: int) -> dict[int, Tensor]:
        """Candidates that each head keeps, int64 [Hkv] by layer."""
        layers, found = context.spec.layers, {}
        if ranked and isinstance(budget, JointBudget):
            together = budget.divide(torch.stack([*ranked.values()]), grain)
            found = dict(zip(ranked, together, strict=True))
        for number, scores in ranked.items():
            count = (scores > -torch.inf).sum(1)  # [Hkv]
            if number not in found:
                most = count.amax()[None].to(torch.int32)
                # Budgets ask no more of pages than this.
                candidates = cast(PageView, Candidates(number, layers, grain, scores.shape[1], most))
                nothing = torch.zeros((1, scores.shape[1]), dtype=torch.bool, device=scores.device)
                found[number] = budget.allocate(scores[None], nothing, candidates)[0]
            if self.method.choosing is not None and grain == 1:
                opened = context.open_tokens
                found[number] = opened + whole_pages(found[number] - opened, context.page_tokens)
            found[number] = found[number].where(count > budget.pages(number, layers, grain), count)
        return found

    def kept_units(self, tokens: int, layer: int, spec: ModelSpec, page_tokens: int, unit_tokens: int) -> int:
        method, grain = self.method, self.method.grain_tokens(page_tokens)
        closed = tokens // page_tokens * page_tokens
        kept_budget = method.kept_budget(tokens)
        budget = kept_budget.pages(layer, spec.layers, grain)
        if layer in method.dense_layers or -(-tokens // grain) <= budget:
            return closed // unit_tokens * spec.kv_heads
        kept = (budget - -(-(tokens - closed) // grain)) * grain
        if method.choosing is not None:
            kept = whole_pages(kept, page_tokens)
        if kept_budget.most(layer, spec.layers, grain, spec.kv_heads) == budget:
            return -(-kept // unit_tokens) * spec.kv_heads
        # Heads share the budget, and with tokens each may leave one unit partly filled.
        rest = spec.kv_heads if grain == 1 else 0
        return min(closed // unit_tokens * spec.kv_heads, kept * spec.kv_heads // unit_tokens + rest)


Count = TypeVar("Count", int, Tensor)


def whole_pages(tokens: Count, page_tokens: int) -> Count:
    """``tokens``, rounded up to whole pages."""
    return -(-tokens // page_tokens) * page_tokens


def _grouped(values: Tensor, grain: int, fill: float) -> Tensor:
    """``values`` [Hkv, N] as [Hkv, P, grain]."""
    missing = -values.shape[1] % grain
    return torch.nn.functional.pad(values, (0, missing), value=fill).view(len(values), -1, grain)
