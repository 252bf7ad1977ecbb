"""Images beside text: what a prompt may hold, who it is, and how it becomes tokens.

Names are looked up when they are asked for, so that importing this package starts neither torch nor Pillow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from octavo.multimodal.image_policy import ImagePolicy
    from octavo.multimodal.images import RgbImage, load_image

_HOMES = {
    "ImageDecodeError": "errors",
    "ImageError": "errors",
    "ImageFormatError": "errors",
    "ImageLimitError": "errors",
    "ImagePolicy": "image_policy",
    "ImageSourceError": "errors",
    "RgbImage": "images",
    "fit": "fitting",
    "image_id": "identity",
    "load_image": "images",
    "same_image": "identity",
    "second_digest": "identity",
    "weights_fingerprint": "fingerprints",
}

__all__ = [
    "ImageDecodeError",
    "ImageError",
    "ImageFormatError",
    "ImageLimitError",
    "ImagePolicy",
    "ImageSourceError",
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
