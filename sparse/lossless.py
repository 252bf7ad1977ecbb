"""A sparse method that loses nothing: what it decodes are drafts, and the full cache verifies them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.core.interfaces import (
    Digest,
    Drafter,
    ModelSpec,
    PagesRead,
    PageView,
    Selection,
    SparseMethod,
    TokenSelection,
)
from octavo.sparse.checks import check_integer


@dataclass(frozen=True)
class Lossless:
    """Draft ``drafts`` tokens under the method ``draft``, then verify them densely (``octavo.core.execution.drafts``),
    after MagicDec (arXiv 2408.11049): the weights that draft are those that verify, only the pages read differ.

    The tokens are those of dense decoding. Deviations: a draft is verified against the token that dense decoding would
    have drawn with the same noise, where the paper uses rejection sampling; a sequence that the method reads whole is
    decoded without drafts.

    Attributes:
        forced_acceptance: for measuring time on random weights. A draft is taken as right with this probability,
            whatever it is, so the tokens mean nothing and are not those of dense decoding.
    """

    draft: SparseMethod
    drafts: int = 4
    forced_acceptance: float | None = None
    name: str = "lossless"

    def __post_init__(self) -> None:
        check_integer("drafts", self.drafts, 1)
        if not callable(getattr(self.draft, "select", None)):
            raise ValueError(f"draft must be a sparse method, got {self.draft!r}")
        if isinstance(self.draft, Drafter):
            raise ValueError("draft: a method that drafts itself; give the one that chooses for it")
        if getattr(self.draft, "compressor", None) is not None:
            raise ValueError(f"draft={self.draft.name!r} drops tokens, and what verifies needs them all")
        if getattr(self.draft, "prefill", None) is not None:
            raise ValueError(
                f"draft={self.draft.name!r} computes prompts by a pattern, and what verifies needs exact ones; give a "
                "method with prefill=null"
            )
        forced = self.forced_acceptance
        if forced is not None and (isinstance(forced, bool) or not 0 <= forced <= 1):
            raise ValueError(f"forced_acceptance must be a probability, 0 to 1, or null, got {forced!r}")

    @property
    def digest(self) -> Digest | None:
        return self.draft.digest

    @property
    def provenance(self) -> str:
        return repr(self)

    @property
    def draws(self) -> bool:
        return self.draft.draws

    def reads_all(self, tokens: int, spec: ModelSpec, page_tokens: int) -> bool:
        return self.draft.reads_all(tokens, spec, page_tokens)

    def validate(self, spec: ModelSpec, page_tokens: int) -> None:
        self.draft.validate(spec, page_tokens)
        hosting = getattr(self.draft, "hosting", None)
        if hosting is not None and hosting(spec, page_tokens) is not None:
            raise ValueError(
                f"draft={self.draft.name!r} keeps its pages in host memory, and what verifies reads them all; place "
                "them with octavo.sparse.placements.Resident"
            )

    def select(self, q: Tensor, pages: PageView) -> Selection | TokenSelection | None:
        return self.draft.select(q, pages)

    def resolve(self, selection: Selection, pages: PageView) -> tuple[Tensor, Tensor]:
        return self.draft.resolve(selection, pages)

    def predict(self, tokens: int, layer: int, spec: ModelSpec, page_tokens: int) -> PagesRead:
        """A dense step: what drafts add to it and spare of it depends on how many are right."""
        return PagesRead(-(-tokens // page_tokens), 0)
