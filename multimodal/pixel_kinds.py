"""From every kind of pixel that is taken to 8-bit RGB: one rule for each mode of Pillow and each dtype of numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.multimodal.errors import ImageFormatError, ImageSourceError

if TYPE_CHECKING:
    from PIL import Image

EIGHT_BIT = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
SIXTEEN_BIT = ("I", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's "I" has 32 bits, but what files put there are 16-bit samples."""

CHANNELS = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
TOP = 65_535


def check_mode(mode: str, what: str) -> None:
    """Refuse a mode that has no rule: "F", since no scale of floats is known, "LAB" and what Pillow may add.

    Raises:
        ImageFormatError
    """
    if mode not in EIGHT_BIT + SIXTEEN_BIT:
        known = ", ".join(EIGHT_BIT + SIXTEEN_BIT)
        raise ImageFormatError(
            f"{what} has pixels of mode {mode!r}, for which there is no rule (there is for {known}); "
            "scale it to 0..255 and convert it to RGB yourself"
        )


def to_rgb(image: Image.Image, background: tuple[int, int, int], what: str) -> Image.Image:
    """An image of mode RGB, from one of any mode that ``check_mode`` lets pass.

    16-bit samples are scaled: v * 255 / 65535, rounded. Transparency (an alpha channel, one in the palette, or one
    colour that is declared transparent) is composited on ``background``: c * a + b * (1 - a), rounded. All else is
    Pillow's conversion; colour profiles are not applied, and CMYK is converted without one.

    Raises:
        ImageFormatError: an "I" image with samples outside 0..65535.
    """
    from PIL import Image

    if image.mode in SIXTEEN_BIT:
        image = _grey(image, what)
    if image.mode == "La":  # Pillow converts grey with premultiplied alpha to nothing else
        image = image.convert("LA")
    if image.has_transparency_data:
        below = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(below, image.convert("RGBA"))
    return image.convert("RGB")


def _grey(image: Image.Image, what: str) -> Image.Image:
    """L or LA of 16-bit samples. Pillow's own conversion clips them at 255."""
    from PIL import Image

    samples = np.asarray(image)
    low, high = int(samples.min()), int(samples.max())
    if low < 0 or high > TOP:
        raise ImageFormatError(
            f"{what} has samples from {low} to {high}; those of mode {image.mode!r} are taken as 16-bit, 0 to {TOP}: "
            "scale it to 0..255 yourself"
        )
    grey = Image.fromarray(_eight_bits(samples))
    transparent = image.info.get("transparency")
    if transparent is None:
        return grey
    return Image.merge("LA", (grey, Image.fromarray(np.where(samples == transparent, 0, 255).astype(np.uint8))))


def check_array(array: NDArray[Any], what: str) -> tuple[int, int]:
    """Height and width of an array that has a rule: ``[H, W]``, or ``[H, W, C]`` with C of 1 (grey), 2 (grey, alpha),
    3 (RGB) or 4 (RGB, alpha); uint8, uint16 of either byte order, or bool without alpha. Strides do not matter.

    Raises:
        ImageSourceError: a masked array.
        ImageFormatError: another dtype or shape.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise ImageSourceError(f"{what} is masked, and what is under a mask is unknown; give array.filled(value)")
    shape = list(array.shape)
    if array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in CHANNELS):
        hint = "; channels come last: array.transpose(1, 2, 0)" if array.ndim == 3 and shape[0] in CHANNELS else ""
        raise ImageFormatError(f"{what} has shape {shape}, and [H, W] or [H, W, 1 to 4] is needed{hint}")
    if array.dtype.kind == "f":
        raise ImageFormatError(
            f"{what} has dtype {array.dtype}, and whether its white is 1.0 or 255.0 is unknown; "
            "for values in 0..1 give (array * 255).round().astype('uint8')"
        )
    if array.dtype.kind not in "ub" or array.dtype.itemsize > 2:
        raise ImageFormatError(f"{what} has dtype {array.dtype}, and uint8, uint16 or bool is needed: convert it")
    if array.dtype.kind == "b" and array.ndim == 3 and shape[2] != 1:
        raise ImageFormatError(f"{what} is bool with shape {shape}, and bool is for one channel: give uint8")
    return shape[0], shape[1]


def array_image(array: NDArray[Any]) -> tuple[Image.Image, str]:
    """An image of mode L, LA, RGB or RGBA, from an array that ``check_array`` lets pass, and the name of what the array
    held: "1" for bool, Pillow's name of the same samples for uint8 and grey uint16, else "LA;16" and so on."""
    from PIL import Image

    pixels = np.asarray(array)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    mode = CHANNELS[pixels.shape[2]]
    kind = mode
    if pixels.dtype.kind == "b":
        kind, pixels = "1", np.where(pixels, 255, 0).astype(np.uint8)
    elif pixels.dtype.itemsize == 2:
        kind, pixels = "I;16" if mode == "L" else f"{mode};16", _eight_bits(pixels)
    data = np.ascontiguousarray(pixels).tobytes()
    return Image.frombytes(mode, (pixels.shape[1], pixels.shape[0]), data), kind


def _eight_bits(samples: NDArray[Any]) -> NDArray[np.uint8]:
    """v * 255 / 65535 = v / 257, rounded; since 257 is odd there are no halves."""
    return ((samples.astype(np.uint32) + 128) // 257).astype(np.uint8)
