"""The groups of settings that experiments share, and the base of every experiment's own type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from octavo.scripts.model_shapes import SHAPES
from octavo.scripts.refusal import ConfigError, at_least, each_at_least, each_once, one_of

DTYPES = ("auto", "fp32", "fp16", "bf16")
MATCHED_BY = {"tokens": (), "pages": ("budget_pages",), "bytes": ("budget_bytes", "match_context")}
"""What budgets may be the same in, and the keys of ``sparse`` that say how much of it."""
PROJECT_LINES = "project_lines"
LINE_CLASSES = ("in_project", "in_file")
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
class ShapedModelSettings(ModelSettings):
    """shape: random weights in a named shape, in bf16 on CUDA and in what a CPU computes with unless ``dtype`` says
    otherwise; null with ``path`` null: llama-8b on CUDA, smollm2-135m elsewhere."""

    path: str | None = None  # type: ignore[assignment]
    shape: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape is None:
            return
        one_of("model.shape", self.shape, tuple(SHAPES))
        if self.path is not None:
            raise ConfigError(
                f"model.path={self.path} and model.shape={self.shape} both say which model; give one, or model=random "
                f"model.shape={self.shape}"
            )


@dataclass
class EngineSettings:
    """The fields of ``octavo.core.EngineConfig``, which documents and checks them.

    A page policy and ``eviction`` go by name, or by name and parameters: ``{policy: lru_k, k: 3}``; a page policy may
    be a number too. ``octavo.scripts.build.policy`` builds them.
    """

    page_tokens: int = 16
    page_policies: dict[str, Any] = field(default_factory=dict)
    pool_tokens: int | None = None
    memory_fraction: float = 0.9
    base_share: float = 1.0
    growth_tokens: int | None = None
    max_seqs: int = 256
    step_tokens: int = 8192
    encode_tokens: int | None = None
    max_model_tokens: int | None = None
    prefix_cache: bool = True
    layer_groups: bool = True
    shared_decode: bool = True
    shared_decode_bytes: int = 8388608
    allocator: str = "stack"
    eviction: Any = "lru"
    host_tokens: int = 0
    kv_dtype: str = "auto"
    backend: str = "auto"
    execution: str = "auto"
    join_linears: bool = True
    host_threads: int = 2
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
    """methods: names of ``configs/sparse/``, of a folder on ``hydra.searchpath``, or paths of YAML files. match: what
    is the same for all of them: "tokens", budget_tokens of a sequence that each may read; "pages", budget_pages; or
    "bytes", at most budget_bytes that a decoded token reads of K, V and to choose, dense layers included, where
    match_context tokens are in the cache. overrides: by method, changes to its YAML. probe_every: in experiments on
    quality, measure what a choice of pages leaves out at the first and every so many-th decode step of a request
    (``octavo.sparse.probe``); 0 is never."""

    methods: list[str] = field(default_factory=lambda: ["dense"])
    match: str = "tokens"
    budget_tokens: int = 1024
    budget_pages: int | None = None
    budget_bytes: int | None = None
    match_context: int | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    probe_every: int = 8

    def __post_init__(self) -> None:
        at_least("sparse.budget_tokens", self.budget_tokens, 1)
        at_least("sparse.probe_every", self.probe_every, 0)
        one_of("sparse.match", self.match, tuple(MATCHED_BY))
        for way, keys in MATCHED_BY.items():
            for key in keys:
                value = getattr(self, key)
                at_least(f"sparse.{key}", value, 1)
                if way == self.match and value is None:
                    raise ConfigError(
                        f"sparse.{key} has no value; sparse.match={self.match} wants {' and '.join(keys)}"
                    )
                if way != self.match and value is not None:
                    raise ConfigError(
                        f"sparse.{key}={value} says nothing with sparse.match={self.match}; it is for "
                        f"sparse.match={way}"
                    )
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
    comes with octavo. max_prompt_tokens: null is what the model's window leaves. lengths, classes, items: of
    "project_lines" (``octavo.scripts.tasks.project_lines``): tokens of prompt and answer together, where the name that
    a line uses is defined, and how many items of each class and length; other tasks have none."""

    name: str = "code_lines"
    path: str | None = None
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 32
    lengths: list[int] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    items: int | None = None

    def __post_init__(self) -> None:
        if self.name == PROJECT_LINES:
            for key in ("lengths", "classes", "items"):
                if not getattr(self, key):
                    raise ConfigError(f"task.{key}={getattr(self, key)}: {PROJECT_LINES} needs at least one")
            each_once("task.lengths", self.lengths)
            each_at_least("task.lengths", self.lengths, 1)
            each_once("task.classes", self.classes, LINE_CLASSES)
        elif self.lengths or self.classes or self.items is not None:
            raise ConfigError(f"task.lengths, task.classes and task.items are those of task={PROJECT_LINES} alone")
        elif self.name != "code_lines" and self.path is None:
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
class WithPageMap(Config):
    """What every experiment that runs an engine has.

    page_map: show in the report what each unit of the pool is used for, over time. Looking takes time, so a pass whose
    time is measured is never looked at; where there are such passes, a map comes from one more.
    """

    page_map: bool = True
