"""What images may be like, and what is done where an image leaves a choice."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.multimodal.errors import ImageLimitError

Resize = Literal["pad", "crop", "squash"]
RESIZES: tuple[Resize, ...] = ("pad", "crop", "squash")


@dataclass(frozen=True)
class ImagePolicy:
    """Limits, all inclusive and all checked before a pixel is decoded, and choices.

    Attributes:
        background: red, green, blue (0 to 255) under transparent pixels and around padded images; the default is the
            mean colour of CLIP's training images (Radford et al. 2021), which the encoder sees as zeros.
        resize: how ``fit`` makes an image square: "pad" keeps all of it in proportion, "crop" loses the ends of the
            longer side, "squash" loses the proportions.
        max_bytes: of a file or of encoded bytes.
        max_pixels: width times height.
        min_side, max_side: of both sides, in pixels.
        max_aspect: longer side over shorter side.
        max_frames: of an animation or a file of several pages. Only the first frame is decoded; the limit is on what a
            file may make one look through.
        allowed_root: files must lie in this folder, after all symbolic links; None allows every folder.

    Raises:
        ValueError: a value of the wrong type or out of range.
    """

    background: tuple[int, int, int] = (122, 116, 104)
    resize: Resize = "pad"
    max_bytes: int = 20 << 20
    max_pixels: int = 32_000_000
    min_side: int = 4
    max_side: int = 16_384
    max_aspect: float = 64.0
    max_frames: int = 1_000
    allowed_root: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pixels", "min_side", "max_side", "max_frames"):
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.min_side > self.max_side:
            raise ValueError(f"min_side={self.min_side} is larger than max_side={self.max_side}")
        if self.min_side**2 > self.max_pixels:
            raise ValueError(
                f"min_side={self.min_side} and max_pixels={self.max_pixels} allow no image: the smallest has "
                f"{self.min_side**2} pixels"
            )
        aspect = self.max_aspect
        if isinstance(aspect, bool) or not isinstance(aspect, int | float) or not 1 <= aspect < math.inf:
            raise ValueError(f"max_aspect must be a number of at least 1, got {aspect!r}")
        if self.resize not in RESIZES:
            raise ValueError(f"resize must be one of {', '.join(RESIZES)}, got {self.resize!r}")
        object.__setattr__(self, "background", _colour(self.background))
        if self.allowed_root is not None:
            object.__setattr__(self, "allowed_root", _folder(self.allowed_root))

    def check_bytes(self, what: str, size: int) -> None:
        """Refuse ``size`` encoded bytes beyond ``max_bytes``. ``what`` names the image in the message.

        Raises:
            ImageLimitError
        """
        if size > self.max_bytes:
            raise _beyond(f"{what} has {size:,} bytes", "max_bytes", size, self.max_bytes)

    def check_size(self, what: str, width: int, height: int) -> None:
        """Refuse sides, area or proportions beyond the limits. ``what`` names the image in the message.

        Raises:
            ImageLimitError
        """
        found = f"{what} is {width:,} x {height:,} (width x height)"
        short, long = sorted((width, height))
        if short < self.min_side:
            raise _beyond(f"{found}, a side of {short}", "min_side", short, self.min_side)
        if long > self.max_side:
            raise _beyond(f"{found}, a side of {long:,}", "max_side", long, self.max_side)
        if short * long > self.max_pixels:
            raise _beyond(f"{found}, {short * long:,} pixels", "max_pixels", short * long, self.max_pixels)
        if long > self.max_aspect * short:
            raise _beyond(f"{found}, {long / short:,.2f} to 1", "max_aspect", long / short, self.max_aspect)

    def check_frames(self, what: str, frames: int) -> None:
        """Refuse more than ``max_frames`` frames. ``what`` names the image in the message.

        Raises:
            ImageLimitError
        """
        if frames > self.max_frames:
            raise _beyond(f"{what} has {frames:,} frames or more", "max_frames", frames, self.max_frames)


def _beyond(found: str, limit: str, value: float, bound: float) -> ImageLimitError:
    way_out = "resize the image" if limit != "max_frames" else "give one frame of it"
    return ImageLimitError(
        f"{found}; the limit is {limit}={bound:,}: {way_out}, or give an ImagePolicy with another {limit}",
        limit,
        value,
        bound,
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _colour(value: Any) -> tuple[int, int, int]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 3:
        raise ValueError(f"background must be three numbers (red, green, blue), got {value!r}")
    for part in value:
        if not _is_int(part) or not 0 <= part <= 255:
            raise ValueError(f"background must hold integers from 0 to 255, got {part!r} in {value!r}")
    red, green, blue = value
    return red, green, blue


def _folder(value: Any) -> Path:
    try:
        path = Path(value).resolve(strict=True)
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise ValueError(f"allowed_root must be an existing folder, got {value!r}: {error}") from error
    if not path.is_dir():
        raise ValueError(f"allowed_root must be a folder, and {value!r} is not one")
    return path


DEFAULT_POLICY = ImagePolicy()
