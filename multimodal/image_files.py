"""Reading the bytes of an image file: a regular file, in the allowed folder, and never more of it than allowed."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from octavo.multimodal.errors import ImageSourceError
from octavo.multimodal.image_policy import ImagePolicy

URL = re.compile(r"[a-z][a-z0-9+.-]*://|data:", re.IGNORECASE)


def read_image_file(path: str | os.PathLike[str], policy: ImagePolicy) -> bytes:
    """All bytes of a file.

    The file is looked at before it is opened (opening a device may do something, opening a FIFO waits) and again
    afterwards (somebody may have put another there). It is read up to one byte beyond the limit whatever size it
    claims, since files of /proc claim none and others grow.

    Raises:
        ImageSourceError: a URL, outside ``allowed_root``, missing, unreadable, or not a regular file.
        ImageLimitError: more than ``max_bytes``.
    """
    name = os.fsdecode(path)
    what = f"the file {name!r:.120}"
    if URL.match(name):
        raise ImageSourceError(f"{name!r:.80} is a URL, and none is ever fetched; load it yourself and give its bytes")
    if "\0" in name:
        raise ImageSourceError(
            f"{what} cannot be read: no path holds a zero byte; bytes of an image are given as bytes"
        )
    try:
        real = Path(name).resolve()
        root = policy.allowed_root
        if root is not None and not real.is_relative_to(root):
            raise ImageSourceError(f"{what} lies outside of allowed_root={str(root)!r}")
        _check_regular(what, os.stat(real))
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            _check_regular(what, status)
            policy.check_bytes(what, status.st_size)
            data = file.read(policy.max_bytes + 1)
    except (OSError, RuntimeError, UnicodeError) as error:  # RuntimeError: a loop of links, up to Python 3.12
        raise ImageSourceError(f"{what} cannot be read: {error}") from error
    policy.check_bytes(what, len(data))
    return data


def _check_regular(what: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = stat.filemode(status.st_mode)
        raise ImageSourceError(f"{what} is not a regular file ({kind}); give the path of one, or the image's bytes")
