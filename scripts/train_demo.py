"""Trains the demo model that sees: `python -m octavo.scripts.train_demo`, minutes on one H200.

It needs torch, transformers and open_clip, and no network. Long runs may be done in stretches: one that ends at
`--stretch-seconds` leaves its checkpoint and says so, and the same command goes on from it.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from octavo.multimodal.demo_data import EXAMS, Batch, training_step
from octavo.multimodal.demo_model import FOLDER, DemoConfig, DemoModel, load_demo, load_weights, save_demo
from octavo.multimodal.demo_photographs import PHOTOGRAPH_EXAMS, PHOTOGRAPHS, photograph_exam, photographs
from octavo.multimodal.demo_training import SHOWN, Recipe, Trainer
from octavo.multimodal.scenes_prompts import words

EXAM_SEED, FINAL_SEED = 1, 2
"""Of the exams by which the best weights are chosen, and of those whose accuracy is published."""

SIZES = {
    "full": (DemoConfig(), {}),
    # To see on a CPU, in minutes, that everything works and that the loss falls.
    "small": (
        DemoConfig(
            patch=16, tower_width=128, tower_layers=3, hidden=128, inner=256, layers=3, heads=4, kv_heads=2
        ),
        {"step_images": 128, "groups": 2, "warmup_steps": 50, "learning_rate": 1.5e-3},
    ),
}  # fmt: skip
"""Of the model, and what its recipe has instead of the defaults."""


@dataclass
class State:
    """How far a run has come; seconds are those of all stretches. ``weights`` are the best so far, on the CPU."""

    step: int = 0
    seconds: float = 0.0
    score: float = -1.0
    weights: Mapping[str, torch.Tensor] | None = None
    best_step: int = 0


@dataclass(frozen=True)
class TrainingRun:
    """What a saved folder says of a run that made it. ``recipe``: the fields of ``Recipe``."""

    steps: int
    best_step: int
    seconds: int
    device: str
    recipe: dict[str, Any]


RUNS = "training.json"
"""Of a saved folder: its runs, oldest first."""


WAYS = {"whole": False, "alone": True}
"""How images are read -> whether each sees itself only."""

COLUMNS = {
    **{name: ("right", alone) for name, alone in WAYS.items()},
    **{shown: (shown, False) for shown in SHOWN if shown != "right"},
}
"""Of the model card: what is shown, and whether each image sees itself only."""


class Steps(Dataset[list[Batch]]):
    """The batches of step 0, 1, ... of one phase, made wherever they are asked for."""

    def __init__(self, recipe: Recipe, mixture: tuple[float, int], image_tokens: int, first: int) -> None:
        self.recipe, self.mixture, self.image_tokens, self.first = recipe, mixture, image_tokens, first

    def __len__(self) -> int:
        return self.recipe.steps - self.first

    def __getitem__(self, number: int) -> list[Batch]:
        descriptions, groups = self.mixture
        recipe = self.recipe
        return training_step(
            recipe.seed,
            self.first + number,
            descriptions=descriptions,
            groups=groups,
            step_images=recipe.step_images,
            follow_up=recipe.follow_up,
            image_tokens=self.image_tokens,
            alone=recipe.alone,
        )


def train(trainer: Trainer, state: State, checkpoint: Path, *, stretch_seconds: float | None, workers: int) -> bool:
    """Train on until the recipe's end, or for a stretch; whether the end is reached.

    1. Worker processes draw questions; the device draws images.
    2. Loss and accuracy are looked at every ``exam_every`` steps; the best mean accuracy, over all exams with images
       that see all in front of them and with images that see themselves only, keeps its weights.
    3. The learning rate and the mixture of tasks follow the progress, so a run that is short of time is whole, too.
    """
    recipe, started, before = trainer.recipe, time.monotonic(), state.seconds
    losses: list[torch.Tensor] = []

    def progress() -> float:
        return recipe.progress(state.step, state.seconds)

    while (now := progress()) < 1:
        mixture = recipe.mixture(now)
        steps = Steps(recipe, mixture, trainer.model.config.image_tokens, state.step)
        for batches in _loaded(steps, workers):
            state.seconds = before + time.monotonic() - started
            late = stretch_seconds is not None and state.seconds - before >= stretch_seconds
            if late or progress() >= 1 or recipe.mixture(progress()) != mixture:
                break
            losses.append(trainer.step(batches, recipe.rate(state.step, progress())))
            state.step += 1
            if state.step % 100 == 0:
                loss = torch.stack(losses).mean().item()  # the only wait for the device
                losses.clear()
                _say(f"step {state.step} {state.seconds:.0f} s progress {progress():.3f} loss {loss:.4f}")
            if state.step % recipe.exam_every == 0:
                _examine(trainer, state)
                _save_checkpoint(checkpoint, trainer, state)
        if late:
            _save_checkpoint(checkpoint, trainer, state)
            return False
    _examine(trainer, state)
    _save_checkpoint(checkpoint, trainer, state)
    return True


def publish(trainer: Trainer, state: State, folder: Path, exam_size: int, earlier: Sequence[TrainingRun] = ()) -> None:
    """Write the folder: the best weights, and a card with their accuracy on questions that nothing was chosen by.

    Args:
        earlier: the runs whose weights this one began with, oldest first.
    """
    assert state.weights is not None, "the end of training always examines"
    rounded = {name: tensor.bfloat16().float() for name, tensor in state.weights.items()}
    trainer.model.load_state_dict(rounded)  # what is examined is what is saved
    table = {name: trainer.exams(FINAL_SEED, exam_size, *how) for name, how in COLUMNS.items()}
    device = torch.cuda.get_device_name() if trainer.device.type == "cuda" else "CPU"
    runs = [*earlier, TrainingRun(state.step, state.best_step, round(state.seconds), device, asdict(trainer.recipe))]
    card = model_card(trainer, runs, table, exam_size)
    if photographs():
        card += photograph_section(trainer, exam_size)
    size = save_demo(folder, trainer.model, card)
    (folder / RUNS).write_text(json.dumps([vars(run) for run in runs], indent=2) + "\n")
    _say(f"{size:,} bytes in {folder}")
    print(card, flush=True)


def examine_folder(folder: Path, size: int, seed: int) -> None:
    """Accuracy through octavo's engine, whole answers and their verdicts; prefix sharing and photographs included."""
    from octavo.core import Engine, EngineConfig
    from octavo.multimodal.demo_exam import engine_exams, photograph_scores, shared_questions
    from octavo.multimodal.reuse import ZeroCopyReuse

    demo = load_demo(folder)
    engine = Engine(demo.model, demo.tokenizer, EngineConfig(), encoders={"image": demo.encoder})
    shared = shared_questions(engine, seed, size)
    scores = {f"{shown} images": engine_exams(engine, seed, size, shown) for shown in SHOWN}
    alone = Engine(demo.model, demo.tokenizer, EngineConfig(), encoders={"image": demo.encoder}, reuse=ZeroCopyReuse())
    scores["right images, each alone"] = engine_exams(alone, seed, size)
    there = photographs()
    if there:
        scores[f"photographs: {', '.join(there)}"] = photograph_scores(engine, seed, size)
    if len(there) < len(PHOTOGRAPHS):
        _say(f"photographs: {len(there)} of {len(PHOTOGRAPHS)}; for the others, pip install 'octavo[photographs]'")
    found = {kind: {name: score._asdict() for name, score in own.items()} for kind, own in scores.items()}
    print(json.dumps({**found, "two questions an image": shared._asdict()}, indent=2), flush=True)


