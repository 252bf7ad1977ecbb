import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from octavo.scripts.setup_sources import main, pip_download, setup_sources
from octavo.scripts.tasks.sources import Source, python_files, read_sources

PERMISSIVE = {"MIT", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0"}


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "made" / "toy-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy/a.py", "x = 1\n")
        archive.writestr("toy/deep/b.py", "y = 2\n")
        archive.writestr("toy/data.txt", "no code")
        archive.writestr("other/c.py", "z = 3\n")
    return path


@pytest.fixture
def source(wheel):
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Source("toy", "1.0", wheel.name, digest, "MIT", "Copyright A. Toymaker", "LICENSE", ("toy",), ())


@pytest.fixture
def index(wheel):
    """A download from an index that has the one wheel, and the calls it got."""
    calls = []

    def download(source, folder):
        calls.append(source.name)
        (folder / wheel.name).write_bytes(wheel.read_bytes())

    download.calls = calls
    return download


def test_a_source_is_fetched_once(tmp_path, source, index):
    folder = setup_sources(tmp_path / "cache", [source], index)
    assert folder == tmp_path / "cache" / "sources"
    assert python_files(source, folder) == {"toy/a.py": "x = 1\n", "toy/deep/b.py": "y = 2\n"}
    setup_sources(tmp_path / "cache", [source], index)
    assert index.calls == ["toy"]
    assert sorted(p.name for p in folder.iterdir()) == ["toy-1.0", "toy-1.0-py3-none-any.whl"]


def test_a_wrong_hash_is_refused_with_both_and_leaves_nothing(tmp_path, source, index):
    pinned = replace(source, sha256="0" * 64)
    with pytest.raises(ValueError, match=rf"has sha256 {source.sha256}, but {'0' * 64} is pinned for toy-1\.0"):
        setup_sources(tmp_path, [pinned], index)
    assert list((tmp_path / "sources").iterdir()) == []


def test_a_damaged_wheel_in_the_cache_is_noticed(tmp_path, source, index):
    folder = setup_sources(tmp_path, [source], index)
    (folder / source.wheel).write_bytes(b"other")
    with pytest.raises(ValueError, match="delete the file to fetch it again"):
        setup_sources(tmp_path, [source], index)


def test_an_interrupted_unpacking_is_done_again(tmp_path, source, index, wheel):
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / source.wheel).write_bytes(wheel.read_bytes())
    assert len(python_files(source, setup_sources(tmp_path, [source], index))) == 2
    assert index.calls == []


def test_another_wheel_than_the_pinned_is_named(tmp_path, source, index):
    pinned = replace(source, wheel="toy-1.0-cp311-none-any.whl")
    with pytest.raises(RuntimeError, match=r"gave \['toy-1\.0-py3-none-any\.whl'\] for toy-1\.0, not toy-1\.0-cp311"):
        setup_sources(tmp_path, [pinned], index)


def test_pip_is_asked_for_the_pinned_version_alone(tmp_path, source, monkeypatch):
    asked = []

    def run(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "no network\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"cannot download toy==1\.0: no network$"):
        pip_download(source, tmp_path)
    (command,) = asked
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", "toy==1.0"} <= set(command)


def test_the_command_ends_with_a_message(tmp_path, monkeypatch):
    def fail(cache):
        raise RuntimeError(f"no network for {cache}")

    monkeypatch.setattr("octavo.scripts.setup_sources.setup_sources", fail)
    with pytest.raises(SystemExit, match=f"setup_sources: no network for {tmp_path}"):
        main(["--cache", str(tmp_path)])


def test_excluded_files_are_not_read(tmp_path, source, index):
    folder = setup_sources(tmp_path, [source], index)
    assert list(python_files(replace(source, exclude=("toy/a.py",)), folder)) == ["toy/deep/b.py"]


def test_committed_pins():
    sources = read_sources()
    assert 8 <= len(sources) <= 12
    assert len({s.name for s in sources}) == len(sources)
    for source in sources:
        assert source.licence in PERMISSIVE
        assert source.wheel.startswith(source.folder + "-py") and source.wheel.endswith("-none-any.whl")
        assert len(source.sha256) == 64
