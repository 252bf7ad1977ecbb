"""Types of the experiment that sets what octavo keeps beside what kvpress keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from octavo.scripts.refusal import ConfigError, at_least, each_at_least, each_once, explain
from octavo.scripts.schema_groups import WithPageMap
from octavo.scripts.schema_quality import DOCUMENT_KINDS


@dataclass
class Step:
    """One difference between the two that is taken away, on top of those before it.

    title: what is then the same. method: changes to octavo's method, by part, as in sparse.overrides. press: another
    class of kvpress, which has the arguments of this step alone. arguments: of the press. counts: kvpress keeps as many
    tokens in each layer as octavo does."""

    title: str = MISSING
    method: dict[str, Any] = field(default_factory=dict)
    press: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    counts: bool = False


@dataclass
class Pair:
    """The same idea twice. method: of ``configs/sparse/``, one that drops tokens. press: a class of kvpress. arguments:
    of the press, besides its ratio, which follows from the budget."""

    method: str = MISSING
    press: str = MISSING
    arguments: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


@dataclass
class KeptTokens(WithPageMap):
    """kvpress_python: the Python of an environment that has kvpress. pairs: what is compared, by name, each with the
    keys of ``Pair``; only: of them; empty is all. kinds, and documents of each: as for ``perplexity``. contexts: tokens
    of a prompt. budget_tokens: that each layer and KV head keeps, on average."""

    kvpress_python: str | None = None
    pairs: dict[str, Any] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=lambda: list(DOCUMENT_KINDS))
    documents: int = 2
    contexts: list[int] = field(default_factory=lambda: [1000, 1024])
    budget_tokens: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pairs:
            raise ConfigError("pairs is empty; the experiment's own YAML file has some")
        each_once("only", self.only, tuple(self.pairs))
        each_once("kinds", self.kinds, DOCUMENT_KINDS)
        each_once("contexts", self.contexts)
        each_at_least("contexts", self.contexts, 2)
        for key in ("kinds", "contexts"):
            if not getattr(self, key):
                raise ConfigError(f"{key} is empty; give at least one")
        for key in ("documents", "budget_tokens"):
            at_least(key, getattr(self, key), 1)
        for name in self.pairs:
            self.pair(name)

    def pair(self, name: str) -> Pair:
        """One of ``pairs``, with its types.

        Raises:
            ConfigError: it has a key that is none of ``Pair``, lacks one, or names a step twice.
        """
        try:
            typed = OmegaConf.merge(OmegaConf.structured(Pair), self.pairs[name])
        except OmegaConfBaseException as error:
            raise ConfigError(f"pairs.{name}: {explain(error, Pair, {})}") from error
        missing = sorted(OmegaConf.missing_keys(typed))
        if missing:
            raise ConfigError(f"pairs.{name}.{missing[0]} has no value")
        pair = cast(Pair, OmegaConf.to_object(typed))
        each_once(f"pairs.{name}.steps", [step.title for step in pair.steps])
        return pair
