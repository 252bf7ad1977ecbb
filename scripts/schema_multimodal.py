"""Types of the experiments on prompts of text and images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.scripts.refusal import ConfigError, at_least, each_at_least, each_once, one_of
from octavo.scripts.schema_groups import EngineSettings, ModelSettings, WithPageMap

DEMO_EXAMS = (
    "describe", "colour", "shape", "place", "count", "digit", "exists", "relation", "compare", "same",
    "in image k of 4", "multihop of 4", "needle_digit of 8", "needle_object of 8",
)  # fmt: skip
IMAGE_BENCHMARKS = ("scenes", "needle", "multihop", "pairs", "unanswerable", "captions")
IMAGE_FORMATS = ("mm_niah", "nlvr2", "muirbench", "coco")
UNCACHED = "uncached"
LLAVA_TOKENS = 576
ROWS = "rows"


@dataclass
class VisionModelSettings(ModelSettings):
    """path: a folder of ``train_demo``, or a LLaVA checkpoint in Hugging Face's layout; null is the demo model that
    comes with octavo. dtype: "auto" is fp32 on a CPU, bf16 or the checkpoint's own elsewhere."""

    path: str | None = None  # type: ignore[assignment]


@dataclass
class Interleaved(WithPageMap):
    """exams: tasks whose accuracy is measured, of ``octavo.multimodal.demo_data.EXAMS``, each on the right images, on
    blank ones and on those of another question. questions: of each; also about photographs, and images that are asked
    about twice. model: it must be a folder of ``train_demo``."""

    model: VisionModelSettings = field(default_factory=VisionModelSettings)
    exams: list[str] = field(default_factory=lambda: list(DEMO_EXAMS))
    questions: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once("exams", self.exams)
        at_least("questions", self.questions, 1)


@dataclass
class ImageBenchmarks(WithPageMap):
    """benchmarks: of ``octavo.scripts.tasks.image_benchmarks``, made from ``seed``; items: of each. Or, instead of
    them, a public one from files: format, path of its records, images the folder of its images. features: by name,
    settings of the engine under test, each compared with the engine without a prefix cache. modes: ways of
    reusing images, names of ``configs/reuse/``, of ``reuse/`` in a folder on ``hydra.searchpath``, or paths of YAML
    files, compared with it, too; images were seen behind another text then. contexts: ``context_tokens`` of those that
    are not exact, one after the other; none is what their files say. max_new_tokens: of an answer. encoder_cache_mib:
    embeddings of images that are kept, for all engines together."""

    model: VisionModelSettings = field(default_factory=VisionModelSettings)
    benchmarks: list[str] = field(default_factory=lambda: list(IMAGE_BENCHMARKS))
    items: int = 24
    format: str | None = None
    path: str | None = None
    images: str | None = None
    features: dict[str, Any] = field(default_factory=dict)
    modes: list[str] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    max_new_tokens: int = 72
    encoder_cache_mib: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("modes", "contexts"):
            each_once(key, getattr(self, key))
        each_at_least("contexts", self.contexts, 0)
        at_least("encoder_cache_mib", self.encoder_cache_mib, 0)
        each_once("benchmarks", self.benchmarks, IMAGE_BENCHMARKS)
        at_least("items", self.items, 1)
        at_least("max_new_tokens", self.max_new_tokens, 1)
        given = [key for key in ("format", "path", "images") if getattr(self, key) is not None]
        if given and len(given) < 3:
            raise ConfigError(f"{given[0]} is given alone; a benchmark from files needs format, path and images")
        if self.format is not None:
            one_of("format", self.format, IMAGE_FORMATS)
        elif not self.benchmarks:
            raise ConfigError("benchmarks is empty; give at least one, or format, path and images")
        if not (self.features or self.modes) or UNCACHED in self.features:
            raise ConfigError(
                f"features={[*self.features]} modes={[*self.modes]}: give at least one, and none is called {UNCACHED}"
            )
        if self.modes and not self.engine.prefix_cache:
            raise ConfigError("engine.prefix_cache=false: images are reused through the prefix cache; leave it out")
        known = [part.name for part in fields(EngineSettings)]
        for name, changes in self.features.items():
            if not isinstance(changes, Mapping):
                raise ConfigError(
                    f"features.{name}={changes}: give settings of the engine, as in {{prefix_cache: true}}"
                )
            for key in changes:
                one_of(f"a key of features.{name}", str(key), known)


@dataclass
class PageRatio(WithPageMap):
    """images: sizes to try, in tokens of an image; 576 is LLaVA's 24 x 24, on a small model with random weights, and
    any other must be that of ``model``. policies: of image pages, a ratio to the text page, or "rows", one page a row
    of patches; "1" is what others are compared with. requests: prompts; a second question about the images of each
    comes after it. images_a_prompt: all different. new_tokens: of an answer. repeats: rounds in which all policies take
    turns, one with a limit."""

    model: VisionModelSettings = field(default_factory=VisionModelSettings)
    images: list[int] = field(default_factory=lambda: [144, LLAVA_TOKENS])
    policies: list[str] = field(default_factory=lambda: ["0.5", "0.75", "1", "1.5", "2", "3", "4", ROWS])
    requests: int = 8
    images_a_prompt: int = 4
    new_tokens: int = 8
    repeats: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("requests", "new_tokens", "repeats"):
            at_least(key, getattr(self, key), 1)
        if not 2 <= self.images_a_prompt <= 8:
            raise ConfigError(
                f"images_a_prompt={self.images_a_prompt}: must be 2 to 8, as questions about several have"
            )
        for key in ("images", "policies"):
            each_once(key, getattr(self, key))
            if not getattr(self, key):
                raise ConfigError(f"{key} is empty; give at least one")
        each_at_least("images", self.images, 1)
        if "1" not in self.policies:
            raise ConfigError(f"policies={self.policies}: others are compared with ratio 1; add 1")
        for policy in self.policies:
            if policy != ROWS:
                _ratio(policy, self.engine)
        for key in ("page_policies", "pool_tokens", "prefix_cache"):
            given = getattr(self.engine, key)
            if given != getattr(EngineSettings(), key):
                raise ConfigError(f"engine.{key}={given}: this experiment sets it itself, as in policies=[1,1.5]")


@dataclass
class Sessions(WithPageMap):
    """conversations: how many, each with images and questions of its own. turns: of a session, an image and a question
    each. forks: that branch off the last turn, each with one more question. new_tokens: of an answer at most. model: it
    must be a folder of ``train_demo``."""

    model: VisionModelSettings = field(default_factory=VisionModelSettings)
    conversations: int = 4
    turns: int = 6
    forks: int = 8
    new_tokens: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("conversations", "turns", "forks"):
            at_least(key, getattr(self, key), 1)
        at_least("new_tokens", self.new_tokens, 2)
        if not self.engine.prefix_cache:
            raise ConfigError("engine.prefix_cache=false: this experiment compares sessions with what the cache finds")


def _ratio(policy: str, engine: EngineSettings) -> None:
    """Raises ConfigError unless a policy is a ratio that gives a page of whole tokens."""
    try:
        tokens = float(policy) * engine.page_tokens
    except ValueError:
        raise ConfigError(f"policies={policy}: neither a ratio, as 1.5, nor {ROWS}") from None
    if not 1 <= tokens < 1 << 20 or tokens != int(tokens):
        raise ConfigError(
            f"policies={policy}: {policy} times a text page of engine.page_tokens={engine.page_tokens} is "
            f"{tokens:g} tokens; give a ratio that makes a whole number of them"
        )
