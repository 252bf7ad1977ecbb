"""What is kept next to kvpress: the command with a stand-in for its process, and that process with a stand-in press."""

from __future__ import annotations

import importlib.metadata
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.scripts import kvpress_kept
from octavo.scripts.experiments.kept_tokens import agreement

from .conftest import Command, samples

ARGUMENTS = (
    "experiment=kept_tokens", "documents=1", "kinds=[code]", "contexts=[200,208]", "budget_tokens=160",
    "only=[streaming,knorm,pyramidkv]",
)  # fmt: skip


def test_a_run(octavo: Command, tiny_model: Path, kvpress_python: Path) -> None:
    outcome = octavo(*ARGUMENTS, f"model.path={tiny_model}", f"kvpress_python={kvpress_python}")
    assert outcome.code == 0, outcome.err
    found = {(row["method"], row["same"], row["length"]): row for row in outcome.metrics["rows"]}
    assert list(dict.fromkeys(length for _, _, length in found)) == [200, 208]
    for length in (200, 208):
        assert [step for method, step, at in found if (method, at) == ("pyramidkv", length)] == [
            "as composed",
            "a window of 32",
            "a slope of 5",
            "a pyramid of the whole budget",
            "the same number of tokens a layer",
        ]
        streaming = found["streaming", "as composed", length]
        assert streaming["equal_percent"] == streaming["jaccard_percent"] == 100 and not streaming["differing_layers"]
        assert streaming["sets"] == 2 * 2 and streaming["kept_tokens"] == streaming["kvpress_kept_tokens"] == 160
        knorm = found["knorm", "no sinks and no recent tokens", length]
        assert knorm["equal_percent"] < 100 and knorm["differing_layers"] == [0, 1] and knorm["within_percent"] < 100
        uneven = found["pyramidkv", "the same number of tokens a layer", length]
        assert uneven["kept_tokens"] == uneven["kvpress_kept_tokens"]
        assert found["pyramidkv", "a window of 32", length]["kvpress_kept_tokens"] == 160
    assert (outcome.folder / "plots" / "agreement.png").is_file()


def test_an_interrupted_run_goes_on(octavo: Command, tiny_model: Path, kvpress_python: Path) -> None:
    first = octavo(*ARGUMENTS, f"model.path={tiny_model}", f"kvpress_python={kvpress_python}")
    file = first.folder / "samples.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]))
    assert octavo(f"resume={first.folder}").code == 0
    done = [(sample["item"], sample["method"]) for sample in samples(first.folder)]
    assert len(done) == len(set(done)) == len(lines) == 2 * (1 + 2 + 5)


def test_a_pair_of_one_s_own(octavo: Command, tiny_model: Path, kvpress_python: Path) -> None:
    own = "pairs.mine={method: tova, press: StreamingLLMPress, arguments: {n_sink: 2}}"
    given = (f"model.path={tiny_model}", f"kvpress_python={kvpress_python}", own, "only=[mine]", "contexts=[208]")
    outcome = octavo(*ARGUMENTS, *given)
    assert outcome.code == 0, outcome.err
    (row,) = outcome.metrics["rows"]
    assert row["method"] == "mine" and row["kept_tokens"] == 160


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("kvpress_python=null", "kvpress_python has no value; kvpress pins an older transformers"),
        ("kvpress_python=nowhere/python", "no such program; kvpress pins"),
        ("kvpress_python=/bin/false", "/bin/false ended: it said nothing"),
        ("pairs.knorm.press=BrokenPress", "kvpress (StreamingLLMPress, BrokenPress, PyramidKVPress"),
        ("pairs.knorm.method=quest", "pairs.knorm.method=quest: it keeps all tokens"),
        ("only=[knrom]", "did you mean 'knorm'?"),
        ("contexts=[2000]", "the engine's sequences have at most 1024"),
        ("budget_tokens=8", "must be 0 to budget.tokens=8"),
        ("pairs.mine={method: tova}", "pairs.mine.press has no value"),
        (
            "pairs.mine={method: tova, press: TOVAPress, step: []}",
            "pairs.mine: unknown key 'step'; did you mean 'steps'?",
        ),
    ],
)
def test_refusals(override: str, message: str, octavo: Command, tiny_model: Path, kvpress_python: Path) -> None:
    outcome = octavo(*ARGUMENTS, f"model.path={tiny_model}", f"kvpress_python={kvpress_python}", override)
    assert outcome.code == 1 and message in outcome.err, outcome.err


