"""Models that see, from settings: octavo's demo model, or a LLaVA checkpoint in Hugging Face's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.scripts.paths import absolute
from octavo.scripts.refusal import ConfigError

if TYPE_CHECKING:
    from octavo.multimodal import ImageEncoder
    from octavo.scripts.schema_multimodal import VisionModelSettings

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class VisionModel(NamedTuple):
    """What ``Engine(model, tokenizer, config, encoders={"image": encoder})`` takes. ``demo``: it speaks the language of
    the scenes, in the demo model's form; others are asked as their chat template says."""

    model: Any
    tokenizer: Any
    encoder: ImageEncoder
    demo: bool


def load_vision_model(settings: VisionModelSettings) -> VisionModel:
    """The model of ``settings.path``, on its device; the demo model that comes with octavo where that is None.

    Raises:
        ConfigError: no such model is there, its weights do not fit, or open_clip is not installed.
    """
    import torch
    from transformers.utils import logging

    from octavo.multimodal.demo_model import FOLDER, load_demo
    from octavo.multimodal.llava import load_llava

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # progress is ours
    folder = FOLDER if settings.path is None else absolute(settings.path)
    dtype = None if settings.dtype == "auto" else getattr(torch, DTYPES[settings.dtype])
    try:
        if _model_type(folder).startswith("llava"):
            return VisionModel(*load_llava(folder, dtype=dtype or "auto", device=settings.device), demo=False)
        return VisionModel(*load_demo(folder, dtype=dtype, device=settings.device), demo=True)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"model.path={folder}: {error}") from error


def _model_type(folder: Path) -> str:
    """What a checkpoint's config says that it is; "" if it says nothing."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return ""
    return str(found.get("model_type", "")) if isinstance(found, dict) else ""
