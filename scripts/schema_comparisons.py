"""Types of the experiments that set methods, budgets and runs side by side."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema_groups import Config

MOST_RUNS = 26


@dataclass
class Compare(Config):
    """runs: folders of runs, of which the first is what the others are compared with. limit: items of each task."""

    runs: list[str] = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= len(self.runs) <= MOST_RUNS:
            raise ConfigError(f"runs={self.runs}: give 2 to {MOST_RUNS}, as in: octavo compare FOLDER FOLDER")
