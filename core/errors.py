"""What users can get wrong, as exceptions that name the offending value, the limit and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.core.outputs import Completion


class CapacityError(ValueError):
    """A request that the pool or the model's context can never hold."""


class UnsupportedModelError(ValueError):
    """A model whose attention cannot be served by octavo's pages."""


class BatchError(ValueError):
    """Some prompts of a batch were refused; the others were finished.

    Attributes:
        completions: one entry a prompt, None where that prompt was refused.
        errors: index of the prompt -> its exception.
    """

    def __init__(self, completions: list[Completion | None], errors: dict[int, Exception]) -> None:
        lines = [f"prompt {index}: {error}" for index, error in sorted(errors.items())]
        super().__init__(
            f"{len(errors)} of {len(completions)} prompts were refused, the rest are in .completions; "
            + "; ".join(lines)
        )
        self.completions = completions
        self.errors = errors


def closest(name: str, known: list[str]) -> str:
    """The end of an 'unknown name' message: the nearest known name, then all of them."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(known)}"