def examine_photographs(folder: Path, config: DemoConfig, device: str, size: int) -> None:
    """Write that section of a saved folder's card anew, with the photographs that there are now."""
    model = DemoModel(config)
    load_weights(folder, model)
    section = photograph_section(Trainer(model, Recipe(), torch.device(device)), size)
    card = folder / "README.md"
    card.write_text(card.read_text().split(SECTION)[0] + section)
    _say(section)


SECTION = "\n## Photographs\n"


def photograph_section(trainer: Trainer, size: int) -> str:
    """Of the model card.

    Raises:
        ImportError: there are no photographs.
    """
    found = {}
    for name in PHOTOGRAPH_EXAMS:
        questions, images = photograph_exam(name, FINAL_SEED, size)
        right = [trainer.accuracy(questions, images=images, alone=alone) for alone in WAYS.values()]
        found[name] = len(images[0]), right
    shown = ", ".join(f"{name} ({PHOTOGRAPHS[name][0]})" for name in photographs())
    return f"""{SECTION}
Out of distribution: training has seen no photograph, and the model has no words for what one shows. *On photographs*:
the things that are asked about lie on one, which is darkened. *Among photographs*: half of the images that have no part
in the answer, and at least one, are photographs as they are. {size} questions each, whole answers. Photographs, and the
packages that ship them: {shown}.

{_accuracies([*WAYS], found)}
"""


