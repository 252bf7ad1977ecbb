"""Images beside text: what a prompt may hold, who it is, and how it becomes tokens.

Names are looked up when they are asked for, so that importing this package starts neither torch nor Pillow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from octavo.multimodal.images import RgbImage, load_image
    from octavo.multimodal.open_clip_encoder import OpenClipEncoder
    from octavo.multimodal.projector import LinearConfig, MlpConfig, PixelShuffleConfig

_HOMES = {
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
    "MlpConfig": "projector",
    "OpenClipEncoder": "open_clip_encoder",
    "PixelShuffleConfig": "projector",
    "RgbImage": "images",
    "fit": "fitting",
    "image_id": "identity",
    "load_image": "images",
    "same_image": "identity",
    "second_digest": "identity",
    "weights_fingerprint": "fingerprints",
}

__all__ = [
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
    "MlpConfig",
    "OpenClipEncoder",
    "PixelShuffleConfig",
    "RgbImage",
    "fit",
    "image_id",
    "load_image",
    "same_image",
    "second_digest",
    "weights_fingerprint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
