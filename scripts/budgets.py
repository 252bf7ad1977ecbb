"""Budgets that are the same in pages or in bytes: each method's own number of tokens, found from its closed form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from octavo.scripts import build
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema_groups import SparseSettings

if TYPE_CHECKING:
    from octavo.core import Engine
    from octavo.core.interfaces import SparseMethod

Methods = Mapping[str, "SparseMethod | None"]


def matched(methods: Methods, engine: Engine, settings: SparseSettings) -> dict[str, SparseMethod | None]:
    """The methods of a run with budgets as ``settings.match`` says, fit for the engine.

    Raises:
        ConfigError: a method that cannot serve the model, that has no budget to set, or that cannot read so little.
    """
    page, context = engine.config.text_page_tokens, settings.match_context or 1
    found = dict(methods)

    def read(method: SparseMethod) -> int:
        return step_bytes(engine, method, context)

    for name, method in methods.items():
        if method is None or settings.match == "tokens":
            continue
        if settings.match == "pages":
            found[name] = with_tokens(name, method, cast(int, settings.budget_pages) * page)
            continue
        found[name] = within(name, method, engine, cast(int, settings.budget_bytes), read, context)
    build.fit(found, engine)
    return found


def with_tokens(name: str, method: SparseMethod, tokens: int) -> SparseMethod:
    """The same composition with another budget.

    Raises:
        ConfigError: it has no budget in tokens, or one that refuses these.
    """
    budget = getattr(method, "budget", None)
    if not dataclasses.is_dataclass(method) or not hasattr(budget, "tokens"):
        raise ConfigError(f"method {name}: it has no budget.tokens, so its budget cannot be matched with others'")
    try:
        changed: Any = dataclasses.replace(cast(Any, budget), tokens=tokens)
        return cast("SparseMethod", dataclasses.replace(cast(Any, method), budget=changed))
    except ValueError as error:
        raise ConfigError(f"method {name}: {error}") from error


def within(
    name: str,
    method: SparseMethod,
    engine: Engine,
    most_bytes: float,
    nbytes: Callable[[SparseMethod], int],
    tokens: int,
) -> SparseMethod:
    """The method with the largest budget, in whole pages, at which ``nbytes`` of it are at most ``most_bytes``.

    A budget of all ``tokens`` of a sequence comes first, since nothing is read to choose there. Below it bytes go up
    with the budget (where layers have budgets of their own, one may be read whole before the others, and a slightly
    larger budget might do).

    Raises:
        ConfigError: even the smallest budget that holds the kept pages reads more; says how much that is.
    """
    page = engine.config.text_page_tokens
    fewest: int | None = None

    def made(pages: int) -> SparseMethod | None:
        """With a budget of so many pages, or None if it is too small for what is kept."""
        try:
            changed = with_tokens(name, method, pages * page)
            changed.validate(engine.spec, page)
        except ValueError:
            return None
        return changed

    def fits(pages: int) -> bool:
        nonlocal fewest
        changed = made(pages)
        if changed is None:
            return False
        fewest = nbytes(changed) if fewest is None else min(fewest, nbytes(changed))
        return nbytes(changed) <= most_bytes

    with_tokens(name, method, tokens)  # a method without a budget is refused as such
    whole = -(-tokens // page)
    least = next((pages for pages in range(1, whole + 1) if made(pages) is not None), None)
    if least is None:
        build.fit({name: method}, engine)
        raise ConfigError(f"method {name}: it keeps more than the {tokens} tokens that there are; keep less")
    if fits(whole):
        return cast("SparseMethod", made(whole))
    if not fits(least):
        raise ConfigError(
            f"method {name}: {most_bytes:,.0f} bytes are too few: with the pages that it keeps, its dense layers and "
            f"what it reads to choose it reads at least {fewest:,} of {tokens} tokens; give more bytes, or keep less"
        )
    low, high = least, whole
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return cast("SparseMethod", made(low))


def step_bytes(engine: Engine, method: SparseMethod | None, tokens: int) -> int:
    """Bytes that one decode step with so many tokens in the cache reads, K and V and to choose, in closed form."""
    cost = build.predicted_cost(engine, method, tokens - 1, 2)
    return cost.kv_bytes + cost.digest_bytes
