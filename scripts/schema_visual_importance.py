"""Types of the experiment on what the tokens of images are worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.scripts.refusal import ConfigError, at_least, each_once, one_of
from octavo.scripts.schema_groups import WithPageMap
from octavo.scripts.schema_multimodal import VisionModelSettings

VISUAL_METHODS = (
    "cls_attention", "fastv", "pyramid_drop", "sparse_vlm", "vl_cache", "visual_knorm", "visual_random", "look_m",
)  # fmt: skip
QUESTIONS = ("describe", "colour", "shape", "place", "count", "digit", "exists")
RECALL = "recall"
PLACEMENTS = ("drop", "host", RECALL)


@dataclass
class VisualSettings:
    """methods: of ``configs/sparse/``, or paths of YAML files, whose ``_target_`` is
    ``octavo.sparse.visual_eviction.VisualEviction``; dense runs besides. overrides: by method, changes to its YAML."""

    methods: list[str] = field(default_factory=lambda: list(VISUAL_METHODS))
    overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        each_once("sparse.methods", self.methods)
        if not self.methods or "dense" in self.methods:
            raise ConfigError(
                f"sparse.methods={self.methods}: give at least one that rates images; dense runs in any case"
            )
        for name, changes in self.overrides.items():
            one_of("a key of sparse.overrides", name, tuple(self.methods))
            if not isinstance(changes, Mapping):
                raise ConfigError(f"sparse.overrides.{name}={changes}: give changes by part, as in {{per: prompt}}")
            budget = changes.get("budget", {})
            if {"placement", "recall"} & changes.keys() or not isinstance(budget, Mapping) or "share" in budget:
                raise ConfigError(
                    f"sparse.overrides.{name}={changes}: placement, recall and budget.share are set by this "
                    "experiment, as in placements=[drop] shares=[0.5]"
                )


@dataclass
class VisualImportance(WithPageMap):
    """shares: of each image's tokens that a method keeps, above 0 and at most 1. placements: what becomes of the
    others: "drop"; "host", where the next turn finds them; "recall", where the same answer does, too, in whole pages.
    recall_share: of the images' pages, how many may come back for a head at once. tasks: of the first question, in
    turn; of ``QUESTIONS``. images: of an item, 2 to 8. items: how many, each with two questions about different images.
    max_new_tokens: of an answer. model: it must be a folder of ``train_demo``."""

    model: VisionModelSettings = field(default_factory=VisionModelSettings)
    sparse: VisualSettings = field(default_factory=VisualSettings)
    shares: list[float] = field(default_factory=lambda: [0.1, 0.25, 0.5])
    placements: list[str] = field(default_factory=lambda: list(PLACEMENTS))
    recall_share: float = 0.25
    tasks: list[str] = field(default_factory=lambda: list(QUESTIONS[:6]))
    images: int = 4
    items: int = 6
    max_new_tokens: int = 72

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, allowed in (("placements", PLACEMENTS), ("tasks", QUESTIONS), ("shares", None)):
            each_once(key, getattr(self, key), allowed)
            if not getattr(self, key):
                raise ConfigError(f"{key} is empty; give at least one")
        for share in self.shares:
            if not 0 < share <= 1:
                raise ConfigError(f"shares={self.shares}: {share} must be above 0 and at most 1, where 1 keeps all")
        if not 0 < self.recall_share <= 1:
            raise ConfigError(f"recall_share={self.recall_share}: must be above 0 and at most 1")
        at_least("items", self.items, 1)
        at_least("max_new_tokens", self.max_new_tokens, 1)
        if not 2 <= self.images <= 8:
            raise ConfigError(f"images={self.images}: must be 2 to 8, so that two questions are about different ones")
        if {*self.placements} - {"drop"} and not self.engine.host_tokens:
            raise ConfigError(
                f"engine.host_tokens=0: placements={self.placements} need a host tier; set it, or placements=[drop]"
            )
        if not self.engine.prefix_cache:
            raise ConfigError("engine.prefix_cache=false: pages in the host tier are found by their keys; leave it out")
