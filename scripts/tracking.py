"""Weights & Biases behind one small protocol. The only importer of wandb, and only if it is asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from octavo.scripts import settings
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema import Config
from octavo.scripts.strict_json import plain

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where a run's numbers go besides its folder. Nested mappings are logged flat, keys joined by dots."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers of one step. A step never comes twice and never goes back, also over a resumption."""
        ...

    def log_results(self, rows: Sequence[Mapping[str, Any]], plots: Mapping[str, Path]) -> None:
        """The rows as summary and table, and the plots."""
        ...

    def finish(self, exit_code: int) -> None:
        """Close the record; anything but 0 marks the run as failed."""
        ...


class NoTracker:
    """``tracking=off``, or offline without wandb."""

    def log(self, step: int, values: Mapping[str, Any]) -> None: ...
    def log_results(self, rows: Sequence[Mapping[str, Any]], plots: Mapping[str, Path]) -> None: ...
    def finish(self, exit_code: int) -> None: ...


class WandbTracker:
    """One W&B run a job. A resumed run keeps its id, so its parts are one run once they are uploaded."""

    def __init__(self, wandb: Any, config: Config, folder: Path, *, resumed: bool) -> None:
        self._wandb = wandb
        self._run = wandb.init(
            mode=config.tracking.mode,
            project=config.tracking.project,
            entity=config.tracking.entity,
            group=config.tracking.group or config.experiment,
            name=folder.name,
            id=_run_id(folder),
            resume="allow" if resumed and config.tracking.mode == "online" else None,
            dir=str(folder),
            config=settings.flat(settings.plain(config)),
            # Progress is ours; capturing the console would also send it.
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(settings.flat(plain(values)), step=step)

    def log_results(self, rows: Sequence[Mapping[str, Any]], plots: Mapping[str, Path]) -> None:
        flat = [settings.flat(plain(row)) for row in rows]
        for row in flat:
            label = "/".join(str(row[key]) for key in ("name", "method") if key in row)
            self._run.summary.update({f"{label}/{key}": value for key, value in row.items()})
        columns = list(dict.fromkeys(key for row in flat for key in row))
        # A column may lack a value, or hold "NaN" among numbers.
        data = [[row.get(column) for column in columns] for row in flat]
        table = self._wandb.Table(columns=columns, data=data, allow_mixed_types=True)
        self._run.log(
            {"rows": table, **{f"plots/{name}": self._wandb.Image(str(file)) for name, file in plots.items()}}
        )

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def start(config: Config, folder: Path, *, resumed: bool) -> Tracker:
    """The tracker that ``config.tracking`` asks for.

    Raises:
        ConfigError: ``tracking=online`` without wandb, or where wandb cannot begin, as without a login.
    """
    mode = config.tracking.mode
    if mode == "off":
        return NoTracker()
    if mode == "offline":
        # Before the import: wandb's own error reporting calls out at exit, even from offline runs, unless told here.
        os.environ["WANDB_MODE"] = "offline"
        os.environ["WANDB_ERROR_REPORTING"] = "false"
    try:
        import wandb
    except ImportError:
        missing = "wandb is not installed; pip install 'octavo[wandb]'"
        if mode == "online":
            raise ConfigError(f"tracking=online: {missing}, or take tracking=off") from None
        log.warning("%s for records in W&B's format, or say tracking=off; going on without", missing)
        return NoTracker()
    try:
        return WandbTracker(wandb, config, folder, resumed=resumed)
    except Exception as error:
        if mode == "online" and isinstance(error, wandb.errors.Error):
            words = " ".join(str(error).split())
            raise ConfigError(f"tracking=online: {words} (or take tracking=offline)") from error
        raise


def _run_id(folder: Path) -> str:
    """An id that a resumed run finds again: it is kept in the folder's wandb directory."""
    file = folder / "wandb" / "octavo_run_id"
    if not file.exists():
        import secrets

        file.parent.mkdir(exist_ok=True)
        file.write_text(secrets.token_hex(8))
    return file.read_text()
