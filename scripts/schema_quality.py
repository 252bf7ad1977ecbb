"""Types of the experiments on the quality of sparse methods over long contexts, and of their calibration."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.scripts.refusal import ConfigError, at_least, each_at_least, each_once, one_of
from octavo.scripts.schema_groups import Config, SparseSettings, WithPageMap

RULER_TASKS = (
    "needle_single",
    "needle_multi_key",
    "needle_multi_value",
    "needle_multi_query",
    "variable_tracking",
    "frequent_words",
)
DOCUMENT_KINDS = ("code", "text")
CALIBRATED_METHODS = ("loki", "double_sparsity")


@dataclass
class Ruler(WithPageMap):
    """tasks: of ``octavo.scripts.tasks.ruler``. lengths: tokens of prompt and answer together. depths: where the asked
    needle lies, 0 to 1. repeats: puzzles a task, length and depth. budgets: each method runs once with each, in tokens;
    null is sparse.budget_tokens alone. question: "dense", it is computed like the text before it; "sparse", token by
    token under the method; or "unseen", once methods that drop tokens have dropped some. chat: use the tokenizer's chat
    template. max_new_tokens: of an answer."""

    tasks: list[str] = field(default_factory=lambda: list(RULER_TASKS))
    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096])
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    repeats: int = 2
    budgets: list[int] | None = None
    question: str = "dense"
    chat: bool = False
    max_new_tokens: int = 96
    sparse: SparseSettings = field(default_factory=SparseSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once("tasks", self.tasks, RULER_TASKS)
        for key in ("lengths", "depths", "budgets"):
            each_once(key, getattr(self, key) or ())
        for key in ("tasks", "lengths", "depths", "budgets"):
            if getattr(self, key) == []:
                raise ConfigError(f"{key} is empty; give at least one")
        each_at_least("lengths", self.lengths, 1)
        each_at_least("budgets", self.budgets or (), 1)
        at_least("repeats", self.repeats, 1)
        at_least("max_new_tokens", self.max_new_tokens, 1)
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ConfigError(f"depths={depth}: must be 0 (where the text begins) to 1 (where it ends)")
        if self.budgets is not None and self.sparse.match != "tokens":
            raise ConfigError(
                f"budgets={self.budgets} are in tokens, and sparse.match={self.sparse.match} is not; give one"
            )
        one_of("question", self.question, ("dense", "sparse", "unseen"))


@dataclass
class Perplexity(WithPageMap):
    """kinds: of documents, "code" and "text" (``octavo.scripts.tasks.documents``). documents: how many a kind.
    context_tokens: before what is scored. scored_tokens: one after another, under the method. windows: a document, each
    scored_tokens further on than the one before it."""

    kinds: list[str] = field(default_factory=lambda: list(DOCUMENT_KINDS))
    documents: int = 10
    context_tokens: int = 2048
    scored_tokens: int = 128
    windows: int = 1
    sparse: SparseSettings = field(default_factory=SparseSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once("kinds", self.kinds, DOCUMENT_KINDS)
        if not self.kinds:
            raise ConfigError(f"kinds is empty; give at least one of: {', '.join(DOCUMENT_KINDS)}")
        for key in ("documents", "context_tokens", "scored_tokens", "windows"):
            at_least(key, getattr(self, key), 1)


@dataclass
class MultiTurn(WithPageMap):
    """conversations: how many, each about a text of its own. length: tokens of the first prompt and its answer. turns:
    questions that a method answers; a dense one comes after them. chat: use the tokenizer's chat template.
    max_new_tokens: of an answer."""

    conversations: int = 10
    length: int = 2048
    turns: int = 3
    chat: bool = False
    max_new_tokens: int = 16
    sparse: SparseSettings = field(default_factory=SparseSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("conversations", "length", "turns", "max_new_tokens"):
            at_least(key, getattr(self, key), 1)
        if self.turns > 9:
            raise ConfigError(f"turns={self.turns}: must be at most 9; a text has names for 10 needles")


@dataclass
class Calibrate(Config):
    """method: whose file to make. rank: dimensions that it keeps of every key. tokens: of text to learn from, read
    text_tokens at a time. limit: texts."""

    method: str = "loki"
    rank: int = 16
    tokens: int = 4096
    text_tokens: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("method", self.method, CALIBRATED_METHODS)
        for key in ("rank", "tokens", "text_tokens"):
            at_least(key, getattr(self, key), 1)
