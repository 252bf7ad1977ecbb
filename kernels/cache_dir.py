"""octavo's cache of what is made or unpacked once on a machine: compiled kernels, the embedded model."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$OCTAVO_CACHE``, by default ``~/.cache/octavo``. It may not exist yet."""
    return Path(os.environ.get("OCTAVO_CACHE") or Path.home() / ".cache" / "octavo").expanduser().absolute()
