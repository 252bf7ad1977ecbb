"""The run folder: owned by one run, valid after any interruption, whole on a full disk."""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from octavo.scripts.paths import resume_argument
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import DiskFullError, Run, saved_config
from octavo.scripts.schema import Config, Generate

from .conftest import strict


@pytest.fixture
def config() -> Generate:
    made = Generate(experiment="generate", prompts=["a", "b"])
    made.model.path = "owner/name"
    return made


def test_a_new_run_is_incomplete_until_it_says_so(tmp_path: Path, config: Config) -> None:
    run = Run.create(tmp_path / "run", config)
    run.write_rows([{"name": "octavo", "value": float("nan")}])
    metrics = strict(run.folder / "metrics.json")
    assert metrics["experiment"] == "generate" and metrics["complete"] is False
    assert metrics["rows"] == [{"name": "octavo", "value": "NaN"}]
    assert {"python", "torch", "transformers", "cpu", "threads", "date"} <= metrics["environment"].keys()
    run.write_rows([], complete=True)
    assert strict(run.folder / "metrics.json")["complete"] is True


def test_saved_settings_read_back_equal(tmp_path: Path, config: Config) -> None:
    config.engine.page_policies = {"text": 24}
    Run.create(tmp_path / "run", config).close()
    assert saved_config(tmp_path / "run") == config


def test_a_folder_with_a_run_is_refused_and_left_alone(tmp_path: Path, config: Config) -> None:
    Run.create(tmp_path / "run", config).close()
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    with pytest.raises(ConfigError, match=f"{tmp_path}/run already holds a run.*resume="):
        Run.create(tmp_path / "run", config)
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before


def test_one_process_at_a_time(tmp_path: Path, config: Config) -> None:
    run = Run.create(tmp_path / "run", config)
    with pytest.raises(ConfigError, match="in use by another process"):
        Run.resume(run.folder, config)
    run.close()
    Run.resume(run.folder, config).close()


def test_another_configuration_is_refused_by_the_keys_that_differ(tmp_path: Path, config: Generate) -> None:
    Run.create(tmp_path / "run", config).close()
    config.engine.page_tokens, config.sampling.top_k = 32, 4
    config.tracking.mode = "off"  # changes no result
    with pytest.raises(
        ConfigError, match=r"engine.page_tokens \(16 there, 32 now\), sampling.top_k \(0 there, 4 now\);"
    ):
        Run.resume(tmp_path / "run", config)


@pytest.mark.parametrize("torn", ['{"item": 2, "met', '{"item": 2}', "\x00\x00"])
def test_a_torn_last_line_is_dropped(torn: str, tmp_path: Path, config: Config) -> None:
    run = Run.create(tmp_path / "run", config)
    run.add({"item": 0})
    run.add({"item": 1})
    run.close()
    with (run.folder / "samples.jsonl").open("a") as file:
        file.write(torn)
    again = Run.resume(run.folder, config)
    assert again.done("item") == {(0,), (1,)}
    again.add({"item": 2})
    lines = (run.folder / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"item": 0}, {"item": 1}, {"item": 2}] == again.samples


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, config: Config) -> None:
    Run.create(tmp_path / "run", config).close()
    (tmp_path / "run" / "samples.jsonl").write_text('{"item": 0}\n{"item\n{"item": 2}\n')
    with pytest.raises(ConfigError, match=r"samples.jsonl: line 2 is damaged"):
        Run.resume(tmp_path / "run", config)


@pytest.mark.parametrize(
    ("line", "message"), [("5", "is no sample, but a int"), ('{"a": 1}', "no item"), ('{"item": []}', "no item")]
)
def test_a_line_that_is_no_sample_is_named(line: str, message: str, tmp_path: Path, config: Config) -> None:
    Run.create(tmp_path / "run", config).close()
    (tmp_path / "run" / "samples.jsonl").write_text(f'{{"item": 0}}\n{line}\n')
    with pytest.raises(ConfigError, match=rf"samples.jsonl: line 2 is no sample.*{message.split(', ')[-1]}"):
        Run.resume(tmp_path / "run", config).done("item")


class FullDisk:
    """A file that takes ``room`` more bytes."""

    def __init__(self, file: object, room: int) -> None:
        self._file, self.room = file, room

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = bytes(data[: self.room])
        self.room -= len(part)
        written: Callable[[bytes], int] = self._file.write  # type: ignore[attr-defined]
        return written(part)


@pytest.mark.parametrize("room", [0, 5])
def test_a_full_disk_loses_nothing_that_was_written(room: int, tmp_path: Path, config: Config) -> None:
    run = Run.create(tmp_path / "run", config)
    run.write_rows([{"name": "octavo"}])
    run.add({"item": 0, "text": "first"})
    whole = (run.folder / "samples.jsonl").read_bytes()
    real, run._samples_file = run._samples_file, FullDisk(run._samples_file, room)  # type: ignore[assignment]
    with pytest.raises(
        DiskFullError, match=r"no space left while writing .*samples.jsonl; octavo resume=.* after 1 samples"
    ):
        run.add({"item": 1, "text": "second"})
    assert (run.folder / "samples.jsonl").read_bytes() == whole and len(run.samples) == 1
    run._samples_file = real
    run.add({"item": 1, "text": "second"})
    assert strict(run.folder / "metrics.json")["rows"] == [{"name": "octavo"}]


def test_a_full_disk_leaves_the_old_metrics(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(tmp_path / "run", config)
    run.write_rows([{"name": "octavo"}])
    before = (run.folder / "metrics.json").read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match=r"metrics\.json; free some space"):
        run.write_rows([{"name": "octavo"}, {"name": "other"}])
    assert (run.folder / "metrics.json").read_bytes() == before
    assert not [name for name in os.listdir(run.folder) if name.startswith(".")], "no scratch file stays"


def test_a_disk_that_is_full_from_the_start_leaves_the_folder_usable(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFullError, match=r"config\.yaml; free some space"):
            Run.create(tmp_path / "run", config)
    Run.create(tmp_path / "run", config).close()


@pytest.mark.parametrize("name", ["plain-1.x", "with space", "Übung", "a'b", 'a"b', "a\\", 'a\\"b', "a,b=c", "(x)"])
def test_the_hint_to_resume_can_be_pasted(name: str, tmp_path: Path) -> None:
    """Through the shell's rules for words, and Hydra's for values."""
    [argument] = shlex.split(resume_argument(tmp_path / name))
    override = OverridesParser.create().parse_override(argument)
    assert override.key_or_group == "resume" and override.value() == str(tmp_path / name)
