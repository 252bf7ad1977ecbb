"""The parts of a sparse method. Shapes: b sequences, H KV heads (or 1 where all agree), P pages, D head_dim."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from octavo.core.interfaces import ModelSpec, PageView, Selection


class Scorer(Protocol):
    """Rates pages: a larger score is read first. ``parts`` are the digest parts that it reads; ``draws`` says that the
    scores depend on ``PageView.seeds``."""

    @property
    def parts(self) -> frozenset[str]: ...
    @property
    def draws(self) -> bool: ...

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        """fp32 [b, H, P] for ``q [b, Hq, D]``; what stands past a sequence's pages is ignored, NaN included."""
        ...

    def elements(self, tokens: int, spec: ModelSpec, page_tokens: int) -> int:
        """Elements a KV head that scoring ``tokens`` tokens reads, in closed form."""
        ...


class Budget(Protocol):
    """Pages that each KV head may read. A budget in tokens rounds up to whole pages."""

    def max_pages(self, layer: int, page_tokens: int) -> int:
        """The most that any head of a layer gets; known without looking at scores, so that shapes are static."""
        ...

    def allocate(self, scores: Tensor, pages: PageView) -> Tensor:
        """int64 [b, H], for scores fp32 [b, H, P]."""
        ...


class Selector(Protocol):
    def select(self, scores: Tensor, budget: Tensor, keep: Tensor, n_pages: Tensor, most: int) -> Selection:
        """Pick at most ``budget [b, H]`` (and at most ``most``) of each row's ``n_pages [b]`` pages; those in ``keep``
        bool [b, P] first, then by score. The open page is always picked."""
        ...


class Placement(Protocol):
    """Where pages are when they are not read, and how they come to where the kernel reads them."""

    def resolve(self, selection: Selection, pages: PageView) -> tuple[Tensor, Tensor]:
        """Table and slots for the decode kernel (``PageView.gather``)."""
        ...
