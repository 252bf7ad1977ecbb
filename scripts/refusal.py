"""Turns what is wrong with a configuration into one message: the key, what was given, what is allowed, the nearest."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from math import inf
from typing import Any

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import YAMLError

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


class ConfigError(ValueError):
    """A setting that cannot be used. The message is complete: nobody needs the traceback."""


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ConfigError, with the nearest name, unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f"{key}={value}: unknown; {nearest(value, allowed)}one of: {', '.join(allowed)}")


def at_least(key: str, value: float | None, low: int) -> None:
    """Raises ConfigError unless ``value`` is None or at least ``low``, and no infinity."""
    if value is not None and not low <= value < inf:  # NaN is not
        raise ConfigError(f"{key}={value}: must be at least {low}" + ("" if value < low else ", and finite"))


def each_at_least(key: str, values: Iterable[int], low: int) -> None:
    """Raises ConfigError unless all ``values`` of a list are at least ``low``."""
    for value in values:
        at_least(key, value, low)


def each_once(key: str, values: Sequence[Any], allowed: Sequence[str] | None = None) -> None:
    """Raises ConfigError if a list names something twice, or something that is not ``allowed``."""
    for value in values:
        if allowed is not None:
            one_of(key, value, allowed)
        if values.count(value) > 1:
            raise ConfigError(f"{key} lists {value!r} twice")


def nearest(name: str, known: Iterable[str]) -> str:
    """``"did you mean 'x'? "``, or nothing if no known name is close."""
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def unknown_key(key: str, schema: type, root: type, others: Mapping[str, type]) -> ConfigError:
    """The error for dotted ``key``, whose last part ``schema`` lacks.

    ``root`` is the whole configuration, ``others`` those of all experiments: the key may belong elsewhere in them.
    """
    prefix, _, leaf = key.rpartition(".")
    siblings = [f.name for f in dataclasses.fields(schema)]
    near = get_close_matches(leaf, siblings, n=1)
    elsewhere = [path for path in paths(root) if path.rpartition(".")[2] == leaf]
    owners = [name for name, other in others.items() if key in paths(other)]
    if elsewhere:
        hint = f"did you mean {elsewhere[0]!r}? "
    elif near:
        hint = f"did you mean {'.'.join(filter(None, [prefix, near[0]]))!r}? "
    elif owners:
        hint = f"it belongs to experiment={_listed(owners)}; "
    else:
        hint = ""
    where = f"keys of {prefix}" if prefix else "keys"
    return ConfigError(f"unknown key {key!r}; {hint}{where}: {', '.join(siblings)}")


def _listed(names: Sequence[str]) -> str:
    """a; a or b; a, b or c."""
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def explain(error: BaseException, root: type, others: Mapping[str, type]) -> str | None:
    """One message for an exception that Hydra or OmegaConf raised while composing; None if it is not such a one."""
    chain = list(_chain(error))
    for cause in chain:
        if isinstance(cause, ConfigError):
            return str(cause)
        if isinstance(cause, MissingConfigException):
            return _missing_option(cause)
        if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
            key = str(cause.full_key)
            owner, _, leaf = key.rpartition(".")
            if not dataclasses.is_dataclass(cause.object_type) and owner in paths(root):
                return f"{owner} has no keys of its own; give it whole, as in '{owner}={{{leaf}: ...}}'"
            schema = cause.object_type if dataclasses.is_dataclass(cause.object_type) else root
            return str(unknown_key(key, schema, root, others))
        if isinstance(cause, ValidationError) and cause.full_key:
            return _no_weights(others) if _wants_weights(cause) else _wrong_type(cause)
        if isinstance(cause, YAMLError):
            return f"not valid YAML: {' '.join(str(cause).split())}"
    if isinstance(error, OverrideParseException):
        return f"cannot read the override {error.override!r}: {error.message.splitlines()[0]}"
    if isinstance(error, ConfigCompositionException) and "No match in the defaults list" in str(error):
        group = str(error).split("'")[1]
        if group == "sparse":
            return "sparse is no choice of one: give a list of methods, for instance sparse.methods=[dense,quest]"
        return f"this experiment has no group {group!r} to choose from"
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):
        return "the value of a group is the name of one of its files, as in engine=default, and no number or mapping"
    if isinstance(error, HydraException | OmegaConfBaseException):
        # Hydra wraps a broken interpolation in an exception without words.
        words = [str(cause).splitlines()[0] for cause in chain if str(cause)] or [type(error).__name__]
        return ": ".join(dict.fromkeys([words[0], words[-1]]))  # what failed, and why
    return None


def paths(schema: type, prefix: str = "") -> list[str]:
    """All dotted keys of a schema, groups included."""
    found = []
    for name, hint in typing.get_type_hints(schema).items():
        found.append(prefix + name)
        if dataclasses.is_dataclass(hint):
            found += paths(typing.cast(type, hint), f"{prefix}{name}.")
    return found


def describe(hint: Any) -> str:
    """A type as a reader of YAML would call it."""
    if isinstance(hint, types.UnionType):
        return " or ".join(describe(part) for part in typing.get_args(hint))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return f"a list of {describe(args[0]).removeprefix('a ')}"
    if origin is dict:
        return "a mapping"
    return TYPE_NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def _missing_option(error: MissingConfigException) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or ())
    if not group:
        return str(error).split("\n\nConfig search path", 1)[0]
    return f"{group}={name}: unknown; {nearest(name, options)}one of: {', '.join(options)}"


def _wants_weights(error: ValidationError) -> bool:
    """Whether a model without a path was given where there must be one."""
    return str(error.full_key) == "model.path" and "'None'" in str(error)


def _no_weights(others: Mapping[str, type]) -> str:
    takers = [name for name, schema in others.items() if "model.shape" in paths(schema)]
    return (
        "model.path: this experiment is about what a model says, and random weights say nothing; take model=smollm2, "
        f"or model=local model.path=FOLDER. model=random is for experiment={_listed(takers)}"
    )


def _wrong_type(error: ValidationError) -> str:
    message = f"{error.full_key}: {(error.msg or str(error)).splitlines()[0]}"
    hints = typing.get_type_hints(error.object_type) if dataclasses.is_dataclass(error.object_type) else {}
    leaf = str(error.full_key).rpartition(".")[2]
    return f"{message}; allowed: {describe(hints[leaf])}" if leaf in hints else message


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
