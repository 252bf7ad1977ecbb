"""Types of the experiments on memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.scripts.refusal import ConfigError, at_least, each_at_least, each_once, one_of
from octavo.scripts.schema_groups import Config, EngineSettings, SparseSettings, WithPageMap

ALLOCATOR_NAMES = ("stack", "first_fit", "next_fit", "best_fit", "buddy", "linear")
MIX_NAMES = ("1", "1:1.5", "1:4")
KNOB_NAMES = ("page_tokens", "max_seqs", "pool_percent", "max_model_percent", "step_tokens")


@dataclass
class Allocators(Config):
    """allocators: of ``octavo.core.policies.allocators``. rivals: who else serves pages of one size. mixes: page sizes
    in one pool, of ``octavo.scripts.allocator_traffic``. fills: percent of the pool that is held at the peak.
    sequences: how many grow at a time. steps: of one token each. repeats: rounds in which all take turns."""

    allocators: list[str] = field(default_factory=lambda: list(ALLOCATOR_NAMES))
    rivals: list[str] = field(default_factory=lambda: ["vllm"])
    mixes: list[str] = field(default_factory=lambda: list(MIX_NAMES))
    fills: list[int] = field(default_factory=lambda: [50, 70, 80, 90, 95, 98])
    sequences: int = 1000
    steps: int = 2048
    repeats: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once("allocators", self.allocators, ALLOCATOR_NAMES)
        each_once("rivals", self.rivals, ("vllm",))
        each_once("mixes", self.mixes, MIX_NAMES)
        each_once("fills", self.fills)
        if not self.allocators:
            raise ConfigError("allocators is empty; give at least one, for instance allocators=[stack]")
        for fill in self.fills:
            if not 1 <= fill <= 100:
                raise ConfigError(f"fills={fill}: must be a percentage from 1 to 100")
        for key in ("sequences", "steps", "repeats"):
            at_least(key, getattr(self, key), 1)
        if self.sequences > 2048:
            raise ConfigError(
                f"sequences={self.sequences}: at most 2048, as a pool of 65536 pages must hold 32 of each"
            )


@dataclass
class Elastic(Config):
    """pool_mib: the pool at its largest. chunk_mib: growth steps to compare. base_share: of the pool, there from the
    start. repeats: rounds in which all pools take turns."""

    pool_mib: int = 1024
    chunk_mib: list[int] = field(default_factory=lambda: [16, 64, 256])
    base_share: float = 0.6
    repeats: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("pool_mib", self.pool_mib, 1)
        at_least("repeats", self.repeats, 1)
        if not 0.0 < self.base_share <= 1.0:
            raise ConfigError(f"base_share={self.base_share}: must be more than 0 and at most 1")
        if not self.chunk_mib:
            raise ConfigError("chunk_mib is empty; give at least one growth step, for instance chunk_mib=[64]")
        each_at_least("chunk_mib", self.chunk_mib, 1)
        each_once("chunk_mib", self.chunk_mib)
        for size in self.chunk_mib:
            if size > self.pool_mib:
                raise ConfigError(f"chunk_mib={size}: a growth step larger than the pool, pool_mib={self.pool_mib}")


@dataclass
class PageSize(WithPageMap):
    """page_sizes: text pages to sweep. largest_page: no rule's page is larger. requests: how many of the workload to
    serve at once. repeats: rounds in which all sizes take turns, one with a limit. Offline: text_tokens is the mean
    length of texts, images are tokens of an image, sequences is the number of prompts of each kind."""

    page_sizes: list[int] = field(default_factory=lambda: [8, 16, 24, 32, 48, 64, 128])
    largest_page: int = 256
    requests: int = 12
    repeats: int = 3
    text_tokens: int = 400
    images: list[int] = field(default_factory=lambda: [64, 144, 576])
    sequences: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("requests", "repeats", "text_tokens", "sequences"):
            at_least(key, getattr(self, key), 1)
        at_least("largest_page", self.largest_page, 8)
        for key in ("page_sizes", "images"):
            each_at_least(key, getattr(self, key), 1)
            each_once(key, getattr(self, key))
        if len(self.page_sizes) < 2:
            raise ConfigError(
                f"page_sizes={self.page_sizes}: what a page costs is a slope over at least two sizes; "
                "give more, for instance page_sizes=[16,64]"
            )
        _not_to_be_set(
            self.engine,
            ("page_tokens", "page_policies", "pool_tokens"),
            "this experiment sets pages and pool itself, as in page_sizes=[16,32]",
        )


@dataclass
class Sharing(WithPageMap):
    """samples: of one prompt, drawn with temperature 1 and top_p. prompt_tokens, new_tokens: its length, and that of
    every sample; a tiny model with random weights serves all of these. model_samples, model_prompt_tokens,
    model_new_tokens: the same for ``model``. surface_tokens: the longest prompt of the plotted closed form."""

    samples: list[int] = field(default_factory=lambda: [1, 2, 5, 10, 20, 50, 100])
    prompt_tokens: list[int] = field(default_factory=lambda: [512, 1000, 2048, 4100, 8192, 16384, 32768])
    new_tokens: list[int] = field(default_factory=lambda: [16, 64, 256])
    model_samples: list[int] = field(default_factory=lambda: [1, 10, 100])
    model_prompt_tokens: list[int] = field(default_factory=lambda: [512, 1000])
    model_new_tokens: list[int] = field(default_factory=lambda: [16, 64])
    top_p: float = 0.9
    surface_tokens: int = 262144

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("samples", "prompt_tokens", "new_tokens"):
            for name in (key, f"model_{key}"):
                each_at_least(name, getattr(self, name), 1)
                each_once(name, getattr(self, name))
            if not getattr(self, key):
                raise ConfigError(f"{key} is empty; give at least one, for instance {key}=[16]")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p}: must be more than 0 and at most 1")
        at_least("surface_tokens", self.surface_tokens, max(self.prompt_tokens))
        for key in ("max_seqs", "step_tokens"):
            most, limit = max([*self.samples, *self.model_samples]), getattr(self.engine, key)
            if most > limit:
                raise ConfigError(f"samples={most}: more than decode in one step, engine.{key}={limit}; raise it")
        _not_to_be_set(self.engine, ("pool_tokens", "max_model_tokens"), "this experiment sets it itself")


@dataclass
class Knobs(WithPageMap):
    """page_tokens, max_seqs, step_tokens: values of these keys of ``engine``, each tried while everything else stays as
    it is. max_model_percent: the same for ``engine.max_model_tokens``, in percent of the model's positions.
    pool_percent: the same for the pool, in percent of the slots that all requests take at once; default_pool_percent
    while others are tried. requests: of the workload. repeats: rounds in which all settings take turns, one with a
    limit."""

    page_tokens: list[int] = field(default_factory=lambda: [32, 64])
    max_seqs: list[int] = field(default_factory=lambda: [4, 8])
    pool_percent: list[int] = field(default_factory=lambda: [50, 85, 95])
    max_model_percent: list[int] = field(default_factory=lambda: [25])
    step_tokens: list[int] = field(default_factory=lambda: [256, 1024])
    default_pool_percent: int = 90
    requests: int = 16
    repeats: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in KNOB_NAMES:
            each_at_least(key, getattr(self, key), 1)
            each_once(key, getattr(self, key))
        for percent in self.max_model_percent:
            if percent > 100:
                raise ConfigError(f"max_model_percent={percent}: must be at most 100")
        for key in ("default_pool_percent", "requests", "repeats"):
            at_least(key, getattr(self, key), 1)
        _not_to_be_set(self.engine, ("pool_tokens",), "this experiment sets it itself, as in pool_percent=[50,90]")
        _not_to_be_set(self.engine, ("page_policies",), "this experiment tries page_tokens=[16,32]")


def _not_to_be_set(engine: EngineSettings, keys: Sequence[str], why: str) -> None:
    """Refuse settings of the engine that an experiment makes itself."""
    for key in keys:
        if getattr(engine, key) != getattr(EngineSettings(), key):
            raise ConfigError(f"engine.{key}={getattr(engine, key)}: {why}")


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
class LayerGroups(WithPageMap):
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
        for key in ("pool_tokens", "prefix_cache", "layer_groups"):
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


@dataclass
class Heads(WithPageMap):
    """requests: prompts of prompt_tokens tokens of code, all there from the start, with new_tokens tokens of output
    each. pool_requests: requests of a dense cache that the pool holds. Methods share sparse.budget_tokens, on average
    over layers and heads."""

    requests: int = 24
    prompt_tokens: int = 1024
    new_tokens: int = 64
    pool_requests: int = 4
    sparse: SparseSettings = field(default_factory=SparseSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("requests", "prompt_tokens", "new_tokens", "pool_requests"):
            at_least(key, getattr(self, key), 1)
        if self.engine.pool_tokens is not None:
            raise ConfigError("engine.pool_tokens: the pool is set by pool_requests; leave it null")
