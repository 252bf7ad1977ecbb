"""The command ``octavo``: one Hydra job is one experiment in one run folder. See ``octavo --help``."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from octavo.scripts import naming, schema, settings
from octavo.scripts.paths import absolute, resume_argument
from octavo.scripts.refusal import ConfigError, explain
from octavo.scripts.schema import EXPERIMENTS, Config

log = logging.getLogger("octavo")

schema.register(sys.argv[1:])
naming.register()


class JobFailed(RuntimeError):
    """A job failed and has said so; in a sweep, the others still run."""


FOLDERS = {
    "hydra.run.dir": "${octavo.run_dir:${experiment},${resume}}",
    "hydra.sweep.dir": "multirun/${experiment}/${octavo.stamp:}",
    "hydra.sweep.subdir": "${hydra.job.num}-${octavo.digest:${hydra.job.override_dirname}}",
}
"""Where runs go, as in configs/config.yaml; a saved config.yaml, which is run again by its path, does not say it."""


SHORT_FORMS = {"--profile": "profile=true"}
"""What reads like a flag elsewhere, and the setting that it stands for."""


@hydra.main(config_path="pkg://octavo.configs", config_name="config", version_base="1.3")
def _job(cfg: DictConfig) -> None:
    """What Hydra calls for the one job, or for each job of a sweep."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        config = _settings(cfg)
        folder = Path(config.resume or folder)
        _run(config, folder)
    except JobFailed as failed:
        raise _failure(failed) from failed
    except Exception as error:
        message = explain(error, EXPERIMENTS.get(str(cfg.get("experiment")), Config), EXPERIMENTS)
        if message is None:
            traceback.print_exc()
        _complain(message or f"{type(error).__name__}: {error}")
        raise _failure(error) from error
    finally:
        # Hydra made the folder before it asked us; one that was refused is not left behind empty.
        with suppress(OSError):
            Path(HydraConfig.get().runtime.output_dir).rmdir()


def _failure(error: Exception) -> BaseException:
    """What tells Hydra: a sweep notes the job as failed and goes on; a single run just ends, without further words."""
    single = HydraConfig.get().mode == RunMode.RUN
    return SystemExit(1) if single else JobFailed(str(error))


def _settings(cfg: DictConfig) -> Config:
    """The job's settings. With nothing but ``resume`` (and ``tracking``) given, they are those of that run."""
    from octavo.scripts.run import FREE_KEYS, saved_config

    given = {override.lstrip("+~").split("=")[0].split(".")[0] for override in HydraConfig.get().overrides.task}
    if cfg.get("resume") and given <= set(FREE_KEYS):
        config = saved_config(absolute(cfg.resume))
        now = settings.typed(cfg)
        config.resume, config.tracking = now.resume, now.tracking
        return config
    return settings.typed(cfg)


def _run(config: Config, folder: Path) -> None:
    """Run one experiment. Whatever happens, its files are valid, its record is closed, and its folder is named."""
    # Here, so that --help and a refused key need no torch.
    from octavo.scripts import build, compositions, tracking
    from octavo.scripts.run import DiskFullError, Run

    methods = build.check(config)
    experiment = importlib.import_module(f"octavo.scripts.experiments.{config.experiment}").run
    try:
        run = Run.resume(folder, config) if config.resume else Run.create(folder, config)
    except DiskFullError as error:
        _complain(str(error))
        raise JobFailed(str(error)) from error
    exit_code = 1
    try:
        with _logged(folder / "run.log"), _terminable():
            run.tracker = tracking.start(config, folder, resumed=run.resumed)
            try:
                compositions.keep(methods, folder, resumed=run.resumed)
                if not run.resumed:
                    run.write_rows([])
                experiment(config, run)
                exit_code = 0
            except (ConfigError, DiskFullError) as error:
                _complain(str(error))
                raise JobFailed(str(error)) from error
            except Exception as error:
                log.exception("failed")
                _complain(f"{type(error).__name__}: {error}")
                raise JobFailed(str(error)) from error
            except (KeyboardInterrupt, SystemExit) as stop:
                exit_code = 130 if isinstance(stop, KeyboardInterrupt) else int(stop.code or 1)
                _complain(f"interrupted; go on with: octavo {resume_argument(folder)}")
                raise
            finally:
                run.tracker.finish(exit_code)
    finally:
        run.close()
        print(f"run: {folder}", flush=True)


@contextmanager
def _logged(file: Path) -> Iterator[None]:
    """Log to the console, and to the run's own file, so that each job of a sweep has its own."""
    logger = logging.getLogger("octavo")
    handlers: list[logging.Handler] = [logging.StreamHandler(), logging.FileHandler(file, delay=True)]
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack like Ctrl-C, so that ``finally`` runs; exit code 143."""

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _complain(message: str) -> None:
    print(f"octavo: {message}", file=sys.stderr, flush=True)


def main() -> int:
    """Entry point. Exit codes: 0; 1 for a failed job or a refused configuration; 130 Ctrl-C; 143 SIGTERM."""
    # Hydra would print its own words and exit; with this it lets exceptions through, and `explain` speaks.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    if sys.argv[1:2] == ["compare"]:
        sys.argv[1:] = _comparison(sys.argv[2:])
    sys.argv[1:] = [SHORT_FORMS.get(argument, argument) for argument in sys.argv[1:]]
    if any(argument.partition("=")[0] in ("--config-path", "-cp") for argument in sys.argv[1:]):
        given = {argument.partition("=")[0] for argument in sys.argv[1:]}
        sys.argv += ["hydra.output_subdir=null"]
        sys.argv += [f"{key}='{value}'" for key, value in FOLDERS.items() if key not in given]
    try:
        _job()
    except JobFailed:
        return 1
    except SystemExit as stop:
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        message = explain(error, _root(sys.argv[1:]), EXPERIMENTS)
        if message is None:
            raise
        _complain(message)
        return 1
    return 0


def _comparison(arguments: list[str]) -> list[str]:
    """``compare FOLDER ... KEY=VALUE ...`` as an experiment; what exists is a folder, whatever its name."""
    folders = [given for given in arguments if Path(given).is_dir() or ("=" not in given and given[:1] != "-")]
    others = [given for given in arguments if given not in folders]
    quoted = ",".join("'" + folder.replace("'", "\\'") + "'" for folder in folders)
    return ["experiment=compare", f"runs=[{quoted}]", *others]


def _root(arguments: list[str]) -> type[Config]:
    """The schema of the experiment that a command line asks for, for messages only."""
    chosen = [argument.partition("=")[2] for argument in arguments if argument.startswith("experiment=")]
    return EXPERIMENTS.get(chosen[-1] if chosen else "code_completion", Config)


if __name__ == "__main__":
    sys.exit(main())
