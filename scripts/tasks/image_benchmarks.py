"""Benchmarks of images in public schemas, made from seeds: what is asked and shown are the demo model's scenes.

| name           | schema      | what is asked                                                                     |
|----------------|-------------|-----------------------------------------------------------------------------------|
| `scenes`       | `mm_niah`   | one thing of one image: colour, place, count, relation, ...; whether two are alike |
| `needle`       | `mm_niah`   | which of 2, 4 or 8 images has a digit, or a thing; how many of a colour each has  |
| `multihop`     | `mm_niah`   | the shape in image i that has the colour of a shape in image j                    |
| `pairs`        | `nlvr2`     | a sentence about four pairs of images, true of two of them                        |
| `unanswerable` | `muirbench` | a colour or a shape, with options; and the same where what is asked about is gone |
| `captions`     | `coco`      | everything in an image                                                            |

Sentences and questions are in the words of the demo model, and so are right answers: yes and no for true and false,
``none`` for the option that says so. Where the demo model says what it saw before it says what follows, what follows is
the answer. ``write`` makes files of them that any reader of the schema takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from octavo.scripts.tasks.image_items import PLACEHOLDER, ImageItem, items_of

if TYPE_CHECKING:
    import numpy as np

    from octavo.multimodal.scenes import Scene

COUNTS = (2, 4, 8)
IMAGE_TOKENS = 144
"""Of the demo model, for the lengths that records state."""
PAIRS_A_SENTENCE = 4
NONE_OF_THESE = "none of the choices provided"


@dataclass(frozen=True)
class Benchmark:
    """``records`` of a schema, and the images that they name, uint8 [SIDE, SIDE, 3]."""

    name: str
    schema: str
    records: list[dict[str, Any]]
    images: Mapping[str, np.ndarray]

    def items(self) -> list[ImageItem]:
        found = ((f"{self.name}: record {number}", raw) for number, raw in enumerate(self.records))
        return items_of(self.schema, found, self.images.__getitem__, self.name, instruct=False)


def make(name: str, seed: int, items: int) -> Benchmark:
    """``items`` records, or a few more where they belong together; equal arguments give equal ones."""
    schema, draw_records = BENCHMARKS[name]
    rng = Random(f"benchmark {name} {seed}")
    scenes: dict[str, Scene] = {}
    made: list[dict[str, Any]] = []
    while len(made) < items:
        made += draw_records(rng, len(made), scenes)
    from octavo.multimodal.scenes_render import draw

    return Benchmark(name, schema, made, dict(zip(scenes, draw([*scenes.values()]), strict=True)))


def write(benchmark: Benchmark, folder: Path) -> Path:
    """The annotation file, as the schema has it, with the images below ``folder``/images. Gives the file back."""
    from PIL import Image

    for name, pixels in benchmark.images.items():
        target = folder / "images" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(target)
    if benchmark.schema == "coco":
        file = folder / f"{benchmark.name}.json"
        images = [{"id": raw["id"], "file_name": raw["file_name"]} for raw in benchmark.records]
        captions = [(raw["id"], caption) for raw in benchmark.records for caption in raw["captions"]]
        annotations = [
            {"id": number, "image_id": image, "caption": caption} for number, (image, caption) in enumerate(captions)
        ]
        file.write_text(json.dumps({"images": images, "annotations": annotations}))
        return file
    file = folder / f"{benchmark.name}.jsonl"
    file.write_text("".join(json.dumps(raw) + "\n" for raw in benchmark.records))
    return file


def _scenes(rng: Random, first: int, scenes: dict[str, Scene]) -> list[dict[str, Any]]:
    from octavo.multimodal.scenes_questions import ask
    from octavo.multimodal.scenes_tasks import SCENE_TASKS, verdict

    tasks = [*(task for task in SCENE_TASKS if task != "describe"), "compare", "same"]  # captions describe
    task = tasks[first % len(tasks)]
    asked = ask(rng, task, 1 if task in SCENE_TASKS else 2)
    return [_haystack(first, scenes, asked.scenes, asked.question, verdict(asked.answer), task, None)]


def _needle(rng: Random, first: int, scenes: dict[str, Scene]) -> list[dict[str, Any]]:
    from octavo.multimodal.scenes import COLOURS
    from octavo.multimodal.scenes_questions import ask
    from octavo.multimodal.scenes_tasks import verdict

    images = COUNTS[first // 3 % len(COUNTS)]
    task = ("needle_digit", "needle_object", "counting")[first % 3]
    if task != "counting":
        asked = ask(rng, task, images)
        answer = verdict(asked.answer)
        depth = (int(answer) - 1) / (images - 1)
        return [_haystack(first, scenes, asked.scenes, asked.question, answer, f"{task} of {images}", depth)]
    asked = ask(rng, "indexed_count", images)
    colour = rng.choice(tuple(COLOURS))
    counts = [len(scene.of(colour=colour)) for scene in asked.scenes]
    questions = [f"in image {number} , how many {colour} objects ?" for number in range(1, images + 1)]
    question = f"how many {colour} objects are in each image ?"
    return [_haystack(first, scenes, asked.scenes, question, counts, f"{task} of {images}", None, questions)]


def _multihop(rng: Random, first: int, scenes: dict[str, Scene]) -> list[dict[str, Any]]:
    from octavo.multimodal.scenes_questions import ask
    from octavo.multimodal.scenes_tasks import verdict

    images = COUNTS[first % len(COUNTS)]
    asked = ask(rng, "multihop", images)
    answer = verdict(asked.answer)
    return [_haystack(first, scenes, asked.scenes, asked.question, answer, f"multihop of {images}", None)]


def _haystack(
    number: int,
    scenes: dict[str, Scene],
    shown: tuple[Scene, ...],
    question: str,
    answer: str | list[int],
    task: str,
    depth: float | None,
    questions: list[str] | None = None,
) -> dict[str, Any]:
    """A record of MM-NIAH."""
    names = [f"{task.replace(' ', '_')}-{number}-{place}.png" for place in range(len(shown))]
    scenes.update(zip(names, shown, strict=True))
    context = " ".join(f"image {place} : {PLACEHOLDER}" for place in range(1, len(shown) + 1))
    spoken = len(f"{context} {question}".replace(PLACEHOLDER, "").split())
    seen = IMAGE_TOKENS * len(shown)
    needles = names if depth is None or isinstance(answer, list) else [names[int(answer) - 1]]
    meta = {"placed_depth": depth, "context_length": spoken + seen, "context_length_text": spoken,
            "context_length_image": seen, "num_images": len(shown), "needles": needles, "choices": None,
            "choices_image_path": None, "task": task}  # fmt: skip
    if questions is not None:
        meta["questions"] = questions
    return {
        "id": number,
        "images_list": names,
        "context": context,
        "question": question,
        "answer": answer,
        "meta": meta,
    }


def _pairs(rng: Random, first: int, scenes: dict[str, Scene]) -> list[dict[str, Any]]:
    """One sentence and four pairs, drawn until two are true and two false."""
    from octavo.multimodal.scenes import TRAINED
    from octavo.multimodal.scenes_questions import ask
    from octavo.multimodal.scenes_tasks import SCENE_TASKS, verdict

    number = first // PAIRS_A_SENTENCE
    exists = SCENE_TASKS["exists"]
    look, side = exists.subject(rng, TRAINED), rng.randrange(2)
    alike = number % 2 == 0
    sentence = "do the images show the same objects ?" if alike else f"in image {side + 1} , {exists.question(look)}"
    left = {"yes": PAIRS_A_SENTENCE // 2, "no": PAIRS_A_SENTENCE // 2}
    found: list[dict[str, Any]] = []
    while len(found) < PAIRS_A_SENTENCE:
        if alike:
            _, pair, _, said = ask(rng, "same", 2)
        else:
            pair = tuple(exists.scene(rng, TRAINED, look) for _ in range(2))
            said = exists.answer(pair[side], look)
        answer = verdict(said)
        if not left[answer]:
            continue
        left[answer] -= 1
        name = f"octavo-{number}-{len(found)}"
        scenes.update({f"{name}-img{place}.png": scene for place, scene in enumerate(pair)})
        found.append({"identifier": f"{name}-0", "sentence": sentence, "label": str(answer == "yes")})
    return found


def _unanswerable(rng: Random, first: int, scenes: dict[str, Scene]) -> list[dict[str, Any]]:
    """A question about one of two images, and its twin, in which what is asked about has been taken away."""
    from octavo.multimodal.scenes import COLOURS, SHAPES, TRAINED
    from octavo.multimodal.scenes_tasks import NONE, SCENE_TASKS

    name = ("colour", "shape")[first // 2 % 2]
    task = SCENE_TASKS[name]
    subject = task.subject(rng, TRAINED)
    side = rng.randrange(2)
    while True:
        shown = [task.scene(rng, TRAINED, subject) for _ in range(2)]
        answer = task.answer(shown[side], subject)
        if answer != NONE:
            break
    kept = tuple(thing for thing in shown[side].things if subject not in thing.pair)
    without = [*shown]
    without[side] = shown[side]._replace(things=kept)
    others = [word for word in (COLOURS if name == "colour" else SHAPES) if word != answer]
    options = [*rng.sample(others, 3), answer]
    rng.shuffle(options)
    options.append(NONE_OF_THESE)
    found = []
    for offset, (pair, right) in enumerate(((shown, answer), (without, NONE_OF_THESE))):
        number, twin = first + offset, first + 1 - offset
        names = [f"unanswerable-{number}-{place}.png" for place in range(2)]
        scenes.update(zip(names, pair, strict=True))
        question = f"in image {side + 1} , {task.question(subject)}"
        found.append(
            {"idx": str(number), "task": f"unanswerable {name}", "image_relation": "Independent",
             "image_type": "Others", "question": question, "options": options,
             "answer": chr(ord("A") + options.index(right)), "image_list": names, "counterpart_idx": str(twin)}
        )  # fmt: skip
    return found


def _captions(rng: Random, first: int, scenes: dict[str, Scene]) -> list[dict[str, Any]]:
    from octavo.multimodal.scenes_questions import ask

    asked = ask(rng, "describe", 1)
    name = f"scene-{first}.png"
    scenes[name] = asked.scenes[0]
    return [{"id": first, "file_name": name, "captions": [asked.answer]}]


BENCHMARKS: dict[str, tuple[str, Callable[[Random, int, dict[str, Scene]], list[dict[str, Any]]]]] = {
    "scenes": ("mm_niah", _scenes),
    "needle": ("mm_niah", _needle),
    "multihop": ("mm_niah", _multihop),
    "pairs": ("nlvr2", _pairs),
    "unanswerable": ("muirbench", _unanswerable),
    "captions": ("coco", _captions),
}
"""Name -> schema, and what draws the next records: of a random state, their first number, and the scenes so far, to
which it adds its own by the names of their images."""
