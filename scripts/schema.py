"""Types of every configuration key. Hydra checks each value against them while it composes; see ``configs/``.

Groups that several experiments have are in ``schema_groups``, the experiments on memory in ``schema_memory``, those on
speed in ``schema_serving``, those on placements in ``schema_placements``, those on quality in ``schema_quality`` and
``schema_lossless``, the one beside kvpress in ``schema_kept``, those on text and images in ``schema_multimodal``,
``schema_image_sharing`` and ``schema_visual_importance``, those on decode steps and on kernels in ``schema_decode`` and
``schema_kernels``.

An experiment has its own subclass of ``Config``, so that a key which an experiment would ignore does not exist there.
Ranges are checked when a typed object is made, as far as that needs no heavy import; the engine and the samplers check
their own (``octavo.scripts.build.check``), still before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from octavo.scripts.refusal import ConfigError, at_least
from octavo.scripts.schema_comparisons import Compare, Pareto, Protocols
from octavo.scripts.schema_decode import BreakEven, DecodeStep
from octavo.scripts.schema_groups import (
    Config,
    EngineSettings,
    ModelSettings,
    SamplingSettings,
    SparseSettings,
    TaskSettings,
    TrackingSettings,
    WithPageMap,
)
from octavo.scripts.schema_image_sharing import ImageSharing
from octavo.scripts.schema_kept import KeptTokens
from octavo.scripts.schema_kernels import Kernels
from octavo.scripts.schema_lossless import Lossless
from octavo.scripts.schema_memory import (
    Allocators,
    Concurrency,
    Elastic,
    Eviction,
    Fragmentation,
    Heads,
    Knobs,
    LayerGroups,
    PageSize,
    Sharing,
)
from octavo.scripts.schema_multimodal import ImageBenchmarks, Interleaved, PageRatio, Sessions
from octavo.scripts.schema_placements import HostTier, Placements
from octavo.scripts.schema_quality import Calibrate, MultiTurn, Perplexity, Ruler
from octavo.scripts.schema_serving import Latency, Throughput
from octavo.scripts.schema_visual_importance import VisualImportance

__all__ = [
    "EXPERIMENTS",
    "Allocators",
    "BreakEven",
    "Calibrate",
    "CodeCompletion",
    "Compare",
    "Config",
    "DecodeStep",
    "Devices",
    "Elastic",
    "EngineSettings",
    "Generate",
    "Heads",
    "HostTier",
    "ImageBenchmarks",
    "ImageSharing",
    "Interleaved",
    "KeptTokens",
    "Kernels",
    "Knobs",
    "Latency",
    "Lossless",
    "ModelSettings",
    "MultiTurn",
    "PageRatio",
    "PageSize",
    "Pareto",
    "Perplexity",
    "Placements",
    "Protocols",
    "Ruler",
    "SamplingSettings",
    "Sessions",
    "Sharing",
    "SparseSettings",
    "Structure",
    "TaskSettings",
    "Throughput",
    "TrackingSettings",
    "VisualImportance",
    "WithPageMap",
    "register",
]


@dataclass
class CodeCompletion(WithPageMap):
    """budget_share: of each prompt, above 0 and at most 1, in place of sparse.budget_tokens."""

    budget_share: float | None = None
    task: TaskSettings = field(default_factory=TaskSettings)
    sparse: SparseSettings = field(default_factory=SparseSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget_share is not None and not 0 < self.budget_share <= 1:
            raise ConfigError(f"budget_share={self.budget_share}: must be above 0 and at most 1")


@dataclass
class Structure(CodeCompletion):
    """weight, share: of ``octavo.sparse.prior.Favoured``. Every method of sparse.methods runs twice, the second time
    with the prior."""

    weight: float = 1.0
    share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if "dense" in self.sparse.methods:
            raise ConfigError("sparse.methods lists dense, which chooses nothing; it runs besides in any case")
        if not 0 < self.weight < inf:
            raise ConfigError(f"weight={self.weight}: must be above 0, and finite")
        if not 0 < self.share <= 1:
            raise ConfigError(f"share={self.share}: must be above 0 and at most 1")


@dataclass
class Generate(WithPageMap):
    """prompts: what to complete. prompts_file: more of them, one a line. method: of ``configs/sparse/``."""

    prompts: list[str] = field(default_factory=list)
    prompts_file: str | None = None
    method: str = "dense"
    budget_tokens: int = 1024
    sampling: SamplingSettings = field(default_factory=SamplingSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("budget_tokens", self.budget_tokens, 1)


@dataclass
class Devices(WithPageMap):
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


EXPERIMENTS: dict[str, type[Config]] = {
    "allocators": Allocators,
    "break_even": BreakEven,
    "calibrate": Calibrate,
    "code_completion": CodeCompletion,
    "compare": Compare,
    "concurrency": Concurrency,
    "decode_step": DecodeStep,
    "devices": Devices,
    "elastic": Elastic,
    "eviction": Eviction,
    "fragmentation": Fragmentation,
    "generate": Generate,
    "heads": Heads,
    "image_benchmarks": ImageBenchmarks,
    "image_sharing": ImageSharing,
    "interleaved": Interleaved,
    "host_tier": HostTier,
    "kept_tokens": KeptTokens,
    "kernels": Kernels,
    "knobs": Knobs,
    "latency": Latency,
    "layer_groups": LayerGroups,
    "lossless": Lossless,
    "multi_turn": MultiTurn,
    "page_ratio": PageRatio,
    "page_size": PageSize,
    "pareto": Pareto,
    "perplexity": Perplexity,
    "protocols": Protocols,
    "placements": Placements,
    "ruler": Ruler,
    "sessions": Sessions,
    "sharing": Sharing,
    "structure": Structure,
    "throughput": Throughput,
    "visual_importance": VisualImportance,
}
"""Experiment -> its keys. ``octavo.scripts.experiments.<name>.run(cfg, run)`` is its function."""


def register(arguments: Sequence[str] = ()) -> None:
    """Make the types known to Hydra as the group ``schema``, which ``configs/config.yaml`` puts first.

    Args:
        arguments: of the command line. For its help Hydra copies all types once for each group that it lists, so there
            only that of the main job is known, unless another experiment is asked for.
    """
    store = ConfigStore.instance()
    helps = {"--help", "-h"} & set(arguments) and not any(given.startswith("experiment=") for given in arguments)
    for name, schema in EXPERIMENTS.items():
        if helps and name != "code_completion":
            continue
        node = OmegaConf.structured(schema)
        # Open, so that a command line needs no "+" to say sparse.overrides.quest.keep.sink_tokens=4.
        OmegaConf.set_struct(node.engine.page_policies, False)
        for opened in ("features", "pairs"):
            if opened in node:
                OmegaConf.set_struct(node[opened], False)
        if "sparse" in node:
            OmegaConf.set_struct(node.sparse.overrides, False)
        store.store(group="schema", name=name, node=node, package="_global_")
