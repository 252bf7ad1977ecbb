"""Placements: where pages are when they are not read."""

from dataclasses import dataclass

from torch import Tensor

from octavo.core.interfaces import PageView, Selection


@dataclass(frozen=True)
class Resident:
    """Every page stays in the pool; what is saved is the reading."""

    def resolve(self, selection: Selection, pages: PageView) -> tuple[Tensor, Tensor]:
        return pages.gather(selection)
