"""C sources of this folder, compiled by the C compiler of this machine the first time they are needed.

A compiled file takes about half a second to make and is kept in ``$OCTAVO_CACHE/kernels``, under a name that says what
it was made from: the sources, the command, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from octavo.kernels.cache_dir import cache_dir, code_in, put_code
from octavo.kernels.cpu import processor

FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fexceptions", "-fPIC", "-shared")
ABI = Path(__file__).with_name("torch_abi.h")

_log = logging.getLogger(__name__)


@cache
def library(
    source: Path, headers: tuple[Path, ...], flags: tuple[str, ...] = (), links: tuple[str, ...] = ()
) -> ctypes.CDLL | None:
    """A source, compiled and loaded; None, said once, where it cannot be.

    Args:
        headers: what it includes of this folder.
        flags: of the compiler, beside ``FLAGS``.
        links: of the linker, as ``-L`` and ``-l``.
    """
    try:
        compiler = _compiler()
        if not compiler:
            return None
        command = [*compiler, *FLAGS, *flags]
        texts = [path.read_text("utf-8") for path in (source, *headers)]
        made_from = [*texts, *command[1:], *links, _version(compiler), processor.flags()]
        name = hashlib.sha256("\0".join(made_from).encode(errors="surrogateescape")).hexdigest()[:32] + ".so"
        return ctypes.CDLL(str(_built(cache_dir() / "kernels" / name, [*command, str(source)], links)))
    except (OSError, ValueError, RuntimeError, subprocess.CalledProcessError) as error:
        # RuntimeError: there is no home folder; ValueError: $CC has an open quote
        why = (error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else "") or error
        _log.warning("the CPU %s kernel was not compiled; torch takes its place, slower: %s", source.stem, why)
        return None


@cache
def op_library(source: Path, headers: tuple[Path, ...]) -> ctypes.CDLL | None:
    """The same of a source that implements torch's ops from C, by ``torch_abi.h``, and has told torch of them."""
    links = (f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu")
    made = library(source, (ABI, *headers), links=links)
    return made if made is not None and made.register_ops() == 0 else None


def _built(library: Path, command: list[str], links: tuple[str, ...]) -> Path:
    """``library``, compiled if it is not there."""
    if code_in(library) is None:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            _run([*command, "-o", str(made), *links, "-lm"], check=True)
            put_code(library, made.read_bytes())
    return library


@cache
def _compiler() -> tuple[str, ...]:
    """``$CC``, which may bring arguments, or the first of cc, gcc and clang on the path; empty where there is none."""
    for candidate in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(candidate)
        if words and (path := shutil.which(words[0])):
            return (path, *words[1:])
    _log.info("no C compiler was found; decoding on the CPU with torch, which is slower")
    return ()


@cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"]).stdout


def _run(command: list[str], check: bool = False) -> subprocess.CompletedProcess[str]:
    """What a compiler says may be in any encoding, as paths are."""
    return subprocess.run(command, check=check, capture_output=True, text=True, errors="replace")
