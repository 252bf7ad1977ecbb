"""Types of the experiments on speed: a batch that is there at once, and requests that come at a rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from octavo.scripts.refusal import ConfigError, at_least, each_once, one_of
from octavo.scripts.schema_groups import ShapedModelSettings, SparseSettings, WithPageMap

WORKLOADS = ("uniform", "ragged", "mixed", "long")
BATCH_RIVALS = ("transformers", "generate_batch", "vllm", "vllm_cpu")
ARRIVAL_RIVALS = ("generate_batch", "vllm", "vllm_cpu")
OFFLINE = "offline"


@dataclass
class WithRivals(WithPageMap):
    """rivals: who else serves the requests. vllm_memory_fraction: share of a GPU's memory that vLLM may take. profile:
    write a trace of a few steps too, from a pass of its own."""

    rivals: list[str] = field(default_factory=list)
    vllm_memory_fraction: float = 0.4
    profile: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.vllm_memory_fraction <= 1:
            raise ConfigError(f"vllm_memory_fraction={self.vllm_memory_fraction}: must be above 0 and at most 1")


@dataclass
class Throughput(WithRivals):
    """workloads: of ``octavo.scripts.workloads``. repeats: rounds in which all take turns. text: serve each workload as
    texts too, from tokenising to detokenising, with threads beside the steps and without."""

    workloads: list[str] = field(default_factory=lambda: ["uniform", "ragged"])
    rivals: list[str] = field(default_factory=lambda: ["transformers"])
    repeats: int = 3
    text: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("repeats", self.repeats, 1)
        each_once("workloads", self.workloads, WORKLOADS)
        each_once("rivals", self.rivals, BATCH_RIVALS)
        if not self.workloads:
            raise ConfigError("workloads is empty; give at least one, for instance workloads=[uniform]")


@dataclass
class Latency(WithRivals):
    """rates: requests a second, or "offline" for all at once. workload: of ``octavo.scripts.workloads``; requests: how
    many of its kind, null for as many as it has; a model of random weights gets random tokens. ttft_limit_s,
    itl_limit_s: what a good request keeps, its first token after the arrival and the mean between its tokens.
    long_prompt_tokens: of one more request, in the middle."""

    model: ShapedModelSettings = field(default_factory=ShapedModelSettings)
    rates: list[Any] = field(default_factory=lambda: [1, 2, 4, OFFLINE])
    workload: str = "ragged"
    requests: int | None = None
    ttft_limit_s: float = 2.0
    itl_limit_s: float = 0.1
    long_prompt_tokens: int | None = None
    sparse: SparseSettings = field(default_factory=SparseSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("workload", self.workload, WORKLOADS)
        each_once("rivals", self.rivals, ARRIVAL_RIVALS)
        each_once("rates", self.rates)
        if not self.rates:
            raise ConfigError("rates is empty; give at least one, for instance rates=[2,offline]")
        for rate in self.rates:
            number = isinstance(rate, int | float) and not isinstance(rate, bool)
            if rate != OFFLINE and not (number and 0 < rate < math.inf):
                raise ConfigError(f"rates={rate}: must be requests a second, above 0, or {OFFLINE} (all at once)")
        at_least("requests", self.requests, 1)
        at_least("long_prompt_tokens", self.long_prompt_tokens, 1)
        for key in ("ttft_limit_s", "itl_limit_s"):
            if not getattr(self, key) > 0:  # NaN is not
                raise ConfigError(f"{key}={getattr(self, key)}: must be above 0")
