"""A sparse-attention method is a composition: digest, scorer, budget, selector, placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from octavo.core.hosting.interfaces import Foretold, Hosting
from octavo.core.interfaces import (
    Budget,
    Digest,
    ModelSpec,
    PagesRead,
    PageView,
    Placement,
    PrefillPattern,
    Prior,
    Scorer,
    Selection,
    Selector,
    TokenSelection,
)
from octavo.sparse.budgets import JointBudget
from octavo.sparse.checks import layer_numbers
from octavo.sparse.host_placement import Host
from octavo.sparse.keep import Keep
from octavo.sparse.placements import Resident
from octavo.sparse.selectors import TopK


@dataclass(frozen=True)
class Method:
    """Joins the parts that a YAML file names; holds no state, so one object serves any number of engines.

    For each layer and decoding step: the *scorer* rates the pages of each KV head (from *digests*, positions or exact
    attention), the *budget* says how many each head may read, *keep* names those that are read in any case, the
    *selector* picks, and the *placement* brings the picked pages to where the kernel reads.

    A sequence that fits the budget of a layer is read whole, whoever is beside it in the batch, so with a full budget
    the method is exactly dense.

    Attributes:
        dense_layers: layers that read everything, whatever the budget.
        choosing_layers: layers that choose; each later one reads the pages that the last of them chose. One that is
            dense as well chooses for others only. Empty: every layer chooses for itself.
        prefill: how prompts are computed; None is densely.
        prior: how what a request says of its tokens beforehand joins the scores; None does not ask.
    """

    name: str
    scorer: Scorer
    budget: Budget
    digest: Digest | None = None
    selector: Selector = field(default_factory=TopK)
    placement: Placement = field(default_factory=Resident)
    keep: Keep = field(default_factory=Keep)
    dense_layers: Sequence[int] = ()
    choosing_layers: Sequence[int] = ()
    prefill: PrefillPattern | None = None
    prior: Prior | None = None

    def __post_init__(self) -> None:
        for name in ("dense_layers", "choosing_layers"):
            object.__setattr__(self, name, layer_numbers(f"{self.name}: {name}", getattr(self, name)))

    @cached_property
    def provenance(self) -> str:
        """The whole composition with its parameters; two methods that differ in one of them share no shaped page."""
        return repr(self)

    @property
    def draws(self) -> bool:
        return self.scorer.draws

    @property
    def waits(self) -> bool:
        return self.scorer.waits

    def reads_all(self, tokens: int, spec: ModelSpec, page_tokens: int) -> bool:
        pages = -(-tokens // page_tokens)
        return all(pages <= self._budget(layer, spec.layers, page_tokens) for layer in self.sparse_layers(spec))

    def validate(self, spec: ModelSpec, page_tokens: int) -> None:
        if self.prefill is not None:
            self.prefill.validate(spec, page_tokens)
        if not isinstance(self.placement, Resident) and (
            self.prefill is not None or getattr(self.selector, "grain", "page") == "token"
        ):
            raise ValueError(
                f"{self.name}: a prefill pattern, or a choice of single tokens, reads pages of the device alone; take "
                f"the placement Resident, not {type(self.placement).__name__}"
            )
        for name in ("dense_layers", "choosing_layers"):
            outside = [layer for layer in getattr(self, name) if not 0 <= layer < spec.layers]
            if outside:
                raise ValueError(f"{self.name}: {name} {outside} are not among the {spec.layers} layers of {spec.name}")
        windowed = [layer for layer in self.choosing_layers if spec.windows[layer]]
        if windowed:
            raise ValueError(
                f"{self.name}: choosing_layers {windowed} of {spec.name} see only a window; layers that see everything "
                f"are {[layer for layer, window in enumerate(spec.windows) if not window]}"
            )
        sparse = self.sparse_layers(spec)
        early = [layer for layer in sparse if layer < min(self.choosing_layers, default=0)]
        if early:
            raise ValueError(
                f"{self.name}: layers {early} come before the first of choosing_layers {list(self.choosing_layers)}; "
                "make them dense_layers, or let an earlier layer choose"
            )
        missing = self.scorer.parts - set(self.digest.spec(page_tokens, spec) if self.digest else ())
        if missing:
            raise ValueError(
                f"{self.name}: {self.scorer} needs digest parts {sorted(missing)}, and {self.digest} has none of them"
            )
        grains = {getattr(part, "grain", "page") for part in (self.scorer, self.selector)}
        by_token = "token" in grains
        if len(grains) > 1 or (by_token and (self.budget.needs_shares or self.budget.adaptive or self.prior)):
            raise ValueError(
                f"{self.name}: {self.scorer}, {self.budget} and {self.selector} do not agree whether pages or single "
                "tokens are chosen; octavo.sparse.oracle_token has the parts for tokens, budgets.Uniform goes with them"
            )
        if isinstance(self.budget, JointBudget):
            raise ValueError(
                f"{self.name}: {self.budget} is divided among all layers at once, and a step chooses for one after the "
                "other; it goes with methods that drop tokens (octavo.sparse.eviction.Evicting)"
            )
        if self.budget.needs_shares and not self.scorer.shares:
            raise ValueError(
                f"{self.name}: {self.budget} divides shares of attention, and the scores of {self.scorer} are none"
            )
        two = 2 * page_tokens
        every, some = self.scorer.elements(two, spec, page_tokens), self.scorer.narrowing(1, two, spec, page_tokens)
        if isinstance(self.placement, Host) and (every or some):
            raise ValueError(
                f"{self.name}: {self.scorer} reads keys of {'all' if every else 'some'} pages to choose, and "
                f"{self.placement} leaves them in host memory; choose by digests, or place the pages with "
                "octavo.sparse.placements.Resident"
            )
        kept = self.keep.pages(page_tokens)
        least = min((self._budget(layer, spec.layers, page_tokens) for layer in sparse), default=kept)
        if kept > least:
            raise ValueError(
                f"{self.name}: {self.keep} always reads {kept} pages of {page_tokens} tokens, but the budget is "
                f"{least} pages; raise it to at least {kept * page_tokens} tokens or keep less"
            )

    def select(self, q: Tensor, pages: PageView) -> Selection | TokenSelection | None:
        """Pages for ``q [b, Hq, D]``, or None for all of them.

        1. Where every sequence fits the layer's budget there is nothing to choose.
        2. A layer that does not choose takes the pages that an earlier one has chosen in this step.
        3. Otherwise: score, divide the budget among the heads, pick; and leave the choice to later layers.
        4. A dense layer reads everything all the same.
        """
        chooser, is_dense = self._chooser(pages.layer), pages.layer in self.dense_layers
        budget = self._budget(pages.layer, pages.layers, pages.page_tokens)
        if pages.max_pages <= budget or (is_dense and pages.layer not in self.choosing_layers):
            return None
        if chooser == pages.layer:
            pages.budget = budget
            scores = self.scorer.score(q, pages)
            keep = pages.once("keep", lambda: self.keep.mask(pages))
            most = self.budget.most(chooser, pages.layers, pages.page_tokens, scores.shape[1])
            granted = self.budget.allocate(scores, keep, pages)
            if self.budget.adaptive or most > budget:  # else all heads get as much as makes a sequence fit
                n_pages = pages.n_pages[:, None]
                longer = pages.once(("longer than", budget), lambda: n_pages > budget)
                granted = granted.where(longer, n_pages)
            if self.prior is not None:
                scores = self.prior.favour(scores, granted, keep, pages)
            pages.reusable = self.selector.select(scores, granted, keep, pages, most)
        return None if is_dense else pages.reusable

    def resolve(self, selection: Selection, pages: PageView) -> tuple[Tensor, Tensor]:
        return self.placement.resolve(selection, pages)

    def look_ahead(self, selection: Selection | None, foretold: Foretold | None, pages: PageView) -> None:
        away, placement = pages.away, self.placement
        assert away is not None and isinstance(placement, Host)
        if placement.prefetch == "previous_layer" and selection is not None:
            following = away.following(pages.layer)
            if following is not None:
                placement.fetch_ahead(selection, pages.of_layer(following, pages.traits))
        elif placement.prefetch == "next_query" and foretold is not None:
            later = pages.of_layer(foretold.layer, foretold.traits)
            expected = self.select(foretold.q, later)
            assert isinstance(expected, Selection)
            placement.fetch_ahead(expected, later)

    def hosting(self, spec: ModelSpec, page_tokens: int) -> Hosting | None:
        sparse = self.sparse_layers(spec)
        if not isinstance(self.placement, Host) or not sparse:
            return None
        budget = max(
            self.budget.most(self._chooser(layer), spec.layers, page_tokens, spec.kv_heads) for layer in sparse
        )
        whole = tuple(layer for layer in range(spec.layers) if not spec.windows[layer] and layer not in sparse)
        return self.placement.hosting(budget, self.keep.recent_pages(page_tokens), whole, page_tokens)

    def predict(self, tokens: int, layer: int, spec: ModelSpec, page_tokens: int) -> PagesRead:
        """The most that is read, where the budget is ``adaptive``."""
        pages = -(-tokens // page_tokens)
        budget = self._budget(layer, spec.layers, page_tokens)
        if pages <= budget:
            return PagesRead(pages, 0)
        is_dense, chooses = layer in self.dense_layers, self._chooser(layer) == layer
        chooses = layer in self.choosing_layers if is_dense else chooses
        elements = self._elements(tokens, spec, page_tokens, budget) if chooses else 0
        return PagesRead(pages if is_dense else budget, elements)

    def sparse_layers(self, spec: ModelSpec) -> list[int]:
        """The layers of a model that read what is chosen."""
        return [layer for layer in range(spec.layers) if layer not in self.dense_layers and not spec.windows[layer]]

    def _chooser(self, layer: int) -> int:
        """Who chooses the pages that a layer reads."""
        return max((chooser for chooser in self.choosing_layers if chooser <= layer), default=layer)

    def _budget(self, layer: int, layers: int, page_tokens: int) -> int:
        return self.budget.pages(self._chooser(layer), layers, page_tokens)

    def _elements(self, tokens: int, spec: ModelSpec, page_tokens: int, budget: int) -> int:
        """Elements a KV head that scoring reads: the scorer's parts of the digests of full pages, and what else it
        says."""
        shapes = self.digest.spec(page_tokens, spec) if self.digest else {}
        digest = sum(self.scorer.elements_of(shapes[part][1:]) for part in self.scorer.parts)
        more = self.scorer.elements(tokens, spec, page_tokens)
        more += self.scorer.narrowing(budget, tokens, spec, page_tokens)
        return (tokens - 1) // page_tokens * digest + more
