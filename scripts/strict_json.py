"""Results as strict JSON, whatever library the numbers came from.

JSON has no NaN and no infinity, and Python's default writes them all the same, in files that other readers refuse. Here
they become the strings "NaN", "Infinity" and "-Infinity", the form of Protocol Buffers' JSON mapping; Python's
``float()`` reads each back. Every finite number reads back equal.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from omegaconf import Container, OmegaConf


def dumps(value: Any, indent: int | None = None) -> str:
    """``value`` as strict JSON; see ``plain`` for what it may hold."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=indent)


def plain(value: Any) -> Any:
    """``value`` in JSON's own types.

    NumPy and torch scalars (bf16 too) become numbers and arrays lists, enums their values, paths text, dataclasses and
    OmegaConf nodes objects with their interpolations resolved, sets sorted lists.

    Raises:
        TypeError: anything else.
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Container):
        return plain(OmegaConf.to_container(value, resolve=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(entry) for entry in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"cannot write a {type(value).__name__} to a results file: {value!r}")
