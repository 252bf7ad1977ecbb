"""The folder of one run: what is written when, so that its files are valid whatever happens.

::

    config.yaml     written first, exclusively: whoever writes it owns the folder
    samples.jsonl   one line an item and method, on disk before the next item starts
    metrics.json    {"experiment", "complete", "rows", "environment"}, replaced atomically after every item
    run.log         what the run logged, its traceback if it failed
    plots/*.png, report.html, wandb/
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.scripts import settings
from octavo.scripts.paths import resume_argument
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema import Config
from octavo.scripts.strict_json import dumps
from octavo.scripts.tracking import NoTracker, Tracker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

FREE_KEYS = ("resume", "tracking")
"""Settings that may differ when a run goes on: they change no result."""

Sample = dict[str, Any]


class DiskFullError(OSError):
    """No space was left; what was written before is whole."""


class Run:
    """A run folder, open for writing by this process alone.

    Attributes:
        folder: its absolute path.
        samples: what is in ``samples.jsonl``, in its order; on resuming, what an earlier process left.
        resumed: whether an earlier process worked on it.
        tracker: where its numbers go besides.
    """

    def __init__(self, folder: Path, config: Config, *, resumed: bool) -> None:
        self.folder = folder
        self.resumed = resumed
        self.tracker: Tracker = NoTracker()
        self._experiment = config.experiment
        self._samples_file = self._lock(folder / "samples.jsonl")
        self.samples: list[Sample] = self._read_samples()

    @classmethod
    def create(cls, folder: Path, config: Config) -> Run:
        """A new run in ``folder``, which may exist if no run is in it.

        Raises:
            ConfigError: there is one.
            DiskFullError: it could not be begun, and nothing of it is there.
        """
        with _disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
        taken = [name for name in ("config.yaml", "metrics.json", "samples.jsonl") if (folder / name).exists()]
        try:
            if taken:
                raise FileExistsError
            with _disk(folder / "config.yaml"):
                _write_new(folder / "config.yaml", _yaml(config, folder))
        except FileExistsError:
            raise ConfigError(
                f"{folder} already holds a run, and octavo overwrites none: give another hydra.run.dir, "
                f"or go on with that run: octavo {resume_argument(folder)}"
            ) from None
        return cls(folder, config, resumed=False)

    @classmethod
    def resume(cls, folder: Path, config: Config) -> Run:
        """An interrupted run, to go on with.

        Raises:
            ConfigError: no run is there, another process works on it, its samples are damaged, or ``config`` is not
                the one it began with; the message names the keys that differ.
        """
        before = settings.flat(settings.plain(saved_config(folder)))
        now = settings.flat(settings.plain(config))
        differing = [
            f"{key} ({before.get(key)!r} there, {now.get(key)!r} now)"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and key.split(".")[0] not in FREE_KEYS
        ]
        if differing:
            raise ConfigError(
                f"{folder} was begun with other settings: {', '.join(differing)}; "
                f"give the same, or only {resume_argument(folder)} to take them from there"
            )
        return cls(folder, config, resumed=True)

    def close(self) -> None:
        self._samples_file.close()

    def done(self, *keys: str) -> set[tuple[Any, ...]]:
        """The values of ``keys`` in every sample so far.

        Raises:
            ConfigError: a sample lacks one.
        """
        for number, sample in enumerate(self.samples, start=1):
            lacking = [key for key in keys if not isinstance(sample.get(key), str | int)]
            if lacking:
                raise ConfigError(f"{self._samples_file.name}: line {number} is no sample of this run: no {lacking[0]}")
        return {tuple(sample[key] for key in keys) for sample in self.samples}

    def add(self, sample: Sample) -> None:
        """Append a sample; when this returns it is on disk.

        Raises:
            DiskFullError: it is not, and the file is as it was.
        """
        line = (dumps(sample) + "\n").encode()
        file = self._samples_file
        end = file.seek(0, os.SEEK_END)
        with _disk(Path(file.name), f"octavo {resume_argument(self.folder)} goes on after {len(self.samples)} samples"):
            try:
                left = memoryview(line)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise
        self.samples.append(json.loads(line))

    def write_rows(self, rows: Sequence[Mapping[str, Any]], *, complete: bool = False) -> None:
        """Replace ``metrics.json``: the rows so far, or the final ones. Readers see the old file or the new one."""
        metrics = {
            "experiment": self._experiment,
            "complete": complete,
            "rows": rows,
            "environment": self.environment,
        }
        self.write("metrics.json", dumps(metrics, indent=2) + "\n")

    @cached_property
    def environment(self) -> dict[str, Any]:
        """What this process runs on."""
        from octavo.scripts.environment import environment

        return environment()

    def write(self, name: str, text: str) -> Path:
        """Write a whole file of the run atomically."""
        target = self.folder / name
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with _disk(target), scratch.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
        return target

    def save_plot(self, name: str, figure: Figure) -> Path:
        """``plots/<name>.png``."""
        target = self.folder / "plots" / f"{name}.png"
        target.parent.mkdir(exist_ok=True)
        with _disk(target):
            figure.savefig(target, dpi=150)
        return target

    def _lock(self, path: Path) -> FileIO:
        with _disk(path):
            # Unbuffered, so that a write that failed is not tried again behind our back when the file is closed.
            file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigError(f"{self.folder} is in use by another process") from None
        return file

    def _read_samples(self) -> list[Sample]:
        """All whole lines. A last line that was cut off by a crash is removed, and its work will be done again."""
        file = self._samples_file
        file.seek(0)
        *lines, torn = file.read().split(b"\n")
        if torn:
            log.warning("removed a half-written sample from the end of %s", file.name)
            file.truncate(sum(len(line) + 1 for line in lines))
        samples = []
        for number, line in enumerate(lines, start=1):
            try:
                sample = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{file.name}: line {number} is damaged: {error}") from None
            if not isinstance(sample, dict):
                raise ConfigError(f"{file.name}: line {number} is no sample, but a {type(sample).__name__}")
            samples.append(sample)
        return samples


def saved_config(folder: Path) -> Config:
    """The settings that the run in ``folder`` began with.

    Raises:
        ConfigError: no run is there.
    """
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"resume={folder}: no run is there (it has no config.yaml)")
    return settings.load(folder / "config.yaml")


def _yaml(config: Config, folder: Path) -> str:
    from omegaconf import OmegaConf

    again = f"# Run again, in a new folder: octavo --config-path {shlex.quote(str(folder))} --config-name config\n"
    return again + OmegaConf.to_yaml(OmegaConf.create(settings.plain(config)), sort_keys=False)


def _write_new(file: Path, text: str) -> None:
    """Write a file that must not exist yet, whole or not at all."""
    with file.open("x", encoding="utf-8") as opened:
        try:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        except BaseException:
            file.unlink()
            raise


@contextmanager
def _disk(path: Path, advice: str = "free some space first") -> Iterator[None]:
    """Says where, when space runs out."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"no space left while writing {path}; {advice}") from error
        raise