def test_windows_are_refused(octavo: Command, windowed_model: Path, kvpress_python: Path) -> None:
    outcome = octavo(*ARGUMENTS, f"model.path={windowed_model}", f"kvpress_python={kvpress_python}")
    assert outcome.code == 1 and "its layers have windows" in outcome.err


def test_agreement() -> None:
    ours = [[[0, 1, 2, 3], [0, 1]], [[5], [5]]]
    theirs = [[[0, 1, 2, 3], [0, 1, 2, 3]], [[5], [6]]]
    assert agreement(ours, theirs) == {
        "equal_percent": 50.0,
        "jaccard_percent": 62.5,
        "within_percent": 75.0,
        "differing_tokens_max": 2,
        "kept_tokens": 2.0,
        "kvpress_kept_tokens": 2.5,
        "sets": 4,
        "differing_layers": [0, 1],
    }


@pytest.mark.parametrize("length", [7, 100, 999, 1000, 4096])
def test_the_ratio_keeps_what_was_asked_for(length: int) -> None:
    for tokens in {1, 2, length // 3, length - 1, length}:
        assert int(length * (1 - kvpress_kept.ratio(tokens, length))) == tokens


class FirstPress:
    """Keeps the first tokens, as a press of kvpress is used; with ``masks``, by masking the others in head 1."""

    def __init__(self, compression_ratio: float, masks: bool = False) -> None:
        self.ratio, self.masks = compression_ratio, masks

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        from transformers import AutoTokenizer

        assert AutoTokenizer.from_pretrained(model.config.name_or_path).chat_template is None

        def drop(module: Any, inputs: Any, keywords: Any, output: Any) -> None:
            for number, layer in enumerate(keywords["past_key_values"].layers):
                count = int(layer.keys.shape[2] * (1 - self.ratio))
                if self.masks:
                    gone = torch.arange(count, layer.keys.shape[2])
                    zero = torch.zeros_like(gone)
                    model.model.layers[number].self_attn.masked_key_indices = (zero, zero + 1, gone)
                else:
                    layer.keys = layer.keys[:, :, :count].flip(2)  # in any order

        hook = model.model.register_forward_hook(drop, with_kwargs=True)
        yield
        hook.remove()


class PerLayerPress:
    """As kvpress's wrapper is made; keeps what the last layer's ratio says."""

    def __new__(cls, press: Any, ratios: list[float]) -> Any:
        press.ratio = ratios[-1]
        return press


def test_the_process(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(FirstPress=FirstPress, PerLayerCompressionPress=PerLayerPress)
    monkeypatch.setitem(sys.modules, "kvpress", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 1")
    monkeypatch.setattr(FirstPress.__init__, "__defaults__", (0.0, False))
    ids = list(range(20, 40))

    def press(tokens: Any, **arguments: Any) -> dict[str, Any]:
        return {"press": "FirstPress", "arguments": arguments, "tokens": tokens}

    asked = [
        {"model": str(tiny_model), "dtype": "float32", "device": "cpu"},
        {"ids": ids, "presses": [press(7), press(20), press(5, masks=True), press([3, 4])]},
        {"ids": ids, "presses": [press(7, wrong=1)]},
        {"ids": ids, "presses": [press(2)]},
    ]
    answers = io.StringIO()
    kvpress_kept.main(io.StringIO("".join(json.dumps(line) + "\n" for line in asked)), answers)
    hello, first, second, third = map(json.loads, answers.getvalue().splitlines())
    assert hello == {name: f"{name} 1" for name in ("kvpress", "torch", "transformers")}
    seven, whole, masked, per_layer = first["kept"]
    assert seven == [[list(range(7))] * 2] * 2 and whole == [[list(range(20))] * 2] * 2
    assert masked == [[list(range(20)), list(range(5))]] * 2
    assert per_layer == [[list(range(4))] * 2] * 2
    assert second["error"].startswith("TypeError") and third["kept"] == [[[[0, 1]] * 2] * 2]
