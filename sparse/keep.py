"""Pages that are read in any case."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.interfaces import PageView
from octavo.sparse.checks import check_integer


@dataclass(frozen=True)
class Keep:
    """The first ``sink_tokens`` (attention sinks, StreamingLLM, arXiv 2309.17453), the last ``recent_tokens``, and
    always the open page at the end. Both count against the budget and round up to whole pages."""

    sink_tokens: int = 0
    recent_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("sink_tokens", "recent_tokens"):
            check_integer(f"keep.{name}", getattr(self, name), 0)

    def pages(self, page_tokens: int) -> int:
        """The most pages that are kept, the open one included."""
        return -(-self.sink_tokens // page_tokens) + self.recent_pages(page_tokens) + 1

    def recent_pages(self, page_tokens: int) -> int:
        """Full pages at the end that are kept, besides the open one."""
        return -(-self.recent_tokens // page_tokens)

    def mask(self, pages: PageView) -> Tensor:
        """bool [b, P]; a row past the sequence's pages is arbitrary."""
        page = torch.arange(pages.max_pages, device=pages.n_pages.device)
        recent = self.recent_pages(pages.page_tokens)
        sinks = page * pages.page_tokens < self.sink_tokens
        return sinks | (page >= (pages.n_pages - 1 - recent)[:, None])
