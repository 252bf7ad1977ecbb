"""Keys of the experiments on memory. Import them from ``octavo.scripts.schema``, whose ``Config`` they extend."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.scripts.refusal import ConfigError, at_least, one_of
from octavo.scripts.schema import Config, EngineSettings

TRACES = ("main_job", "chat", "poisson", "bursty")
EVICTIONS = ("lru", "lru_k", "fifo", "lfu", "priority", "cost", "belady")
MIXES = ("chat", "documents", "mixed")


@dataclass
class Eviction(Config):
    """traces: the shipped ones, or made-up traffic. evictions: policies to compare. cache_percent: room for idle pages,
    in % of what would keep all of them, on top of what must be held at once. requests: of made-up traffic."""

    traces: list[str] = field(default_factory=lambda: list(TRACES))
    evictions: list[str] = field(default_factory=lambda: list(EVICTIONS))
    cache_percent: list[int] = field(default_factory=lambda: [0, 5, 10, 20, 40, 100])
    requests: int = 300

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("requests", self.requests, 1)
        for key, known in (("traces", TRACES), ("evictions", EVICTIONS)):
            for name in getattr(self, key):
                one_of(key, name, known)
        for share in self.cache_percent:
            if not 0 <= share <= 100:
                raise ConfigError(f"cache_percent={share}: must be between 0 and 100")
        _lists(self, "traces", "evictions", "cache_percent")
        _replayed(self, "page_tokens", "allocator")


@dataclass
class Fragmentation(Config):
    """page_sizes: of text pages. mixes: lengths of prompts and answers. longest: tokens that the longest request may
    have, which a server without pages reserves for each. memory_tokens: slots that the largest batch must fit in.
    requests: of the traffic."""

    page_sizes: list[int] = field(default_factory=lambda: [8, 16, 32, 64, 128])
    mixes: list[str] = field(default_factory=lambda: list(MIXES))
    longest: int = 2048
    memory_tokens: int = 65536
    requests: int = 400

    def __post_init__(self) -> None:
        super().__post_init__()
        _mixes(self)
        at_least("memory_tokens", self.memory_tokens, self.longest)
        for size in self.page_sizes:
            at_least("page_sizes", size, 1)
        _lists(self, "page_sizes", "mixes")
        _replayed(self, "allocator")


@dataclass
class Concurrency(Config):
    """memory_tokens: slots of the memories to compare. mixes: lengths of prompts and answers. longest: tokens that the
    longest request may have. requests: all there from the start; engine.max_seqs of them run at once, at most."""

    memory_tokens: list[int] = field(default_factory=lambda: [16384, 32768, 65536])
    mixes: list[str] = field(default_factory=lambda: list(MIXES))
    longest: int = 2048
    requests: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        _mixes(self)
        for tokens in self.memory_tokens:
            at_least("memory_tokens", tokens, self.longest)
        _lists(self, "memory_tokens", "mixes")
        _replayed(self, "page_tokens", "allocator", "max_seqs")


@dataclass
class LayerGroups(Config):
    """contexts: tokens of a request, prompt and output together; one engine each way for each of them. new_tokens: of
    that, the output."""

    contexts: list[int] = field(default_factory=lambda: [1024, 4096, 8192, 16384, 32768])
    new_tokens: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("new_tokens", self.new_tokens, 2)  # a fork comes between two of them
        if not self.contexts:
            raise ConfigError("contexts is empty; give at least one, for instance contexts=[4096]")
        for context in self.contexts:
            if context <= 2 * self.new_tokens:
                raise ConfigError(f"contexts={context}: must be more than twice new_tokens={self.new_tokens}")
            if self.contexts.count(context) > 1:
                raise ConfigError(f"contexts lists {context} twice")
        for key in ("pool_tokens", "prefix_cache"):
            if getattr(self.engine, key) != getattr(EngineSettings(), key):
                raise ConfigError(
                    f"engine.{key}={getattr(self.engine, key)}: this experiment sizes its pools, and needs the prefix "
                    "cache, itself; leave it out"
                )


def _mixes(config: Fragmentation | Concurrency) -> None:
    at_least("longest", config.longest, 64)
    at_least("requests", config.requests, 2)
    for name in config.mixes:
        one_of("mixes", name, MIXES)


def _lists(config: Config, *keys: str) -> None:
    """Lists that must not be empty, nor name anything twice."""
    for key in keys:
        values = getattr(config, key)
        if not values:
            raise ConfigError(f"{key} is empty; give at least one, as in {key}=[{getattr(type(config)(), key)[0]}]")
        for value in values:
            if values.count(value) > 1:
                raise ConfigError(f"{key} lists {value} twice")


def _replayed(config: Config, *used: str) -> None:
    """Refuses keys of the engine that an experiment without an engine would ignore."""
    for key, default in vars(EngineSettings()).items():
        given = getattr(config.engine, key)
        if key not in used and given != default:
            raise ConfigError(
                f"engine.{key}={given}: no engine runs in this experiment; of its keys it takes {', '.join(used)}"
            )
