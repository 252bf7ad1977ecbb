"""A sparse-attention method is a composition: digest, scorer, budget, selector, placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from octavo.core.interfaces import (
    Budget,
    Digest,
    ModelSpec,
    PagesRead,
    PageView,
    Placement,
    Scorer,
    Selection,
    Selector,
)
from octavo.sparse.keep import Keep
from octavo.sparse.placements import Resident
from octavo.sparse.selectors import TopK


@dataclass(frozen=True)
class Method:
    """Joins the parts that a YAML file names; holds no state, so one object serves any number of engines.

    For each layer and decoding step: the *scorer* rates the pages of each KV head (from *digests*, positions or exact
    attention), the *budget* says how many each head may read, *keep* names those that are read in any case, the
    *selector* picks, and the *placement* brings the picked pages to where the kernel reads.

    Nothing is dropped while a sequence fits the budget, so with a full budget the method is exactly dense.

    Attributes:
        dense_layers: layers that read everything, whatever the budget.
    """

    name: str
    scorer: Scorer
    budget: Budget
    digest: Digest | None = None
    selector: Selector = field(default_factory=TopK)
    placement: Placement = field(default_factory=Resident)
    keep: Keep = field(default_factory=Keep)
    dense_layers: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in self.dense_layers):
            raise ValueError(f"{self.name}: dense_layers must be layer numbers, got {list(self.dense_layers)}")

    @cached_property
    def provenance(self) -> str:
        """The whole composition with its parameters; two methods that differ in one of them share no shaped page."""
        return repr(self)

    @property
    def draws(self) -> bool:
        return self.scorer.draws

    def reads_all(self, tokens: int, spec: ModelSpec, page_tokens: int) -> bool:
        pages = -(-tokens // page_tokens)
        chosen = (layer for layer in range(spec.layers) if layer not in self.dense_layers)
        return all(pages <= self.budget.max_pages(layer, page_tokens) for layer in chosen)

    def validate(self, spec: ModelSpec, page_tokens: int) -> None:
        outside = [layer for layer in self.dense_layers if not 0 <= layer < spec.layers]
        if outside:
            raise ValueError(
                f"{self.name}: dense_layers {outside} are not among the {spec.layers} layers of {spec.name}"
            )
        missing = self.scorer.parts - set(
            self.digest.spec(page_tokens, spec.kv_heads, spec.head_dim) if self.digest else ()
        )
        if missing:
            raise ValueError(
                f"{self.name}: {self.scorer} needs digest parts {sorted(missing)}, and {self.digest} has none of them"
            )
        kept = self.keep.pages(page_tokens)
        least = min(self.budget.max_pages(layer, page_tokens) for layer in range(spec.layers))
        if kept > least:
            raise ValueError(
                f"{self.name}: {self.keep} always reads {kept} pages of {page_tokens} tokens, but the budget is "
                f"{least} pages; raise it to at least {kept * page_tokens} tokens or keep less"
            )

    def select(self, q: Tensor, pages: PageView) -> Selection | None:
        if pages.layer in self.dense_layers or pages.max_pages <= self.budget.max_pages(pages.layer, pages.page_tokens):
            return None
        scores = self.scorer.score(q, pages)
        budget = self.budget.allocate(scores, pages)
        most = self.budget.max_pages(pages.layer, pages.page_tokens)
        return self.selector.select(scores, budget, self.keep.mask(pages), pages, most)

    def resolve(self, selection: Selection, pages: PageView) -> tuple[Tensor, Tensor]:
        return self.placement.resolve(selection, pages)

    def predict(self, tokens: int, layer: int, spec: ModelSpec, page_tokens: int) -> PagesRead:
        pages = -(-tokens // page_tokens)
        most = self.budget.max_pages(layer, page_tokens)
        if layer in self.dense_layers or pages <= most:
            return PagesRead(pages, 0)
        return PagesRead(most, self.scorer.elements(tokens, spec, page_tokens))
