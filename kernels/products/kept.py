"""Choices among proposals, on disk: for a card, a cuBLASLt and kernels of octavo's own, in ``$OCTAVO_CACHE``."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

from octavo.kernels.cache_dir import cache_dir, put
from octavo.kernels.hopper import product_streams as streams
from octavo.kernels.hopper import product_tiles as tiles
from octavo.kernels.hopper.compiler import HERE, usable
from octavo.kernels.products import cublaslt
from octavo.kernels.triton.settings import chip


def file(device: int) -> Path:
    card = torch.device("cuda", device)
    own = f"-{own_kernels()}" if usable(card) else ""
    return cache_dir() / f"products-{chip(card)}-{cublaslt.version()}{own}.json"


@cache
def own_kernels() -> str:
    """A name for octavo's own proposals: where a kernel or a way has changed, all is chosen anew."""
    sources = [source.read_text() for kind in ("product*.cu", "*.h") for source in sorted(HERE.glob(kind))]
    return sha256("\0".join([*sources, repr(streams.WAYS), repr(tiles.TILINGS)]).encode()).hexdigest()[:12]


def choices(device: int) -> dict[str, object]:
    """Proposals chosen so far, by other processes too, by shape, cuBLASLt's in hexadecimal digits: as the file says,
    which may have been damaged."""
    try:
        found = json.loads(file(device).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def add(device: int, name: str, proposal: str) -> None:
    """Add a choice to those that are kept by now."""
    chosen = {**choices(device), name: proposal}
    with suppress(OSError):  # a cache that cannot be written is none
        put(file(device), json.dumps(chosen, indent=1).encode())
