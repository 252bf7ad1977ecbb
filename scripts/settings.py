"""From what Hydra composed to one typed, checked object."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from octavo.scripts.embedded_models import MODELS
from octavo.scripts.paths import absolute
from octavo.scripts.refusal import ConfigError, one_of, unknown_key
from octavo.scripts.schema import EXPERIMENTS, Config


def typed(cfg: DictConfig) -> Config:
    """The settings of one job as the dataclass of its experiment, local paths made absolute.

    Raises:
        ConfigError: an unknown key or experiment, a missing value, or a value out of range.
        omegaconf.errors.ValidationError: a value of the wrong type.
    """
    name = str(OmegaConf.select(cfg, "experiment", default="") or "")
    one_of("experiment", name, tuple(EXPERIMENTS))
    schema = EXPERIMENTS[name]
    # Typed nodes let `+key=value` through, and a configuration that a user wrote whole has no types at all.
    _refuse_unknown(cfg, schema, schema, "")
    merged = OmegaConf.merge(OmegaConf.structured(schema), cfg)
    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        raise ConfigError(f"{missing[0]} has no value; give one with {missing[0]}=...")
    config = typing.cast(Config, OmegaConf.to_object(merged))
    if config.model.path is not None:  # a model of random weights has none
        config.model.path = resolved_model(config.model.path)
    if hasattr(config, "runs"):
        config.runs = [str(absolute(folder)) for folder in config.runs]
    files = [(config, key) for key in ("resume", "prompts_file", "kvpress_python")]
    for owner, key in (*files, (getattr(config, "task", None), "path")):
        if getattr(owner, key, None):
            setattr(owner, key, str(absolute(getattr(owner, key))))
    return config


def resolved_model(path: str) -> str:
    """A local folder as an absolute path; anything else as it is, to be taken as a hub id.

    Raises:
        ConfigError: no such folder, and ``path`` cannot be a hub id, which is ``name`` or ``owner/name``.
    """
    folder = absolute(path)
    if folder.is_dir():
        return str(folder)
    if path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        hint = next((f"; {model.command} makes it" for model in MODELS.values() if model.folder == folder.name), "")
        raise ConfigError(f"model.path={path}: no such folder: {folder}{hint}")
    return path


def plain(config: Config) -> dict[str, Any]:
    """The settings as built-in types, ready for YAML."""
    return typing.cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(config), resolve=True))


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots; lists stay as they are."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def load(file: Path) -> Config:
    """Settings that a run saved."""
    try:
        loaded = OmegaConf.load(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{file} holds no mapping of settings")
    return typed(loaded)


def _refuse_unknown(node: DictConfig, schema: type, root: type, prefix: str) -> None:
    hints = typing.get_type_hints(schema)
    for key in map(str, node):
        if key not in hints:
            raise unknown_key(f"{prefix}{key}", schema, root, EXPERIMENTS)
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(child := node[key], DictConfig):
                raise ConfigError(
                    f"{prefix}{key}={child}: it is a group of settings; set one of its keys: {prefix}{key}.NAME=..."
                )
            _refuse_unknown(child, typing.cast(type, hints[key]), root, f"{prefix}{key}.")
