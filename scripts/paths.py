"""Paths that a user typed, and how to type them back."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from hydra.core.hydra_config import HydraConfig


def absolute(path: str | os.PathLike[str]) -> Path:
    """``path`` against the launch directory, ``~`` expanded.

    Inside a job that is the directory the command was started in, even where ``hydra.job.chdir`` has left it.
    """
    launch = HydraConfig.get().runtime.cwd if HydraConfig.initialized() else os.getcwd()
    return Path(os.path.abspath(Path(launch) / Path(path).expanduser()))


def resume_argument(folder: Path) -> str:
    """``resume=folder`` to paste in a shell, quoted for it and for Hydra's grammar where either needs that."""
    text = str(folder)
    if re.fullmatch(r"[A-Za-z0-9/._-]+", text):
        return f"resume={text}"
    # Hydra takes backslashes as they are, unless a quote follows; OmegaConf takes "${" for an interpolation.
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text)
    return shlex.quote(f'resume="{escaped}"')
