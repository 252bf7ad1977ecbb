"""Types of the experiments that set methods, budgets and runs side by side."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from octavo.scripts.refusal import ConfigError, at_least, each_once, one_of
from octavo.scripts.schema_groups import MATCHED_BY, Config, SparseSettings, TaskSettings, WithPageMap
from octavo.scripts.schema_quality import RULER_TASKS, Ruler

MOST_RUNS = 26
BENCHMARKS = ("code_completion", "ruler")


@dataclass
class Compare(Config):
    """runs: folders of runs, of which the first is what the others are compared with. limit: items of each task."""

    runs: list[str] = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= len(self.runs) <= MOST_RUNS:
            raise ConfigError(f"runs={self.runs}: give 2 to {MOST_RUNS}, as in: octavo compare FOLDER FOLDER")


@dataclass
class Pareto(Ruler):
    """benchmark: whose items are asked; "ruler" with the keys of that experiment, "code_completion" with ``task``.
    levels: shares of the bytes that dense attention reads for a token; each method runs once with each."""

    benchmark: str = "code_completion"
    levels: list[float] = field(default_factory=lambda: [0.125, 0.25, 0.5])
    task: TaskSettings = field(default_factory=TaskSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("benchmark", self.benchmark, BENCHMARKS)
        each_once("levels", self.levels)
        if not self.levels:
            raise ConfigError("levels is empty; give at least one")
        for level in self.levels:
            if not 0 < level <= 1:
                raise ConfigError(
                    f"levels={level}: must be a share of the bytes of dense attention, above 0 and at most 1"
                )
        if self.budgets is not None or self.sparse.match != "tokens":
            raise ConfigError("levels say what each method may read: leave budgets and sparse.match alone")
        if self.question != "dense":
            raise ConfigError(
                f"question={self.question}: bytes are those of decoded answers here; experiment=protocols "
                "has other questions"
            )


@dataclass
class Protocols(WithPageMap):
    """questions: how the question is computed, of those of ``Ruler``. dense_layers: lists of layers that read
    everything, each tried besides the composition's own. matches: what budgets are equal in, of those of
    ``sparse.match``. turns: answers of a session, 1 is none; conversations: how many sessions. tasks, depths, repeats,
    chat, max_new_tokens: as in ``Ruler``. length: tokens of a prompt and its answer. limit: puzzles, and sessions."""

    questions: list[str] = field(default_factory=lambda: ["dense", "sparse"])
    dense_layers: list[list[int]] = field(default_factory=lambda: [[]])
    matches: list[str] = field(default_factory=lambda: list(MATCHED_BY))
    turns: int = 3
    conversations: int = 6
    tasks: list[str] = field(default_factory=lambda: list(RULER_TASKS[:2]))
    length: int = 2048
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    repeats: int = 2
    chat: bool = False
    max_new_tokens: int = 32
    sparse: SparseSettings = field(default_factory=SparseSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once("questions", self.questions)
        for question in self.questions:  # each is checked as that experiment checks it
            self.as_ruler(question)
        each_once("dense_layers", self.dense_layers)
        each_once("matches", self.matches, tuple(MATCHED_BY))
        for key in ("turns", "conversations"):
            at_least(key, getattr(self, key), 1)
        if self.turns > 9:
            raise ConfigError(f"turns={self.turns}: must be at most 9; a text has names for 10 needles")
        if self.sparse.match != "tokens":
            raise ConfigError(f"sparse.match={self.sparse.match}: this experiment takes it from matches")

    def as_ruler(self, question: str = "dense") -> Ruler:
        """The puzzles as settings of their own experiment."""
        return Ruler(
            experiment="ruler",
            seed=self.seed,
            tasks=self.tasks,
            lengths=[self.length],
            depths=self.depths,
            repeats=self.repeats,
            question=question,
            chat=self.chat,
            max_new_tokens=self.max_new_tokens,
        )
