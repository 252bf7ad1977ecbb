"""Help, and what it must not need: torch, transformers, wandb, triton, a GPU, or the source tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

BLOCKED = """
import sys
for name in {names!r}:
    sys.modules[name] = None  # an import of it raises ModuleNotFoundError
"""


def python(code: str, *arguments: str, cwd: Path, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Code in a fresh interpreter in which the packages ``without`` are not installed."""
    program = BLOCKED.format(names=without) + code
    command = [sys.executable, "-P", "-c", program, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


MAIN = "from octavo.scripts.main import main; sys.exit(main())"
HEAVY = ("torch", "transformers", "wandb", "triton", "matplotlib", "rapidfuzz", "open_clip")


def test_help_lists_experiments_without_heavy_imports(tmp_path: Path) -> None:
    before = os.times()
    result = python(MAIN, "--help", cwd=tmp_path, without=HEAVY)
    after = os.times()  # processor time: how busy the machine is does not count
    assert after.children_user + after.children_system - before.children_user - before.children_system < 3
    assert result.returncode == 0, result.stderr
    assert re.search(r"code_completion +Complete lines of real Python files", result.stdout)
    assert "generate " in result.stdout and "limit=2" in result.stdout and "resume=FOLDER" in result.stdout
    assert not list(tmp_path.iterdir())


def test_help_lists_experiments_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n# octavo --config-dir own experiment=mine\n# What I try\ndefaults: [generate, _self_]\n"
    )
    result = python(MAIN, "--help", "--config-dir", "own", cwd=tmp_path, without=HEAVY)
    assert "What I try" in result.stdout
    shown = python(MAIN, "--config-dir", "own", "experiment=mine", "--cfg", "job", cwd=tmp_path, without=HEAVY)
    assert shown.returncode == 0 and "experiment: generate" in shown.stdout


def test_profile_is_a_flag_too(tmp_path: Path) -> None:
    shown = python(MAIN, "experiment=throughput", "--profile", "--cfg", "job", cwd=tmp_path, without=HEAVY)
    assert shown.returncode == 0 and "profile: true" in shown.stdout, shown.stderr


def test_configuration_is_printed_from_anywhere(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "octavo.scripts.main", "--cfg", "job", "engine.page_tokens=32"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "page_tokens: 32" in result.stdout and "hydra:" not in result.stdout
    assert not list(tmp_path.iterdir())


def test_generation_on_a_cpu_without_triton_and_wandb(tmp_path: Path, tiny_model: Path) -> None:
    """And a run that asks for Triton is refused."""
    arguments = ["experiment=generate", f"model.path={tiny_model}", "tracking=off", "sampling.max_tokens=4"]
    served_and_refused = (
        "from octavo.scripts.main import main\n"
        "assert main() == 0\n"
        "print('refused', file=sys.stderr)\n"
        "sys.argv.append('engine.backend=triton')\n"
        "sys.exit(main())"
    )
    result = python(served_and_refused, *arguments, cwd=tmp_path, without=("triton", "wandb"))
    before, _, after = result.stderr.partition("refused\n")
    assert result.returncode == 1 and "wandb" not in before, result.stderr
    assert result.stdout.splitlines()[-1].startswith("run: ")
    assert "octavo: " in after and "backend" in after and "Traceback" not in after
