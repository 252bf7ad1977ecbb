"""Files of calibrated bases, and those that octavo ships.

A file is NumPy's ``.npz``::

    basis        fp16 [layers, Hkv, D, rank]
    provenance   JSON text: method, rank, model (what ``model_identity`` says), weights_sha256, and the texts: tokens,
                 text_tokens, seed, python, documents {name: sha256}

The same calibration gives the same bytes: there is no date in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from octavo.core.interfaces import ModelSpec

SHIPPED = Path(__file__).parent / "data"
"""``<method>-<model>.npz``. Of one method, no two are of models with the same number and size of KV heads."""


@dataclass(frozen=True)
class BasisFile:
    """basis: fp32 [layers, Hkv, D, rank]."""

    basis: Tensor
    provenance: Mapping[str, Any]


def write(file: str | Path, basis: Tensor, provenance: Mapping[str, Any]) -> None:
    """Write a basis [layers, Hkv, D, rank] as fp16, with where it comes from."""
    with open(file, "wb") as out:
        text = np.array(json.dumps(provenance, sort_keys=True))
        np.savez_compressed(out, basis=basis.cpu().numpy().astype(np.float16), provenance=text)


def read(data: bytes, name: str) -> BasisFile:
    """What ``write`` has written; ``name`` is for messages.

    Raises:
        ValueError: something else.
    """
    try:
        with np.load(BytesIO(data), allow_pickle=False) as arrays:
            return BasisFile(torch.from_numpy(arrays["basis"]).float(), json.loads(str(arrays["provenance"])))
    except (ValueError, KeyError, OSError, EOFError, BadZipFile, AttributeError, TypeError) as error:
        raise ValueError(f"{name} is no calibration file, or it is damaged: {error}") from error


def shipped(method: str) -> list[Path]:
    """The files that come with octavo for a method, by name."""
    return sorted(SHIPPED.glob(f"{method}-*.npz"))


def model_identity(model: ModelSpec) -> dict[str, Any]:
    """By what a model is recognised as the one that a shipped file is for. Weights have no part in it, so a fine-tuned
    model is taken for the one it comes from; its own calibration may serve it better."""
    return {
        "name": model.name,
        "layers": model.layers,
        "q_heads": model.q_heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_tokens": model.max_tokens,
    }