def model_card(
    trainer: Trainer, runs: Sequence[TrainingRun], table: Mapping[str, Mapping[str, float]], exam_size: int
) -> str:
    """README.md of the folder, in numbers of its runs."""
    trained = "\n".join(
        f"| training{f', run {number}' if len(runs) > 1 else ''} | {run.steps:,} steps, the weights of step "
        f"{run.best_step:,}; {run.seconds} s on {run.device} |\n| its recipe | `{json.dumps(run.recipe)}` |"
        for number, run in enumerate(runs, 1)
    )
    parts = {"tower": trainer.model.tower, "projector": trainer.model.projector, "language": trainer.model.language}
    sizes = ", ".join(f"{name} {sum(p.numel() for p in part.parameters()):,}" for name, part in parts.items())
    rows = {name: (EXAMS[name].images, [table[column][name] for column in COLUMNS]) for name in EXAMS}
    return f"""---
license: apache-2.0
language: en
pipeline_tag: image-text-to-text
---

# octavo's demo model

A vision-language model that is small enough to come with a package, and whose answers depend on what it is shown: a ViT
of open_clip, a projector and a Llama, trained from random weights. It is there to show and to test paged KV caches of
text and images, and for nothing else: its world is coloured shapes and digits, its language {len(words())} words.

```python
from octavo.core import Engine, EngineConfig
from octavo.multimodal.demo_model import demo_prompt, load_demo

model, tokenizer, encoder = load_demo()
engine = Engine(model, tokenizer, EngineConfig(), encoders={{"image": encoder}})
engine.generate([demo_prompt([image], "what colour is the circle ?")])
```

| | |
|---|---|
| parameters | {sizes} |
| image | 96 x 96 pixels, {trainer.model.config.image_tokens} tokens |
| data | scenes drawn while training, from the recipe's seed; nothing was downloaded, no photograph was seen |
| made by | `python -m octavo.scripts.train_demo`; each later run `--begin-with` the folder of the one before |
{trained}
| licence | Apache-2.0 |

Accuracy in points, {exam_size} questions each, from a seed that neither training nor the choice of weights has used;
whole answers, greedily; one that says what was seen before what follows (`circle left , ring right , left . yes`) is
right only if all of it is. *Whole*: an image's tokens have read all that is in front of them. *Alone*: they have read
their image only, as under `ZeroCopyReuse(context_tokens=0)`, so that its KV serves behind any text. *Blank*: the images
are empty; *wrong*: they are those of another question; both are read whole. Six combinations of colour and shape are
never drawn in training; "new pairs" are questions about these alone. Measured as in training;
`python -m octavo.scripts.train_demo --examine` measures through the engine, what follows apart.

{_accuracies([*COLUMNS], rows)}
"""


def _accuracies(columns: Sequence[str], rows: Mapping[str, tuple[int, Sequence[float]]]) -> str:
    """A table of exams: how many images each is about, and accuracy by column, as shares in points."""
    head = f"| task | images | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}\n"
    return head + "\n".join(
        f"| {name} | {images} | {' | '.join(f'{100 * share:.1f}' for share in shares)} |"
        for name, (images, shares) in rows.items()
    )


def _loaded(steps: Steps, workers: int) -> Iterator[list[Batch]]:
    # Batches stay numpy arrays, which go through a pipe: tensors would need shared memory, of which containers have
    # little.
    yield from DataLoader(steps, batch_size=None, num_workers=workers, collate_fn=_as_they_are)


