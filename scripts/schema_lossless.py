"""Type of the experiment on drafts that are verified."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.scripts.refusal import ConfigError, at_least, each_at_least, each_once
from octavo.scripts.schema_groups import ShapedModelSettings, SparseSettings, WithPageMap
from octavo.scripts.schema_quality import DOCUMENT_KINDS


@dataclass
class Lossless(WithPageMap):
    """sparse.methods: who drafts, each with each of ``drafts`` tokens at a time. new_tokens: of a continuation.

    A real model goes on in documents: kinds, and documents of each, as for ``perplexity``; contexts: tokens of a
    document before it goes on. A model of random weights (model=random) is timed: shapes, [sequences, context] of each;
    forced: the probabilities with which a draft is taken as right; rounds: in which all take turns."""

    model: ShapedModelSettings = field(default_factory=ShapedModelSettings)
    drafts: list[int] = field(default_factory=lambda: [4])
    new_tokens: int = 64
    kinds: list[str] = field(default_factory=lambda: list(DOCUMENT_KINDS))
    documents: int = 5
    contexts: list[int] = field(default_factory=lambda: [1024, 4096])
    shapes: list[list[int]] = field(default_factory=list)
    forced: list[float] = field(default_factory=lambda: [0.6, 0.8, 0.9, 0.95])
    rounds: int = 3
    sparse: SparseSettings = field(default_factory=SparseSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once("kinds", self.kinds, DOCUMENT_KINDS)
        for key in ("drafts", "contexts"):
            each_once(key, getattr(self, key))
            each_at_least(key, getattr(self, key), 1)
        for key in ("kinds", "drafts", "contexts", "forced"):
            if not getattr(self, key):
                raise ConfigError(f"{key} is empty; give at least one")
        for key in ("documents", "rounds"):
            at_least(key, getattr(self, key), 1)
        at_least("new_tokens", self.new_tokens, 8)
        for shape in self.shapes:
            if len(shape) != 2 or min(shape) < 1:
                raise ConfigError(f"shapes={shape}: each is [sequences, context], as in shapes=[[12,65536]]")
        for forced in self.forced:
            if not 0 <= forced <= 1:
                raise ConfigError(f"forced={forced}: must be a probability, 0 to 1")
        if not [name for name in self.sparse.methods if name != "dense"]:
            raise ConfigError(f"sparse.methods={self.sparse.methods}: nobody drafts; give a method besides dense")
