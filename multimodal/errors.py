"""What can be wrong with an image, as exceptions that name the image, the value, the limit and the way out."""

from __future__ import annotations


class ImageError(ValueError):
    """An image that cannot be taken. Nothing of its request has happened yet."""


class ImageSourceError(ImageError):
    """Not something that images are read from: a URL, a directory, a device, a missing file, an unknown type."""


class ImageFormatError(ImageError):
    """Bytes of no format that is read here, or pixels of a kind that has no rule (floats, say)."""


class ImageDecodeError(ImageError):
    """Bytes of a known format that are truncated or damaged, or an image object that was closed."""


class ImageLimitError(ImageError):
    """An image beyond a limit of its ``ImagePolicy``.

    Attributes:
        limit: the field of the policy, "max_pixels" for example.
        value: what the image has; None where Pillow refused to say it in a number.
        bound: what the policy allows.
    """

    def __init__(self, message: str, limit: str, value: float | None, bound: float) -> None:
        super().__init__(message, limit, value, bound)  # all of them, so that it can be pickled by a worker
        self.limit = limit
        self.value = value
        self.bound = bound

    def __str__(self) -> str:
        return str(self.args[0])
