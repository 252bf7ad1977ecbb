"""octavo's cache of what is made or unpacked once on a machine: compiled kernels, the embedded model.

A file of it may be read by other processes while it is written, so it is written beside its place and moved in. Behind
machine code, where no loader looks, stands its digest: a file that was cut short would end the process that loads it.
"""

import os
import tempfile
from hashlib import sha256
from pathlib import Path

_DIGEST_BYTES = sha256().digest_size


def cache_dir() -> Path:
    """``$OCTAVO_CACHE``, by default ``~/.cache/octavo``. It may not exist yet."""
    return Path(os.environ.get("OCTAVO_CACHE") or Path.home() / ".cache" / "octavo").expanduser().absolute()


def put(file: Path, content: bytes) -> None:
    """Raises OSError where it cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        part = Path(folder) / file.name
        part.write_bytes(content)
        part.replace(file)


def put_code(file: Path, code: bytes) -> None:
    """With its digest. Raises OSError where it cannot be written."""
    put(file, code + sha256(code).digest())


def code_in(file: Path) -> bytes | None:
    """What ``put_code`` has written; None where nothing is, or it is not whole."""
    try:
        found = file.read_bytes()
    except OSError:
        return None
    code, digest = found[:-_DIGEST_BYTES], found[-_DIGEST_BYTES:]
    return code if sha256(code).digest() == digest else None
