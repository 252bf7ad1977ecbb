"""docs/add-a-method.md is followed from its first line to its last, as it stands there, in an empty folder."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from octavo.scripts import setup_model

from .conftest import Command, with_tokenizer_of

PAGE = (Path(__file__).parents[2] / "docs" / "add-a-method.md").read_text()
SMALLER = ("limit=1", "max_new_tokens=8", "page_map=false", "sparse.probe_every=0")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def four_layers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with four layers, since the method leaves the first two dense."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = with_tokenizer_of(tiny_model, tmp_path_factory.mktemp("four") / "model")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny_model, num_hidden_layers=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_the_page_is_followed(
    octavo: Command, four_layers: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Files are written, commands run, in order. In place of the embedded model stands a tiny one."""
    monkeypatch.setattr(setup_model, "model_dir", lambda: four_layers)
    written, ran = {}, []
    for language, block in BLOCKS:
        named = re.match(r"# ([\w.]+)\n", block)
        if named:
            Path(named[1]).write_text(block)
            written[named[1]] = len(block.splitlines())
            continue
        assert language == "bash", f"a block that is neither a file nor a command:\n{block}"
        for command in block.replace("\\\n", "").splitlines():
            words = shlex.split(command)
            ran.append(words[0])
            if words[0] == "mkdir":
                assert words == ["mkdir", "my_method", "&&", "cd", "my_method"]
                Path("my_method").mkdir()
                monkeypatch.chdir("my_method")
                monkeypatch.syspath_prepend(Path.cwd())
            elif words[0] == "python":
                runpy.run_path(words[1], run_name="__main__")
                assert re.fullmatch(r"\d\d % of dense's bytes\n", capfd.readouterr().out)
            else:
                assert words[:2] == ["PYTHONPATH=.", "octavo"]
                given = [word for word in words[2:] if not word.startswith("limit=")]
                outcome = octavo(*given, *SMALLER, f"model.path={four_layers}")
                assert outcome.code == 0, outcome.err
                rows = {row["method"]: row for row in outcome.metrics["rows"]}
                assert [*rows] == ["dense", "quest", "landmarks", "oracle", "random"]
                mine = rows["landmarks"]
                assert mine["kv_bytes_per_token"] == mine["predicted_kv_bytes_per_token"]
                assert mine["kv_bytes_per_token"] < rows["dense"]["kv_bytes_per_token"]
                assert 0 < mine["digest_bytes_per_token"] < rows["quest"]["digest_bytes_per_token"]
    assert ran == ["mkdir", "python", "PYTHONPATH=.", "PYTHONPATH=."]
    assert written["landmarks.py"] <= 30 and written["landmarks.yaml"] <= 15
    sys.modules.pop("landmarks", None)


def test_the_page_names_what_is_there() -> None:
    root = Path(__file__).parents[2]
    for name in re.findall(r"`((?:sparse|core|configs)/[\w/]*(?:\.py)?)`", PAGE):
        assert (root / name).exists(), name
    for link in re.findall(r"\]\(([\w./-]+\.md)", PAGE):
        assert (root / "docs" / link).exists(), link
