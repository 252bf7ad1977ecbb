"""Types of every configuration key. Hydra checks each value against them while it composes; see ``configs/``.

An experiment has its own subclass of ``Config``, so that a key which an experiment would ignore does not exist there.
Ranges are checked when a typed object is made, as far as that needs no heavy import; the engine and the samplers check
their own (``octavo.scripts.build.check``), still before a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from octavo.scripts.refusal import ConfigError, at_least, one_of

DTYPES = ("auto", "fp32", "fp16", "bf16")
TRACKING_MODES = ("offline", "online", "off")


@dataclass
class ModelSettings:
    """path: a local folder or a hub id. dtype: "auto" is the checkpoint's own, fp32 on a CPU without bf16 arithmetic.
    device: "auto" is CUDA where there is one, else "cpu", "cuda", "cuda:1", ..."""

    path: str = MISSING
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, DTYPES)


@dataclass
class EngineSettings:
    """The fields of ``octavo.core.EngineConfig``, which documents and checks them."""

    page_tokens: int = 16
    page_policies: dict[str, int] = field(default_factory=dict)
    pool_tokens: int | None = None
    memory_fraction: float = 0.9
    max_seqs: int = 256
    step_tokens: int = 8192
    max_model_tokens: int | None = None
    prefix_cache: bool = True
    allocator: str = "stack"
    eviction: str = "lru"
    host_tokens: int = 0
    kv_dtype: str = "auto"
    backend: str = "auto"
    execution: str = "auto"
    seed: int = 0


@dataclass
class SamplingSettings:
    """The fields of ``octavo.core.SamplingParams``, which documents and checks them."""

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass
class SparseSettings:
    """methods: names of ``configs/sparse/``, of a folder on ``hydra.searchpath``, or paths of YAML files.
    budget_tokens: what each of them may read of a sequence. overrides: by method, changes to its YAML."""

    methods: list[str] = field(default_factory=lambda: ["dense"])
    budget_tokens: int = 1024
    overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least("sparse.budget_tokens", self.budget_tokens, 1)
        if not self.methods:
            raise ConfigError("sparse.methods is empty; give at least one, for instance sparse.methods=[dense]")
        twice = sorted({name for name in self.methods if self.methods.count(name) > 1})
        if twice:
            raise ConfigError(f"sparse.methods lists {twice[0]!r} twice; each method runs once")
        strange = sorted(set(self.overrides) - set(self.methods))
        if strange:
            one_of("a key of sparse.overrides", strange[0], tuple(self.methods))


@dataclass
class TaskSettings:
    """name: "code_lines" or a benchmark of ``octavo.scripts.tasks.loaders``. path: its file; null is the item list that
    comes with octavo. max_prompt_tokens: null is what the model's window leaves."""

    name: str = "code_lines"
    path: str | None = None
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        if self.name != "code_lines" and self.path is None:
            raise ConfigError(f"task.path has no value; {self.name} is read from a file: task.path=FILE")
        at_least("task.max_prompt_tokens", self.max_prompt_tokens, 1)
        at_least("task.max_new_tokens", self.max_new_tokens, 1)


@dataclass
class TrackingSettings:
    """mode: "offline" writes W&B files and sends nothing, "online" sends the run and its items' text, "off" does
    without wandb. group: null is the experiment's name."""

    mode: str = "offline"
    project: str = "octavo"
    entity: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        one_of("tracking.mode", self.mode, TRACKING_MODES)


@dataclass
class Config:
    """What every experiment has.

    experiment: the function that runs. limit: work on the first so many items only. resume: go on in this run folder.
    seed: of resampling and of methods that draw; the engine has its own.
    """

    experiment: str = MISSING
    limit: int | None = None
    resume: str | None = None
    seed: int = 0
    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)

    def __post_init__(self) -> None:
        at_least("limit", self.limit, 1)
        at_least("seed", self.seed, 0)


@dataclass
class CodeCompletion(Config):
    """page_map: look at the pool after every step, and show it in the report."""

    task: TaskSettings = field(default_factory=TaskSettings)
    sparse: SparseSettings = field(default_factory=SparseSettings)
    page_map: bool = True


@dataclass
class Generate(Config):
    """prompts: what to complete. prompts_file: more of them, one a line. method: of ``configs/sparse/``.
    page_map: look at the pool after every step, and show it in the report."""

    prompts: list[str] = field(default_factory=list)
    prompts_file: str | None = None
    method: str = "dense"
    budget_tokens: int = 1024
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    page_map: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("budget_tokens", self.budget_tokens, 1)


WORKLOADS = ("uniform", "ragged")
RIVALS = ("transformers", "vllm", "vllm_cpu")


