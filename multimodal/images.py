"""Images in: from a path, encoded bytes, a PIL image or an array to 8-bit RGB pixels, or a typed error."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.multimodal.errors import (
    ImageDecodeError,
    ImageError,
    ImageFormatError,
    ImageLimitError,
    ImageSourceError,
)
from octavo.multimodal.image_files import read_image_file
from octavo.multimodal.image_policy import DEFAULT_POLICY, ImagePolicy
from octavo.multimodal.pixel_kinds import SIXTEEN_BIT, array_image, check_array, check_mode, to_rgb

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What is decoded: formats that Pillow decodes by itself. It runs Ghostscript for EPS, and others are rare enough that
their decoders are better left alone."""


@dataclass(frozen=True, eq=False)
class RgbImage:
    """Decoded pixels, which nothing can change any more.

    Attributes:
        pixels: uint8 ``[H, W, 3]``, contiguous, read-only; RGB as it is to be seen (turned, composited).
        mode: what the source held, in Pillow's words: "RGBA", "P", "I;16" for all 16-bit grey, and so on. It is part of
            the image's identity.
        format: of the file, in Pillow's words ("PNG", "MPO"); None if there was no file.
        frames: of the file; ``pixels`` are the first of them.
    """

    pixels: NDArray[np.uint8]
    mode: str = "RGB"
    format: str | None = None
    frames: int = 1

    def __post_init__(self) -> None:
        assert self.pixels.dtype == np.uint8 and self.pixels.ndim == 3 and self.pixels.shape[2] == 3
        # An array on top of bytes can never be made writeable; one that only has the flag can.
        frozen = np.frombuffer(self.pixels.tobytes(), np.uint8).reshape(self.pixels.shape)
        object.__setattr__(self, "pixels", frozen)

    def __reduce__(self) -> tuple[Any, ...]:
        return RgbImage, (self.pixels, self.mode, self.format, self.frames)  # pixels that were pickled are writeable

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])


def load_image(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | NDArray[Any] | RgbImage,
    policy: ImagePolicy = DEFAULT_POLICY,
) -> RgbImage:
    """Read an image into memory, whole, or refuse it.

    1. Take the bytes, no more than ``max_bytes`` of them, of a regular file in ``allowed_root``.
    2. Open them by what they hold, whatever the file is called. Only headers are read.
    3. Check size and frames against ``policy``, and the mode against the rules of ``pixel_kinds``.
    4. Decode the first frame (of a PIL image: the frame at which it stands).
    5. Turn it as its EXIF orientation says.
    6. Bring it to 8-bit RGB, transparency composited on ``policy.background``.

    Args:
        source: a path (str or PathLike; bytes are never a path); encoded bytes; a PIL image; an array as
            ``pixel_kinds.check_array`` says; or an ``RgbImage``, which comes back if it is within the limits.
        policy: limits and choices.

    Raises:
        ImageError: one of its four kinds. ``source`` is as it was, except that a lazy PIL image may be loaded.
    """
    if isinstance(source, RgbImage):
        policy.check_size("the image", source.width, source.height)
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        policy.check_bytes("the image given as bytes", memoryview(source).nbytes)  # before they are copied
        return _decode(bytes(source), policy, "the image given as bytes")
    if isinstance(source, str | os.PathLike):
        return _decode(read_image_file(source, policy), policy, f"the file {os.fsdecode(source)!r:.120}")
    if isinstance(source, np.ndarray):
        return _from_array(source, policy)
    from PIL import Image

    if isinstance(source, Image.Image):
        return _from_pil(source, policy)
    raise ImageSourceError(
        f"an image is a path, bytes, a PIL image or a numpy array, got {type(source).__name__}; "
        "give file.read() of an open file, tensor.numpy() of a tensor"
    )


def _decode(data: bytes, policy: ImagePolicy, what: str) -> RgbImage:
    from PIL import Image, UnidentifiedImageError

    with _pillow_errors(what, policy):
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            raise ImageFormatError(
                f"{what} is none of {', '.join(FORMATS)}, or its header is damaged: {len(data):,} bytes that begin "
                f"with {data[:12]!r}; convert it to one of these"
            ) from None
        policy.check_size(what, *image.size)
        frames = _count_frames(image, policy, what)
        return _rgb_image(image, policy, what, image.format, frames)


def _from_pil(image: Image.Image, policy: ImagePolicy) -> RgbImage:
    from PIL import ImageFile

    what = "the PIL image"
    if isinstance(image, ImageFile.ImageFile) and image.format not in (*FORMATS, "MPO"):
        raise ImageFormatError(
            f"{what} comes from a {image.format} file, whose decoder is not used here ({', '.join(FORMATS)} are); "
            "if you trust it, give image.convert('RGB')"
        )
    policy.check_size(what, *image.size)
    with _pillow_errors(what, policy):
        return _rgb_image(image, policy, what, image.format, 1)


def _from_array(array: NDArray[Any], policy: ImagePolicy) -> RgbImage:
    what = "the array"
    height, width = check_array(array, what)
    policy.check_size(what, width, height)
    image, mode = array_image(array)
    return RgbImage(np.asarray(to_rgb(image, policy.background, what)), mode)


def _rgb_image(image: Image.Image, policy: ImagePolicy, what: str, file_format: str | None, frames: int) -> RgbImage:
    check_mode(image.mode, what)
    image.load()
    rgb = to_rgb(_turned(image), policy.background, what)
    # Which of its 16-bit modes Pillow chooses depends on its version, and an identity must not.
    mode = "I;16" if image.mode in SIXTEEN_BIT else image.mode
    return RgbImage(np.asarray(rgb), mode, file_format, frames)


def _count_frames(image: Image.Image, policy: ImagePolicy, what: str) -> int:
    """Frames of an open file, the first of which is still to be decoded.

    Most formats say it in their header, and GIF files are scanned, 0.1 s a megabyte. The directories of a TIFF file are
    followed one by one in quadratic time, so no further than the limit.
    """
    if image.format == "TIFF":
        frames = 1
        with suppress(EOFError):
            while frames <= policy.max_frames:
                image.seek(frames)
                frames += 1
        image.seek(0)
    else:
        frames = getattr(image, "n_frames", 1)
    policy.check_frames(what, frames)
    return frames


def _turned(image: Image.Image) -> Image.Image:
    """The image as its camera was held. EXIF that cannot be read turns nothing.

    ``ImageOps.exif_transpose`` would also write the rest of the EXIF anew, and fails where that is odd.
    """
    from PIL import ExifTags
    from PIL.Image import Transpose

    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # its parser raises what it likes
        return image
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


@contextmanager
def _pillow_errors(what: str, policy: ImagePolicy) -> Iterator[None]:
    """Whatever Pillow raises (each of its plugins has its own errors), as an ``ImageError``."""
    from PIL import Image

    try:
        yield
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Pillow's own limit on pixels, beyond ours as long as ours is the default, is checked before ours can be.
        raise ImageLimitError(
            f"{what} is too large: {error} The limits are max_pixels={policy.max_pixels:,} and Pillow's own",
            "max_pixels",
            None,
            policy.max_pixels,
        ) from error
    except Exception as error:
        raise ImageDecodeError(f"{what} is truncated, damaged or closed: {type(error).__name__}: {error}") from error
