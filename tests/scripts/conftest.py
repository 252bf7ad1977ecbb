"""A tiny model with a byte-level tokenizer, a small item file, and the command run inside the test's process."""

from __future__ import annotations

import copy
import gzip
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="session", autouse=True)
def _compose_once() -> Iterator[None]:
    """A method of ours is composed once, not twice by every run; with folders of a user's in the search path, anew.
    And a command is composed once, not twice: Hydra composes it to learn ``hydra.mode``, which no test sets."""
    from hydra._internal.hydra import Hydra

    from octavo.scripts import build

    known: dict[tuple[str, str], Any] = {}
    compose = build._compose

    def composed(name: str, group: str = "sparse") -> Any:
        if name.endswith((".yaml", ".yml")) or "/" in name or "file://" in build._search_path():
            return compose(name, group)
        if (name, group) not in known:
            known[name, group] = compose(name, group)
        return copy.deepcopy(known[name, group])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_compose", composed)
        patch.setattr(Hydra, "get_mode", lambda self, config_name, overrides: None)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, Llama style: 2 layers, 4 query and 2 KV heads, head size 16, one token a byte, fp32."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny") / "model"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(["<eos>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        eos_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def with_tokenizer_of(model: Path, folder: Path) -> Path:
    """A new folder for another model, with the tokenizer of one that is there."""
    folder.mkdir()
    for file in model.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="session")
def windowed_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, Gemma-3 style: 5 of 6 layers have a window of 24, 1 KV head of 16; the tiny model's tokenizer."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    folder = with_tokenizer_of(tiny_model, tmp_path_factory.mktemp("windowed") / "model")
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        sliding_window=24,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
        initializer_range=0.5,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo model with random weights: 16 tokens an image, 2 layers, 4 query and 2 KV heads, head size 16."""
    from octavo.multimodal.demo_model import DemoConfig, DemoModel, save_demo

    shape = DemoConfig(
        patch=24, tower_width=64, tower_layers=1, hidden=64, inner=128, layers=2, heads=4, kv_heads=2, max_tokens=1024
    )
    try:
        model = DemoModel(shape)
    except ImportError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("demo") / "model"
    save_demo(folder, model, "random weights\n")
    return folder


@pytest.fixture(scope="session")
def items_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five items of some 200 bytes; the in-file code of the last is longer than that of the others."""
    from octavo.scripts.tasks.items import CodeItem, dump_items, prompt_text, sha256

    items = []
    for number in range(5):
        fields: dict[str, Any] = {
            "item_id": f"demo/use.py:{number}",
            "source": "demo",
            "version": "1",
            "licence": "MIT",
            "path": "use.py",
            "setting": "cross_file_first",
            "context": (("helper.py", f"def helper_{number}(value):\n    return value * {number}\n" * (2 + number)),),
            "prefix": f"from helper import helper_{number}\n\n\n{'VALUE = 1' * (number // 4 * 8)}\ndef main(argument):",
            "gold": f"    return helper_{number}(argument)",
            "uses": f"helper_{number}",
            "defined_in": "helper.py",
            "tokens": 0,
            "prompt_sha256": "",
        }
        prompt = prompt_text(CodeItem(**fields))
        items.append(CodeItem(**{**fields, "tokens": len(prompt), "prompt_sha256": sha256(prompt)}))
    file = tmp_path_factory.mktemp("items") / "items.jsonl.gz"
    file.write_bytes(gzip.compress(dump_items(items).encode()))
    return file


@pytest.fixture(scope="session")
def kvpress_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that is run as the Python of kvpress's environment, and answers without one."""
    file = tmp_path_factory.mktemp("kvpress") / "python"
    file.write_text(f"#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name('fake_kvpress.py')}\n")
    file.chmod(0o755)
    return file


@dataclass
class Outcome:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def folder(self) -> Path:
        """The run folder, from the last line printed."""
        last = self.out.rstrip("\n").splitlines()[-1]
        assert last.startswith("run: "), self.out
        return Path(last.removeprefix("run: "))

    @property
    def metrics(self) -> dict[str, Any]:
        return strict(self.folder / "metrics.json")


def strict(file: Path) -> Any:
    """A file as strict JSON: NaN and infinities are no numbers."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{file} holds {constant}, which is not JSON")

    return json.loads(file.read_text(), parse_constant=refuse)


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


Command = Callable[..., Outcome]


@pytest.fixture
def octavo(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The command in this process, from a directory of its own; untracked unless ``tracking=`` says otherwise."""
    from octavo.scripts import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Outcome:
        quiet = () if any("tracking" in argument for argument in arguments) else ("tracking=off",)
        monkeypatch.setattr(sys, "argv", ["octavo", *arguments, *quiet])
        capfd.readouterr()
        code = main.main()
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture
def tiny(tiny_model: Path, items_file: Path) -> list[str]:
    """Arguments that make the main job tiny: 5 items, 3 methods, a budget of two pages."""
    return [
        f"model.path={tiny_model}",
        f"task.path={items_file}",
        "task.max_new_tokens=6",
        "sparse.methods=[dense,streaming,quest]",
        "sparse.budget_tokens=128",
        "sparse.overrides={streaming: {dense_layers: []}, quest: {dense_layers: []}}",
    ]
