"""BR-65: what is installed is whole. Every YAML of the tree and every folder with code is in the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("core", "kernels", "sparse", "multimodal", "configs", "scripts")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tree as it is, built from a copy, since a build writes beside its sources."""
    source = tmp_path_factory.mktemp("source")
    for name in [*CODE, "pyproject.toml", "README.md", "LICENSE"]:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=out)
    return next(out.glob("*.whl"))


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_yaml_and_module(wheel: Path) -> None:
    inside = files(wheel)
    for folder in CODE:
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".yaml") and "__pycache__" not in file.parts:
                assert f"octavo/{file.relative_to(ROOT)}" in inside


def test_the_wheel_holds_the_calibrated_bases(wheel: Path) -> None:
    bases = [file.name for file in (ROOT / "sparse" / "data").iterdir()]
    assert bases and {f"octavo/sparse/data/{name}" for name in bases} <= files(wheel)


def test_the_wheel_holds_the_items_and_their_notice(wheel: Path) -> None:
    assert {f"octavo/scripts/tasks/data/{name}" for name in ("items.jsonl.gz", "NOTICE")} <= files(wheel)


def test_every_folder_with_code_is_declared() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    with_code = {file.parent for folder in CODE for file in (ROOT / folder).rglob("*.py")}
    assert {".".join(["octavo", *folder.relative_to(ROOT).parts]) for folder in with_code} == declared


@pytest.mark.slow
def test_the_wheel_runs_from_elsewhere(wheel: Path, tmp_path: Path, tiny_model: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    (tmp_path / "elsewhere").mkdir()
    # Without the editable install, which would answer for the same names.
    program = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
from octavo.scripts import main
assert "installed" in main.__file__, main.__file__
sys.exit(main.main())
"""
    command = [sys.executable, "-c", program, "experiment=generate", f"model.path={tiny_model}", "tracking=off"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    result = subprocess.run(command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"run: {tmp_path}/elsewhere/runs/generate/")
