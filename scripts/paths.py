"""Where files are: paths that a user typed, and octavo's cache."""

from __future__ import annotations

import os
from pathlib import Path

from hydra.core.hydra_config import HydraConfig


def absolute(path: str | os.PathLike[str]) -> Path:
    """``path`` against the launch directory, ``~`` expanded.

    Inside a job that is the directory the command was started in, even where ``hydra.job.chdir`` has left it.
    """
    launch = HydraConfig.get().runtime.cwd if HydraConfig.initialized() else os.getcwd()
    return Path(os.path.abspath(Path(launch) / Path(path).expanduser()))


def cache_dir() -> Path:
    """``$OCTAVO_CACHE``, by default ``~/.cache/octavo``. It may not exist yet."""
    return Path(os.environ.get("OCTAVO_CACHE") or Path.home() / ".cache" / "octavo").expanduser().absolute()
