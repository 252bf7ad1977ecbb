"""W&B: nothing is sent unless asked for, one record a job, closed whatever happens, steps that never go back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.scripts import tracking
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema import Generate

from .conftest import Command
from .test_main import failing_at, stop


class FakeWandb:
    """Keeps what wandb would be told. ``runs`` are the records, in the order in which they were opened."""

    def __init__(self) -> None:
        self.runs: list[SimpleNamespace] = []
        self.Settings, self.Image = SimpleNamespace, str

    def Table(self, **fields: Any) -> Any:
        return SimpleNamespace(**fields)

    def init(self, **fields: Any) -> Any:
        assert all(run.exit_code is not None for run in self.runs), "the record before is still open"
        run = SimpleNamespace(**fields, steps=[], logged={}, summary={}, exit_code=None)

        def log(values: Mapping[str, Any], step: int | None = None) -> None:
            run.logged.update(values)
            if step is not None:
                run.steps.append(step)

        def finish(exit_code: int) -> None:
            run.exit_code = exit_code

        run.log, run.finish = log, finish
        self.runs.append(run)
        return run


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_config_rows_table_and_plots_are_logged(octavo: Command, tiny: list[str], wandb: FakeWandb) -> None:
    outcome = octavo(*tiny, "limit=2", "tracking=offline")
    [run] = wandb.runs
    assert outcome.code == 0 and run.exit_code == 0
    assert run.mode == "offline" and run.project == "octavo" and run.dir == str(outcome.folder)
    assert run.config["engine.memory_fraction"] == 0.9 and run.config["sparse.methods"][0] == "dense"
    assert run.steps == [0, 1] and "dense.edit_similarity" in run.logged
    assert run.summary["octavo/quest/kv_bytes_per_token"] == outcome.metrics["rows"][2]["kv_bytes_per_token"]
    assert len(run.logged["rows"].data) == 3 and run.logged["plots/pareto"].endswith("plots/pareto.png")


def test_an_interrupted_record_is_failed_and_a_resumed_one_goes_on(
    octavo: Command, tiny: list[str], wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing_at(2, stop, patch)
        first = octavo(*tiny, "tracking=offline")
    assert octavo(f"resume={first.folder}", "tracking=offline").code == 0
    one, two = wandb.runs
    assert (one.exit_code, two.exit_code) == (1, 0)
    assert one.id == two.id, "its parts are one run"
    assert one.steps + two.steps == [0, 1, 2, 3, 4], "each step once, never back"


def test_each_job_of_a_sweep_has_its_own_record(
    octavo: Command, tiny: list[str], wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at(1, stop, monkeypatch)
    # One item a job, so the second job is the one that fails.
    assert octavo("-m", *tiny, "limit=1", "seed=0,1,2", "tracking=offline").code == 1
    assert [run.exit_code for run in wandb.runs] == [0, 1, 0]
    assert len({run.id for run in wandb.runs}) == 3
    assert [run.config["seed"] for run in wandb.runs] == [0, 1, 2]


def config(mode: str) -> Generate:
    made = Generate(experiment="generate")
    made.model.path, made.tracking.mode = "owner/name", mode
    return made


def test_without_wandb_offline_goes_on_and_online_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert isinstance(tracking.start(config("offline"), tmp_path, resumed=False), tracking.NoTracker)
    assert "pip install 'octavo[wandb]'" in caplog.text
    with pytest.raises(ConfigError, match=r"octavo\[wandb\].*tracking=off"):
        tracking.start(config("online"), tmp_path, resumed=False)


def test_online_without_a_login_is_refused(tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    class UsageError(Exception):
        pass

    def init(**_: Any) -> None:
        raise UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "errors", SimpleNamespace(Error=UsageError), raising=False)
    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(
        ConfigError, match=r"tracking=online: No API key configured\. Use .* \(or take tracking=offline\)"
    ):
        tracking.start(config("online"), tmp_path, resumed=False)


OFFLINE = """
import socket, sys, threading
calls = []
for name in ("connect", "connect_ex"):
    def counted(self, address, real=getattr(socket.socket, name)):
        if self.family != socket.AF_UNIX and not str(address[0]).startswith("127."):
            calls.append(address)
            raise OSError("no network in this test")
        return real(self, address)
    setattr(socket.socket, name, counted)
def lookup(host, *rest, real=socket.getaddrinfo, **more):
    calls.append(host)
    raise OSError("no network in this test")
socket.getaddrinfo = lookup
from pathlib import Path
from octavo.scripts import tracking
from octavo.scripts.schema import Generate
config = Generate(experiment="generate")
config.model.path = "owner/name"
for resumed in (False, True):
    tracker = tracking.start(config, Path(sys.argv[1]), resumed=resumed)
    tracker.log(int(resumed), {"quest": {"edit_similarity": 50.0, "perplexity": float("nan")}})
    tracker.log_results([{"name": "octavo", "method": "quest", "ci": [1, 2]}, {"name": "octavo", "x": "text"}], {})
    tracker.finish(int(resumed))
print(calls)
"""


def test_offline_sends_no_packet(tmp_path: Path) -> None:
    """The real wandb. Its service is a program of its own, which the sandbox of this test does not see; that it is
    told to stay offline, error reports included, is what its environment says."""
    pytest.importorskip("wandb")
    result = subprocess.run([sys.executable, "-P", "-c", OFFLINE, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"
    records = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(records) == 2 and len({file.name for file in records}) == 1, "two parts of one run"


def test_offline_is_said_before_the_import(tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    import os

    tracking.start(config("offline"), tmp_path, resumed=False)
    assert (os.environ["WANDB_MODE"], os.environ["WANDB_ERROR_REPORTING"]) == ("offline", "false")


def test_steps_count_items(octavo: Command, tiny: list[str], wandb: FakeWandb) -> None:
    octavo(*tiny, "tracking=offline", "task.max_prompt_tokens=110")
    assert wandb.runs[0].steps == [0, 1, 2, 3, 4], "an item that failed counts, too"
