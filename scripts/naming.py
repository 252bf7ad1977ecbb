"""Names that Hydra asks for while it composes: run folders, and the list of experiments in ``octavo --help``."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from octavo.scripts.paths import absolute


def register() -> None:
    """Make ``${octavo.run_dir:...}``, ``.stamp``, ``.digest`` and ``.experiments`` known to OmegaConf."""
    resolvers: dict[str, Callable[..., str]] = {
        "run_dir": _run_dir,
        "stamp": _stamp,
        "digest": _digest,
        "experiments": _experiments,
    }
    for name, resolver in resolvers.items():
        # Cached, since a sweep must see one name however often Hydra asks.
        OmegaConf.register_new_resolver(f"octavo.{name}", resolver, use_cache=True, replace=True)


def _run_dir(experiment: str, resume: str | None) -> str:
    """The folder to go on in, or a new one: time to the microsecond, job 0, and a hash of process and machine."""
    if resume:
        return str(absolute(resume))
    return f"runs/{experiment}/{_stamp()}-0-{_digest(f'{os.uname().nodename} {os.getpid()} {time.monotonic_ns()}')}"


def _stamp() -> str:
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")


def _digest(text: str) -> str:
    """Six hexadecimal digits that tell the overrides of a sweep's jobs apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _experiments() -> str:
    """One line an experiment on the search path, from the second comment line of its YAML."""
    loader = GlobalHydra.instance().config_loader()
    sources = [source.path for source in loader.get_sources() if source.scheme() in ("pkg", "file")]
    described = {name: line for path in reversed(sources) for name, line in _described(path)}
    width = max(map(len, described), default=0)
    return "\n".join(f"  {name:<{width}}  {line}" for name, line in sorted(described.items()))


def _described(source: str) -> Iterator[tuple[str, str]]:
    folder = (Path(source) if os.path.isabs(source) else files(source)) / "experiment"
    if folder.is_dir():
        for file in folder.iterdir():
            if file.name.endswith(".yaml"):
                comments = [line[1:].strip() for line in file.read_text().splitlines() if line.startswith("# ")]
                lines = [line for line in comments if not line.startswith(("@", "octavo "))]
                yield file.name.removesuffix(".yaml"), lines[0] if lines else ""
