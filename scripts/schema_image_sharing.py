"""Type of the experiment on images that serve several requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.scripts.refusal import ConfigError, at_least, each_once
from octavo.scripts.schema_decode import ShapedModelSettings
from octavo.scripts.schema_groups import WithPageMap

EXACT = "prefix"
MODES = (EXACT, "encoder_only", "zero_copy", "shift", "repair", "legolink", "mpic", "vlcache", "blend")


@dataclass
class ImageSharing(WithPageMap):
    """modes: names of ``configs/reuse/``, of ``reuse/`` in a folder on ``hydra.searchpath``, or paths of YAML files;
    "prefix", what the others are compared with, always comes first. images: of a prompt. image_tokens: of each.
    text_tokens: in front of the images, and between two of them. question_tokens: behind them. new_tokens: of which the
    distributions are compared. requests: that hold the images at once, each at positions of its own. rounds: of new
    images each; times are medians over them."""

    model: ShapedModelSettings = field(default_factory=ShapedModelSettings)
    modes: list[str] = field(default_factory=lambda: list(MODES))
    images: int = 8
    image_tokens: int = 576
    text_tokens: int = 24
    question_tokens: int = 32
    new_tokens: int = 8
    requests: int = 4
    rounds: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once("modes", self.modes)
        for key in ("images", "image_tokens", "text_tokens", "question_tokens", "new_tokens", "rounds"):
            at_least(key, getattr(self, key), 1)
        at_least("requests", self.requests, 2)
        if self.requests > self.engine.max_seqs:
            raise ConfigError(
                f"requests={self.requests}: more than run at once, engine.max_seqs={self.engine.max_seqs}; raise it"
            )
        if not self.engine.prefix_cache:
            raise ConfigError("engine.prefix_cache=false: images are reused through the prefix cache; leave it out")

    @property
    def all_modes(self) -> list[str]:
        """The exact mode and the others, each once."""
        return [EXACT, *(mode for mode in self.modes if mode != EXACT)]
