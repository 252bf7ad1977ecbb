"""Type of the experiment on decode steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.scripts.refusal import ConfigError, at_least, each_at_least, each_once
from octavo.scripts.schema_groups import Config, ShapedModelSettings, SparseSettings

EXECUTIONS = ("eager", "graph", "compiled")
STEP_RIVALS = ("transformers", "vllm")


@dataclass
class DecodeStep(Config):
    """shapes: [sequences, tokens of each before the first step that is timed]; empty: the customary five on CUDA, two
    small ones elsewhere. new_tokens: steps that a time is the mean of; null: 128 on CUDA, 16 elsewhere. rounds: times
    of each shape, whose median counts. executions: of octavo's engine; empty: all, elsewhere than on CUDA without
    "compiled", which wants a C++ compiler there. rivals: who else runs. mixed: serve the batch ``mixed`` too.
    vllm_memory_fraction: share of a GPU's memory that vLLM may take."""

    model: ShapedModelSettings = field(default_factory=ShapedModelSettings)
    shapes: list[list[int]] = field(default_factory=list)
    new_tokens: int | None = None
    rounds: int = 3
    executions: list[str] = field(default_factory=list)
    rivals: list[str] = field(default_factory=lambda: ["vllm"])
    mixed: bool = True
    vllm_memory_fraction: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        for shape in self.shapes:
            if len(shape) != 2 or min(shape) < 1:
                raise ConfigError(
                    f"shapes={shape}: give pairs of sequences and tokens, as in shapes=[[1,1024],[32,8192]]"
                )
        each_once("shapes", [f"{batch}x{context}" for batch, context in self.shapes])
        at_least("new_tokens", self.new_tokens, 1)
        at_least("rounds", self.rounds, 1)
        each_once("executions", self.executions, EXECUTIONS)
        each_once("rivals", self.rivals, STEP_RIVALS)
        if not 0 < self.vllm_memory_fraction <= 1:
            raise ConfigError(f"vllm_memory_fraction={self.vllm_memory_fraction}: must be above 0 and at most 1")
        if self.engine.execution != "auto":
            raise ConfigError(
                f"engine.execution={self.engine.execution}: this experiment takes it from executions, as in "
                f"executions=[{self.engine.execution}]"
            )


@dataclass
class BreakEven(Config):
    """contexts: tokens of each sequence before the first timed step. batches: sequences. Empty is the device's own.
    new_tokens: steps that a time is the mean of; null: 64 on CUDA, 8 elsewhere. rounds: times of each, whose median
    counts. gain: speed-up whose beginning is looked for. limit: shapes."""

    model: ShapedModelSettings = field(default_factory=ShapedModelSettings)
    contexts: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    new_tokens: int | None = None
    rounds: int = 3
    gain: float = 1.3
    sparse: SparseSettings = field(default_factory=SparseSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("contexts", "batches"):
            each_once(key, getattr(self, key))
            each_at_least(key, getattr(self, key), 1)
        at_least("new_tokens", self.new_tokens, 1)
        at_least("rounds", self.rounds, 1)
        if not self.gain > 1:  # NaN is not
            raise ConfigError(f"gain={self.gain}: must be above 1, as in gain=1.3 for 30 % more")
