"""Type of the experiment on kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.scripts.refusal import ConfigError, at_least, each_once
from octavo.scripts.schema_groups import Config, EngineSettings

RIVAL_FAMILIES = ("flashinfer", "flex", "sdpa", "torch")
"""First words of the rivals' names, as in "sdpa flash"."""


@dataclass
class Kernels(Config):
    """only: kernels, by number or name, or modules of races; empty: all. rivals: who else runs, where it is installed.
    rounds: in which all contenders take turns. check_only: results alone, no times. tune: search for launch settings
    instead; only then names kernels of the settings table. tune_seconds: for a kernel and key."""

    only: list[str] = field(default_factory=list)
    rivals: list[str] = field(default_factory=lambda: list(RIVAL_FAMILIES))
    rounds: int = 5
    check_only: bool = False
    tune: bool = False
    tune_seconds: float = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once("only", self.only)
        each_once("rivals", self.rivals, RIVAL_FAMILIES)
        at_least("rounds", self.rounds, 1)
        if not self.tune_seconds > 0:  # NaN is not, either
            raise ConfigError(f"tune_seconds={self.tune_seconds}: must be more than 0")
        if self.tune and self.check_only:
            raise ConfigError("tune=true and check_only=true: a search needs times; leave one of them out")
        for key, default in vars(EngineSettings()).items():
            if getattr(self.engine, key) != default:
                raise ConfigError(f"engine.{key}={getattr(self.engine, key)}: no engine runs in this experiment")
