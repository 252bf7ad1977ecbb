"""Types of the experiments on where a method's pages lie."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.scripts.refusal import ConfigError, at_least, each_at_least, each_once
from octavo.scripts.schema_groups import Config, EngineSettings, ShapedModelSettings, SparseSettings

REPLACEMENT_NAMES = ("lru", "lfu", "decayed", "clock", "fifo")
PREFETCH_NAMES = ("none", "previous_step", "previous_layer", "next_query")
INTO_SLACK = ("previous_step", "previous_layer")
PLACEMENT_NAMES = ("resident", "host")


@dataclass
class _Placed(Config):
    """slack_tokens: of frames beyond the budget. kinds: of documents, whose ends are the prompts. requests: at once.
    context_tokens: of a prompt. new_tokens: of an answer. sparse: the one method, which chooses by digests."""

    sparse: SparseSettings = field(default_factory=lambda: SparseSettings(["quest"], budget_tokens=512))
    slack_tokens: int = 256
    kinds: list[str] = field(default_factory=lambda: ["code", "text"])
    requests: int = 4
    context_tokens: int = 2048
    new_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sparse.methods) != 1 or self.sparse.methods == ["dense"]:
            raise ConfigError(
                f"sparse.methods={self.sparse.methods}: this experiment places the pages of one method, as in "
                "sparse.methods=[quest]"
            )
        for key in ("requests", "context_tokens"):
            at_least(key, getattr(self, key), 1)
        at_least("new_tokens", self.new_tokens, 3)
        at_least("slack_tokens", self.slack_tokens, 0)
        each_once("kinds", self.kinds, ("code", "text"))
        if not self.kinds:
            raise ConfigError("kinds is empty; give at least one, for instance kinds=[code]")
        if not self.engine.prefix_cache:
            raise ConfigError("engine.prefix_cache=false: pages in host memory are found by their keys; leave it out")
        for key in ("pool_tokens", "host_tokens", "max_model_tokens", "page_policies", "max_seqs"):
            if getattr(self.engine, key) != getattr(EngineSettings(), key):
                raise ConfigError(f"engine.{key}={getattr(self.engine, key)}: this experiment sets it itself")


@dataclass
class HostTier(_Placed):
    """page_sizes: of text pages. replacements: of ``octavo.sparse.replacement.policies``. prefetches: of
    ``octavo.sparse.host_placement``."""

    page_sizes: list[int] = field(default_factory=lambda: [16, 32])
    replacements: list[str] = field(default_factory=lambda: list(REPLACEMENT_NAMES))
    prefetches: list[str] = field(default_factory=lambda: list(PREFETCH_NAMES))

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once("replacements", self.replacements, REPLACEMENT_NAMES)
        each_once("prefetches", self.prefetches, PREFETCH_NAMES)
        each_once("page_sizes", self.page_sizes)
        each_at_least("page_sizes", self.page_sizes, 1)
        for key in ("page_sizes", "replacements", "prefetches"):
            if not getattr(self, key):
                raise ConfigError(f"{key} is empty; give at least one, as in {key}=[{getattr(HostTier(), key)[0]}]")
        if self.engine.page_tokens != EngineSettings().page_tokens:
            raise ConfigError(f"engine.page_tokens={self.engine.page_tokens}: this experiment tries page_sizes=[16,32]")
        for prefetch in self.prefetches:
            if prefetch in INTO_SLACK and not self.slack_tokens:
                raise ConfigError(f"prefetches={prefetch}: fetches into the slack, and slack_tokens=0 leaves none")


@dataclass
class Placements(_Placed):
    """placements: which to compare. replacement, prefetch: of the host placement. pool_requests: the pool has room for
    so many requests whose pages all stay in it, and a part of one; every request is there from the start. A model of
    random weights (model=random) gets random tokens, for sizes and times alone."""

    model: ShapedModelSettings = field(default_factory=ShapedModelSettings)
    placements: list[str] = field(default_factory=lambda: list(PLACEMENT_NAMES))
    replacement: str = "lru"
    prefetch: str = "none"
    pool_requests: float = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once("placements", self.placements, PLACEMENT_NAMES)
        each_once("replacement", [self.replacement], REPLACEMENT_NAMES)
        each_once("prefetch", [self.prefetch], PREFETCH_NAMES)
        at_least("pool_requests", self.pool_requests, 1)
        if not self.placements:
            raise ConfigError("placements is empty; give at least one, as in placements=[resident]")
        if self.prefetch in INTO_SLACK and not self.slack_tokens:
            raise ConfigError(f"prefetch={self.prefetch}: fetches into the slack, and slack_tokens=0 leaves none")
