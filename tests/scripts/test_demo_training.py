"""The script that trains the demo model: a whole run of a few steps, and one that was interrupted."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from octavo.multimodal.demo_data import EXAMS
from octavo.multimodal.demo_model import DemoConfig
from octavo.multimodal.demo_training import Trainer
from octavo.scripts import train_demo

TINY = DemoConfig(
    patch=48, tower_width=64, tower_layers=1, hidden=32, inner=32, layers=1, heads=2, kv_heads=1, max_tokens=512
)
RECIPE = {"steps": 6, "train_seconds": 1e9, "step_images": 16, "exam_every": 2, "exam_size": 1, "warmup_steps": 2}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the script's ``main`` in a folder of its own with more arguments."""
    pytest.importorskip("open_clip")
    monkeypatch.setattr(train_demo, "SIZES", {"full": (TINY, RECIPE)})
    # Six steps of anything: only few exams, which take most of the time.
    few = {name: EXAMS[name] for name in ("colour", "compare")}
    monkeypatch.setattr("octavo.multimodal.demo_training.EXAMS", few)
    monkeypatch.setattr(train_demo, "EXAMS", few)

    def call(name, *arguments):
        paths = ["--folder", str(tmp_path / name), "--checkpoint", str(tmp_path / f"{name}.pt")]
        fixed = ["--device", "cpu", "--workers", "0", "--final-size", "2"]
        monkeypatch.setattr(sys, "argv", ["train_demo", *paths, *fixed, *arguments])
        train_demo.main()
        return tmp_path / name

    return call


def weights(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_a_run_writes_the_model_and_a_card_with_its_numbers(run, capsys):
    folder = run("whole")
    card = (folder / "README.md").read_text()
    assert card in capsys.readouterr().out
    for name in ("colour", "compare"):
        assert f"\n| {name} | {EXAMS[name].images} | " in card
    assert "\n| task | images | whole | alone | blank | wrong |\n|---|---|---|---|---|---|\n| colour | 1 | " in card
    assert '"alone": 0.5' in card and '"steps": 6' in card and "\n| training | 6 steps, the weights of step " in card
    before, photographs = card.split("\n## Photographs\n")
    assert "\n| task | images | whole | alone |\n|---|---|---|---|\n| colour, on photographs | 1 | " in photographs
    assert "admiral (matplotlib)" in photographs and "\n| in image k of 4, among photographs | 4 | " in photographs
    run("whole", "--photographs", "--final-size", "3")
    again = (folder / "README.md").read_text()
    assert again.startswith(before) and again.count("## Photographs") == 1 and "3 questions each" in again
    assert "license: apache-2.0" in card and "| licence | Apache-2.0 |" in card
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 32


def test_a_run_may_begin_with_the_weights_of_another(run, tmp_path):
    first = run("first")
    second = run("second", "--begin-with", str(first), "--steps", "2", "--warmup-steps", "1000000", "--seed", "1")
    for name, tensor in weights(first).items():
        # Two steps at next to no learning rate, rounded to bf16, leave everything where it was.
        assert torch.allclose(tensor.float(), weights(second)[name].float(), atol=2**-6, rtol=2**-6), name
    card = (second / "README.md").read_text()
    assert "| training, run 1 | 6 steps" in card and "| training, run 2 | 2 steps" in card and '"seed": 1' in card
    third = run("third", "--begin-with", str(second), "--steps", "1")
    assert "| training, run 3 | 1 steps" in (third / "README.md").read_text()
    with pytest.raises(ValueError, match=r"holds no demo model, it has no config\.json"):
        run("fourth", "--begin-with", str(tmp_path / "nowhere"))


def test_a_run_that_broke_off_ends_as_if_it_had_not(run, monkeypatch, capsys):
    whole = run("whole")
    step = Trainer.step

    def breaks(trainer, batches, rate):
        breaks.steps += 1
        if breaks.steps == 4:
            raise KeyboardInterrupt
        return step(trainer, batches, rate)

    breaks.steps = 0
    monkeypatch.setattr(Trainer, "step", breaks)
    with pytest.raises(KeyboardInterrupt):
        run("broken")
    monkeypatch.setattr(Trainer, "step", step)
    broken = run("broken")
    assert "goes on from step 2" in capsys.readouterr().out
    assert all(torch.equal(tensor, weights(broken)[name]) for name, tensor in weights(whole).items())


def test_a_stretch_leaves_a_checkpoint_of_its_own_run(run, capsys, tmp_path):
    run("cut", "--stretch-seconds", "0")
    assert "stopped after 0 s at step 0; the same command goes on" in capsys.readouterr().out
    assert not (tmp_path / "cut").exists()
    with pytest.raises(ValueError, match=r"is of a run with seed=0, and this one has 1; give the same"):
        run("cut", "--seed", "1")
    assert (run("cut", "--workers", "1") / "README.md").is_file()
