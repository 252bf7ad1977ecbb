"""Images beside text: what a prompt may hold, who it is, and how it becomes tokens.

Names are looked up when they are asked for, so that importing this package starts neither torch nor Pillow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.multimodal.anyres_encoder import AnyresEncoder
    from octavo.multimodal.cached_encoder import CachedEncoder
    from octavo.multimodal.encode_worker import EncodeWorker
    from octavo.multimodal.encoder_cache import EncoderCache
    from octavo.multimodal.errors import (
        ImageDecodeError,
        ImageError,
        ImageFormatError,
        ImageLimitError,
        ImageSourceError,
    )
    from octavo.multimodal.fingerprints import weights_fingerprint
    from octavo.multimodal.fitting import fit
    from octavo.multimodal.identity import image_id, same_image, second_digest
    from octavo.multimodal.image_encoder import ImageEncoder
    from octavo.multimodal.image_policy import ImagePolicy
    from octavo.multimodal.image_prompts import chat_prompt, image_prompt
    from octavo.multimodal.images import RgbImage, load_image
    from octavo.multimodal.llava import Llava, load_llava, save_llava
    from octavo.multimodal.open_clip_encoder import OpenClipEncoder
    from octavo.multimodal.projector import LinearConfig, MlpConfig, PixelShuffleConfig

_HOMES = {
    "AnyresEncoder": "anyres_encoder",
    "CachedEncoder": "cached_encoder",
    "EncodeWorker": "encode_worker",
    "EncoderCache": "encoder_cache",
    "ImageDecodeError": "errors",
    "ImageEncoder": "image_encoder",
    "ImageError": "errors",
    "ImageFormatError": "errors",
    "ImageLimitError": "errors",
    "ImagePolicy": "image_policy",
    "ImageSourceError": "errors",
    "LinearConfig": "projector",
    "Llava": "llava",
    "MlpConfig": "projector",
    "OpenClipEncoder": "open_clip_encoder",
    "PixelShuffleConfig": "projector",
    "RgbImage": "images",
    "chat_prompt": "image_prompts",
    "fit": "fitting",
    "image_id": "identity",
    "image_prompt": "image_prompts",
    "load_image": "images",
    "load_llava": "llava",
    "same_image": "identity",
    "save_llava": "llava",
    "second_digest": "identity",
    "weights_fingerprint": "fingerprints",
}

__all__ = [
    "AnyresEncoder",
    "CachedEncoder",
    "EncodeWorker",
    "EncoderCache",
    "ImageDecodeError",
    "ImageEncoder",
    "ImageError",
    "ImageFormatError",
    "ImageLimitError",
    "ImagePolicy",
    "ImageSourceError",
    "LinearConfig",
    "Llava",
    "MlpConfig",
    "OpenClipEncoder",
    "PixelShuffleConfig",
    "RgbImage",
    "chat_prompt",
    "fit",
    "image_id",
    "image_prompt",
    "load_image",
    "load_llava",
    "same_image",
    "save_llava",
    "second_digest",
    "weights_fingerprint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
