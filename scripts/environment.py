"""What a run was made with, for the record: a figure without it cannot be compared."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from octavo.kernels.cpu import processor

PACKAGES = ("octavo", "torch", "transformers", "triton", "numpy")


def environment() -> dict[str, Any]:
    """Versions, commit, hardware, threads, time and command. A package or device that is not there is null."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": ["octavo", *sys.argv[1:]],
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpu_count": torch.cuda.device_count() if cuda else 0,
        "cuda": torch.version.cuda if cuda else None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that runs, "+changes" if it is not clean; None for an installed package."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changed else "")


def _cpu_model() -> str:
    name = processor.said("model name").partition(":")[2].strip()
    return name or platform.processor() or platform.machine()
