"""Who an image is: a 256-bit name that is the same in every process, and what makes sure of it on a hit."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np

from octavo.multimodal.images import RgbImage

ID_BYTES = 32


def image_id(image: RgbImage, preprocessing: str | bytes, encoder: str | bytes) -> bytes:
    """Name of the rows that an encoder makes of an image: BLAKE2b, 32 bytes.

    It covers the pixels, the mode of their source, their height and width, how they are prepared and who encodes them.
    Each field goes in with its name and length, so that no two images share a name by where one field ends: 30 x 150
    and 150 x 30 with the same bytes differ, so do the same pixels under two ways of resizing.

    Args:
        image: decoded pixels.
        preprocessing: every setting between these pixels and the encoder (size, resize mode, mean, deviation, ...).
        encoder: architecture and weights, for example ``weights_fingerprint`` of the module.

    Raises:
        ValueError: ``preprocessing`` or ``encoder`` is empty: then different rows would share one name.
    """
    state = hashlib.blake2b(digest_size=ID_BYTES, person=b"octavo-image-v1")
    _feed(state, image, preprocessing, encoder)
    return state.digest()


def second_digest(image: RgbImage, preprocessing: str | bytes, encoder: str | bytes) -> bytes:
    """SHA-256, 32 bytes, of what ``image_id`` covers: what a cache keeps beside rows whose pixels it does not keep. A
    hit by ``image_id`` whose second digest differs is a collision, and must count as a miss.

    Raises:
        ValueError: as ``image_id``.
    """
    state = hashlib.sha256(b"octavo-image-second-v1")
    _feed(state, image, preprocessing, encoder)
    return state.digest()


def same_image(one: RgbImage, other: RgbImage) -> bool:
    """Whether two images are equal pixel by pixel, and their sources' modes too: the check of a cache that keeps
    pixels."""
    return one.mode == other.mode and np.array_equal(one.pixels, other.pixels)


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...


def _feed(state: _Hash, image: RgbImage, preprocessing: str | bytes, encoder: str | bytes) -> None:
    for name, setting in (("preprocessing", preprocessing), ("encoder", encoder)):
        if not setting:
            raise ValueError(
                f"an image has no identity without its {name}, got {setting!r}: say all that shapes its rows"
            )
    height, width, _ = image.pixels.shape
    fields: tuple[tuple[bytes, bytes | memoryview], ...] = (
        (b"preprocessing", _as_bytes(preprocessing)),
        (b"encoder", _as_bytes(encoder)),
        (b"mode", image.mode.encode()),
        (b"size", height.to_bytes(8, "little") + width.to_bytes(8, "little")),
        (b"pixels", image.pixels.reshape(-1).data),
    )
    for tag, content in fields:
        state.update(len(tag).to_bytes(4, "little") + tag + len(content).to_bytes(8, "little"))
        state.update(content)


def _as_bytes(setting: str | bytes) -> bytes:
    return setting.encode() if isinstance(setting, str) else setting
