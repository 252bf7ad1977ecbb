"""BR-69: results are strict JSON whatever the numbers came from, and read back equal."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from octavo.scripts.settings import flat
from octavo.scripts.strict_json import dumps, plain


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Point:
    x: float
    label: str


VALUES: dict[str, tuple[Any, Any]] = {
    "NumPy int64": (np.int64(2**53 + 1), 2**53 + 1),
    "NumPy float32": (np.float32(0.1), float(np.float32(0.1))),
    "NumPy bool": (np.bool_(True), True),
    "NumPy array": (np.arange(3), [0, 1, 2]),
    "bf16 scalar": (torch.tensor(0.1, dtype=torch.bfloat16), 0.10009765625),
    "tensor": (torch.tensor([[1, 2]]), [[1, 2]]),
    "NaN": (math.nan, "NaN"),
    "infinity": (math.inf, "Infinity"),
    "minus infinity": (-math.inf, "-Infinity"),
    "NumPy NaN": (np.float32("nan"), "NaN"),
    "bf16 infinity": (torch.tensor(math.inf, dtype=torch.bfloat16), "Infinity"),
    "path": (Path("/a/b"), "/a/b"),
    "enum": (Colour.RED, "red"),
    "int enum": (Level.HIGH, 3),
    "dataclass": (Point(1.5, "p"), {"x": 1.5, "label": "p"}),
    "configuration": (OmegaConf.create({"a": 1, "b": {"c": "${a}"}}), {"a": 1, "b": {"c": 1}}),
    "tuple": ((1, 2.5), [1, 2.5]),
    "set": ({3, 1}, [1, 3]),
    "integer keys": ({0: "a"}, {"0": "a"}),
    "float": (0.1 + 0.2, 0.1 + 0.2),
    "text": ("é\n\u2028", "é\n\u2028"),
    "nothing": (None, None),
}


@pytest.mark.parametrize(("value", "expected"), VALUES.values(), ids=list(VALUES))
def test_reads_back_equal(value: Any, expected: Any) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(dumps({"value": value}), parse_constant=refuse) == {"value": expected}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_strings_that_float_reads(value: float) -> None:
    back = float(plain(value))
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(TypeError, match="cannot write a object"):
        dumps({"a": [object()]})


def test_nested_keys_are_flattened_with_dots() -> None:
    assert flat({"a": {"b": 1, "c": {"d": [2]}}, "e": {}}) == {"a.b": 1, "a.c.d": [2], "e": {}}
