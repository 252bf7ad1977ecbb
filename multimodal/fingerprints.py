"""Which weights: a 256-bit fingerprint of a module or of a weight file, computed once."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

if TYPE_CHECKING:
    from torch import Tensor, nn

PERSON = b"octavo-weight-v1"
FINGERPRINT_BYTES = 32
PIECE_BYTES = 1 << 20


def weights_fingerprint(source: nn.Module | str | os.PathLike[str]) -> bytes:
    """32 bytes (BLAKE2b) that are the same in every process for the same weights.

    Of a module: the class and printed settings of every submodule (QuickGELU and GELU have no weights to tell them
    apart), and name, dtype, shape and bytes of every parameter and buffer, those included that are not saved; not the
    device. It is kept until the module is changed in any way that torch counts; writing through ``tensor.data`` is not.
    Of a file: its bytes, kept until its size or time of change differs. The two never agree.

    Raises:
        ValueError: not a module or a regular file, or tensors that have no bytes (on "meta", sparse).
    """
    if isinstance(source, str | os.PathLike):
        return _of_file(source)
    from torch import nn

    if not isinstance(source, nn.Module):
        raise ValueError(f"weights are those of an nn.Module or a file, got {type(source).__name__}")
    return _of_module(source)


def _of_file(source: str | os.PathLike[str]) -> bytes:
    try:
        path = Path(source).resolve(strict=True)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{os.fspath(source)!r} is not a regular file; give the file that holds the weights")
        return _read(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise ValueError(f"the weights {os.fspath(source)!r} cannot be read: {error}") from error


@lru_cache(maxsize=64)
def _read(path: Path, *_state: int) -> bytes:
    state = hashlib.blake2b(b"file", digest_size=FINGERPRINT_BYTES, person=PERSON)
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            state.update(piece)
    return state.digest()


@dataclass(frozen=True)
class _Known:
    """A fingerprint, and the state of the module when it was made.

    Tensors are held weakly, and compared before their addresses are: memory of one that was replaced may come back as
    another's.
    """

    names: list[str]
    tensors: list[tuple[ref[Tensor], int, int]]
    digest: bytes

    def is_of(self, names: list[str], tensors: list[Tensor]) -> bool:
        return self.names == names and all(
            known() is tensor and (address, version) == _state(tensor)
            for (known, address, version), tensor in zip(self.tensors, tensors, strict=True)
        )


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def _of_module(module: nn.Module) -> bytes:
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    tensors = [tensor for _, tensor in named]
    try:
        names = [_describe(name, part) for name, part in module.named_modules()]
        names += [f"{name}: {tensor.dtype} {list(tensor.shape)}" for name, tensor in named]
        known = _known.get(module)
        if known is None or not known.is_of(names, tensors):
            digest = _digest(names, tensors)
            known = _Known(names, [(ref(tensor), *_state(tensor)) for tensor in tensors], digest)
            _known[module] = known
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"the weights of {type(module).__name__} cannot be read: {error}") from error
    return known.digest


def _describe(name: str, part: nn.Module) -> str:
    kind = type(part)
    return f"{name}: {kind.__module__}.{kind.__qualname__}({part.extra_repr()})"


def _state(tensor: Tensor) -> tuple[int, int]:
    """Where its data lie, and how often torch has written there."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _digest(names: list[str], tensors: list[Tensor]) -> bytes:
    import torch

    state = hashlib.blake2b(b"module", digest_size=FINGERPRINT_BYTES, person=PERSON)
    for name in names:
        state.update(len(name.encode()).to_bytes(8, "little") + name.encode())
    for tensor in tensors:  # their sizes are in the names
        flat = tensor.detach().cpu().reshape(-1)
        state.update(flat.view(torch.uint8).numpy().data)
    return state.digest()