@dataclass
class Throughput(Config):
    """workloads: of ``octavo.scripts.workloads``. rivals: who else runs them. repeats: rounds in which all take turns.
    profile: write a trace too. page_map: one more pass of octavo, untimed and cut short, for the report's page map.
    vllm_memory_fraction: share of a GPU's memory that vLLM may take."""

    workloads: list[str] = field(default_factory=lambda: list(WORKLOADS))
    rivals: list[str] = field(default_factory=lambda: ["transformers"])
    repeats: int = 3
    profile: bool = False
    page_map: bool = True
    vllm_memory_fraction: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("repeats", self.repeats, 1)
        _each_once("workloads", self.workloads, WORKLOADS)
        _each_once("rivals", self.rivals, RIVALS)
        if not self.workloads:
            raise ConfigError("workloads is empty; give at least one, for instance workloads=[uniform]")


@dataclass
class Devices(Config):
    """devices: two of "device" or "device:kernels", as "cpu", "cuda", "cpu:reference"; empty: cpu and cuda, or without
    a CUDA device the CPU's kernels and the reference. near_tie_nats: a difference is a near tie if the two most likely
    tokens are closer than this on both devices."""

    task: TaskSettings = field(default_factory=TaskSettings)
    sparse: SparseSettings = field(default_factory=SparseSettings)
    devices: list[str] = field(default_factory=list)
    near_tie_nats: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.devices) not in (0, 2):
            raise ConfigError(f"devices={self.devices}: two are compared, for instance devices=[cpu,cuda]")
        at_least("near_tie_nats", self.near_tie_nats, 0)
        for key, value in (("model.device", self.model.device), ("engine.backend", self.engine.backend)):
            if value != "auto":
                raise ConfigError(
                    f"{key}={value}: this experiment takes both from devices, as in devices=[cpu,{value}]"
                )


@dataclass
class PageSize(Config):
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
            values = getattr(self, key)
            for value in values:
                at_least(key, value, 1)
                if values.count(value) > 1:
                    raise ConfigError(f"{key} lists {value} twice")
        if len(self.page_sizes) < 2:
            raise ConfigError(
                f"page_sizes={self.page_sizes}: what a page costs is a slope over at least two sizes; "
                "give more, for instance page_sizes=[16,64]"
            )
        given = [
            f"engine.{key}={getattr(self.engine, key)}"
            for key in ("page_tokens", "page_policies", "pool_tokens")
            if getattr(self.engine, key) != getattr(EngineSettings(), key)
        ]
        if given:
            raise ConfigError(f"{given[0]}: this experiment sets pages and pool itself, as in page_sizes=[16,32]")


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
        for size in self.chunk_mib:
            at_least("chunk_mib", size, 1)
            if size > self.pool_mib:
                raise ConfigError(f"chunk_mib={size}: a growth step larger than the pool, pool_mib={self.pool_mib}")
            if self.chunk_mib.count(size) > 1:
                raise ConfigError(f"chunk_mib lists {size} twice")


ALLOCATOR_NAMES = ("stack", "first_fit", "next_fit", "best_fit", "buddy", "linear")
MIX_NAMES = ("1", "1:1.5", "1:4")


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
        _each_once("allocators", self.allocators, ALLOCATOR_NAMES)
        _each_once("rivals", self.rivals, ("vllm",))
        _each_once("mixes", self.mixes, MIX_NAMES)
        if not self.allocators:
            raise ConfigError("allocators is empty; give at least one, for instance allocators=[stack]")
        for fill in self.fills:
            if not 1 <= fill <= 100:
                raise ConfigError(f"fills={fill}: must be a percentage from 1 to 100")
            if self.fills.count(fill) > 1:
                raise ConfigError(f"fills lists {fill} twice")
        for key in ("sequences", "steps", "repeats"):
            at_least(key, getattr(self, key), 1)
        if self.sequences > 2048:
            raise ConfigError(
                f"sequences={self.sequences}: at most 2048, as a pool of 65536 pages must hold 32 of each"
            )


def _each_once(key: str, names: list[str], known: tuple[str, ...]) -> None:
    for name in names:
        one_of(key, name, known)
        if names.count(name) > 1:
            raise ConfigError(f"{key} lists {name!r} twice")


# Down here, since they extend Config.
from octavo.scripts.schema_memory import Concurrency, Eviction, Fragmentation, LayerGroups  # noqa: E402

EXPERIMENTS: dict[str, type[Config]] = {
    "allocators": Allocators,
    "code_completion": CodeCompletion,
    "concurrency": Concurrency,
    "devices": Devices,
    "elastic": Elastic,
    "eviction": Eviction,
    "fragmentation": Fragmentation,
    "generate": Generate,
    "layer_groups": LayerGroups,
    "page_size": PageSize,
    "throughput": Throughput,
}
"""Experiment -> its keys. ``octavo.scripts.experiments.<name>.run(cfg, run)`` is its function."""


def register() -> None:
    """Make the types known to Hydra as the group ``schema``, which ``configs/config.yaml`` puts first."""
    store = ConfigStore.instance()
    for name, schema in EXPERIMENTS.items():
        node = OmegaConf.structured(schema)
        # Open, so that a command line needs no "+" to say sparse.overrides.quest.keep.sink_tokens=4.
        OmegaConf.set_struct(node.engine.page_policies, False)
        if "sparse" in node:
            OmegaConf.set_struct(node.sparse.overrides, False)
        store.store(group="schema", name=name, node=node, package="_global_")