def _as_they_are(batches: list[Batch]) -> list[Batch]:
    return batches


def _examine(trainer: Trainer, state: State) -> None:
    found = {way: trainer.exams(EXAM_SEED, trainer.recipe.exam_size, alone=alone) for way, alone in WAYS.items()}
    means = {way: sum(own.values()) / len(own) for way, own in found.items()}
    score = sum(means.values()) / len(means)
    if score > state.score:
        state.score, state.best_step = score, state.step
        state.weights = {name: tensor.cpu().clone() for name, tensor in trainer.model.state_dict().items()}
    _say(f"step {state.step} {state.seconds:.0f} s mean accuracy {100 * score:.1f}")
    for way, own in found.items():
        accuracies = ", ".join(f"{name} {100 * accuracy:.0f}" for name, accuracy in own.items())
        _say(f"  {way} {100 * means[way]:.1f}: {accuracies}")


def _save_checkpoint(path: Path, trainer: Trainer, state: State) -> None:
    scratch = path.with_suffix(".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "recipe": asdict(trainer.recipe),
            "config": asdict(trainer.model.config),
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "state": vars(state),
        },
        scratch,
    )
    scratch.replace(path)


def _resume(path: Path, trainer: Trainer) -> State:
    """Raises ValueError if the run that is there is another one."""
    saved = torch.load(path, map_location=trainer.device, weights_only=True)
    now = {"recipe": asdict(trainer.recipe), "config": asdict(trainer.model.config)}
    for part, values in now.items():
        for key, value in values.items():
            if saved[part].get(key) != value:
                raise ValueError(
                    f"{path} is of a run with {key}={saved[part].get(key)!r}, and this one has {value!r}; give the "
                    f"same, or another --checkpoint"
                )
    trainer.model.load_state_dict(saved["model"])
    trainer.optimizer.load_state_dict(saved["optimizer"])
    state = State(**saved["state"])
    if state.weights is not None:
        state.weights = {name: tensor.cpu() for name, tensor in state.weights.items()}
    _say(f"goes on from step {state.step}, {state.seconds:.0f} s, in {path}")
    return state


def _say(line: str) -> None:
    print(line, flush=True)


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the model goes (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/demo.pt"), help="resumed if there (%(default)s)")
    parser.add_argument("--stretch-seconds", type=float, help="stop after so long, to be resumed")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=4, help="processes that draw questions (%(default)s)")
    parser.add_argument("--begin-with", type=Path, help="a folder of an earlier run, whose weights are the first")
    parser.add_argument("--final-size", type=int, default=512, help="questions an exam in the model card (%(default)s)")
    parser.add_argument("--examine", action="store_true", help="train nothing; examine --folder through the engine")
    parser.add_argument(
        "--photographs",
        action="store_true",
        help="train nothing; measure anew what --folder's card says of photographs",
    )
    for field in fields(Recipe):
        if field.name != "descriptions":
            kind = type(field.default)
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, help=f"of the recipe ({field.default})")
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    if given.examine:
        examine_folder(given.folder, given.final_size, FINAL_SEED)
        return
    config, changes = SIZES[given.size]
    if given.photographs:
        examine_photographs(given.folder, config, given.device, given.final_size)
        return
    asked = {field.name: getattr(given, field.name, None) for field in fields(Recipe)}
    recipe = Recipe(**{**changes, **{name: value for name, value in asked.items() if value is not None}})
    model = DemoModel(config, recipe.seed)
    earlier: list[TrainingRun] = []
    if given.begin_with is not None:
        load_weights(given.begin_with, model)
        earlier = [TrainingRun(**run) for run in json.loads((given.begin_with / RUNS).read_text())]
    trainer = Trainer(model, recipe, torch.device(given.device))
    state = _resume(given.checkpoint, trainer) if given.checkpoint.is_file() else State()
    if train(trainer, state, given.checkpoint, stretch_seconds=given.stretch_seconds, workers=given.workers):
        publish(trainer, state, given.folder, given.final_size, earlier)
    else:
        _say(f"stopped after {given.stretch_seconds:.0f} s at step {state.step}; the same command goes on")


if __name__ == "__main__":
    main()
