"""Every tensor accounted for, or an error that names what is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Shape = tuple[int, ...]

NAMED = 6
"""Tensors that a message names of each kind: one wrong number in a config concerns hundreds."""


def require_tensors(what: str, found: Mapping[str, Shape], wanted: Mapping[str, Shape | None]) -> None:
    """Refuse tensors that are not, by name and shape (None is any), the ``wanted`` ones.

    Raises:
        ValueError: it names what is missing, what is unexpected, and what has another shape, with both shapes.
    """
    shared = [(name, shape, wanted[name]) for name, shape in found.items() if name in wanted]
    other = [(name, shape, due) for name, shape, due in shared if due is not None and shape != due]
    refuse_tensors(what, missing=wanted.keys() - found.keys(), unexpected=found.keys() - wanted.keys(), other=other)


def refuse_tensors(
    what: str, *, missing: Iterable[str], unexpected: Iterable[str], other: Iterable[tuple[str, Shape, Shape]]
) -> None:
    """Raise the ValueError of ``require_tensors``, if there is anything to say. ``other``: name, the shape that was
    found, and the one that was due."""
    shaped = [f"{name} is {_shape(is_)} and must be {_shape(due)}" for name, is_, due in other]
    kinds = {"missing": list(missing), "unexpected": list(unexpected), "of another shape": shaped}
    parts = [f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds.items() if names]
    if parts:
        raise ValueError(f"the tensors of {what} are not those of its config: {'; '.join(parts)}")


def _some(names: list[str]) -> str:
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(sorted(names)[:NAMED]) + more


def _shape(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "a number"
