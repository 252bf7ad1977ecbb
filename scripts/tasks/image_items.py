"""Questions about images, read from records in the schemas that benchmarks are published in.

| schema      | published as                                   | images                                              |
|-------------|------------------------------------------------|-----------------------------------------------------|
| `mm_niah`   | MM-NIAH's `annotations/*.jsonl`                | `images_list`, `meta.choices_image_path`            |
| `nlvr2`     | NLVR2's `data/*.json`, one object a line       | `split-set-pair-img0.png` and `-img1.png`           |
| `muirbench` | MuirBench's records (parquet, or JSON of them) | `image_list`: paths, or encoded bytes               |
| `coco`      | COCO's `captions_*.json`                       | `images[].file_name`                                |

Items that belong together have a group: the pairs of a sentence (NLVR2's consistency), a question and its unanswerable
twin (MuirBench).

Images are files below a root that is given, and nothing else: a URL, an absolute path or one that leads out of the root
is refused. ``meta.questions`` is octavo's own addition to MM-NIAH: a list that is asked element by element, for models
that cannot write lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from octavo.scripts.tasks.image_metrics import (
    chosen_option,
    open_answer,
    rouge_l,
    soft_accuracy,
    things_f1,
    true_or_false,
)
from octavo.scripts.tasks.records import json_object, list_of, records, shown, text, typed

PLACEHOLDER = "<image>"
CHOOSE = "Answer with the letter of one option."
BRIEFLY = "Answer with one word or a short phrase."

Resolve = Callable[[Any], Any]
"""What a record calls an image -> what ``load_image`` reads."""


@dataclass(frozen=True)
class ImageItem:
    """What is asked about some images.

    Attributes:
        context: text with ``PLACEHOLDER`` for each image.
        images: what ``load_image`` reads, those of the context first, then those of the question.
        questions: asked one by one, each after the whole context; more than one make up a list.
        gold: a right answer, for the reader.
        score: qualities, in points, of the outputs.
        group: items that are right together or not at all; None is alone.
        depth: of what is looked for, 0 (first) to 1 (last).
    """

    item_id: str
    task: str
    context: str
    images: tuple[Any, ...]
    questions: tuple[str, ...]
    gold: str
    score: Callable[[Sequence[str]], dict[str, float]]
    group: str | None = None
    depth: float | None = None


def load(schema: str, path: Path, root: Path, limit: int | None = None, *, instruct: bool = True) -> list[ImageItem]:
    """The first ``limit`` items (all by default) of a benchmark's file.

    Args:
        root: folder of the images.
        instruct: write options into the question, and say how to answer; False asks the bare question.

    Raises:
        ValueError: an unknown schema, an unreadable file, a record that lacks a field or has one of the wrong type, an
            image that is not there; the message names file, line (or record) and field.
    """
    if schema not in SCHEMAS:
        raise ValueError(f"unknown schema {schema!r}; known: {', '.join(SCHEMAS)}")
    if not root.is_dir():
        raise ValueError(f"the images' folder {root} is not there")
    found = _coco_records(path) if schema == "coco" else records(path)
    return items_of(schema, islice(found, limit), lambda name: image_file(root, name), path.stem, instruct=instruct)


def items_of(
    schema: str, found: Iterable[tuple[str, Mapping[str, Any]]], resolve: Resolve, task: str, *, instruct: bool
) -> list[ImageItem]:
    """Items of (where, record); ``task`` names those that say no task of their own."""
    items = []
    for where, raw in found:
        try:
            items.append(SCHEMAS[schema](raw, resolve, task, instruct))
        except KeyError as error:
            raise ValueError(f"{where}: missing field {error.args[0]!r} of {schema}") from error
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not items:
        raise ValueError(f"{task}: no records")
    return items


def image_file(root: Path, name: Any) -> Any:
    """The file of an image below ``root``; encoded bytes are given back as they are.

    Raises:
        ValueError: no relative path of a file that is there.
    """
    if isinstance(name, Mapping):  # an image in a parquet file
        name = name.get("bytes") or name.get("path")
    if isinstance(name, bytes):
        return name
    if not isinstance(name, str) or not name:
        raise ValueError(f"an image must be a path, got {shown(name)}")
    if "://" in name:
        raise ValueError(f"the image {name!r} is a URL; octavo reads files, so download it below {root} first")
    file = (root / name).resolve()
    if not file.is_relative_to(root.resolve()):
        raise ValueError(f"the image {name!r} is not below {root}")
    if not file.is_file():
        raise ValueError(f"the image {name!r} is not in {root}")
    return file


def _mm_niah(raw: Mapping[str, Any], resolve: Resolve, task: str, instruct: bool) -> ImageItem:
    meta = typed(raw, "meta", dict, "an object")
    names = list_of(raw, "images_list", str, "paths")
    context, question, answer = text(raw, "context"), text(raw, "question"), raw["answer"]
    placed = context.count(PLACEHOLDER) + question.count(PLACEHOLDER)
    if placed != len(names):
        raise ValueError(f"context and question have {placed} {PLACEHOLDER}, and images_list {len(names)} images")
    options = [PLACEHOLDER] * len(meta.get("choices_image_path") or ()) or list(meta.get("choices") or ())
    names += meta.get("choices_image_path") or ()
    questions = (question,)
    if isinstance(answer, bool) or not isinstance(answer, int | str | list) or answer == []:
        raise ValueError(f"answer must be text, a number or a list, got {shown(answer)}")
    if isinstance(answer, int):
        if not 0 <= answer < len(options):
            raise ValueError(f"answer is option {answer}, and there are {len(options)}")

        def score(outputs: Sequence[str]) -> dict[str, float]:
            said = outputs[0].strip(". \n")
            return {"accuracy": 100.0 * ((int(said) if said.isdigit() else chosen_option(said, options)) == answer)}

    elif isinstance(answer, list):
        questions = tuple(meta.get("questions") or questions)

        def score(outputs: Sequence[str]) -> dict[str, float]:
            listed = json.dumps([int(said) if said.isdigit() else said for said in outputs])
            return {"soft_accuracy": soft_accuracy(listed if len(questions) > 1 else outputs[0], answer)}

    else:

        def score(outputs: Sequence[str]) -> dict[str, float]:
            return {"accuracy": open_answer(outputs[0], answer)}

    if instruct:
        asked = _with_options(question, options) if options else f"{question}\n{BRIEFLY}"
        questions = (asked,) if len(questions) == 1 else questions
    depths = meta.get("placed_depth")
    depth = sum(depths) / len(depths) if isinstance(depths, list) and depths else depths or None
    return ImageItem(
        item_id=f"{task}/{raw['id']}",
        task=str(meta.get("task", task)),
        context=context,
        images=tuple(map(resolve, names)),
        questions=questions,
        gold=str(answer),
        score=score,
        depth=depth,
    )


def _nlvr2(raw: Mapping[str, Any], resolve: Resolve, task: str, instruct: bool) -> ImageItem:
    identifier, sentence, label = (text(raw, key) for key in ("identifier", "sentence", "label"))
    parts = identifier.split("-")
    if len(parts) != 4:
        raise ValueError(f"identifier must be split-set-pair-sentence, got {identifier!r}")
    if label.lower() not in ("true", "false"):
        raise ValueError(f"label must be True or False, got {label!r}")
    split, image_set, pair, number = parts
    folder = f"{raw['directory']}/" if split == "train" and "directory" in raw else ""
    names = [f"{folder}{split}-{image_set}-{pair}-img{side}.png" for side in (0, 1)]
    truth = label.lower() == "true"
    return ImageItem(
        item_id=identifier,
        task=task,
        context=f"image 1 : {PLACEHOLDER} image 2 : {PLACEHOLDER}",
        images=tuple(map(resolve, names)),
        questions=(f"{sentence}\nImage 1 is on the left. True or false?" if instruct else sentence,),
        gold=str(truth),
        score=lambda outputs: {"accuracy": 100.0 * (true_or_false(outputs[0]) is truth)},
        group=f"{split}-{image_set}-{number}",
    )


def _muirbench(raw: Mapping[str, Any], resolve: Resolve, task: str, instruct: bool) -> ImageItem:
    options = list_of(raw, "options", str, "texts")
    question, letter = text(raw, "question"), text(raw, "answer")
    right = ord(letter[:1] or "?") - ord("A")
    if len(letter) != 1 or not 0 <= right < len(options):
        raise ValueError(f"answer must be a letter of {len(options)} options, got {letter!r}")
    images = tuple(resolve(name) for name in typed(raw, "image_list", list, "a list of images"))
    own, twin = (str(raw[key]) for key in ("idx", "counterpart_idx"))
    context, asked = "", _with_options(question, options) if instruct else question
    placed = asked.count(PLACEHOLDER)
    if placed == 0:
        context = " ".join(f"image {number} : {PLACEHOLDER}" for number in range(1, len(images) + 1))
    elif placed != len(images):
        raise ValueError(f"question and options have {placed} {PLACEHOLDER}, and image_list {len(images)} images")
    return ImageItem(
        item_id=own,
        task=text(raw, "task"),
        context=context,
        images=images,
        questions=(asked,),
        gold=options[right],
        score=lambda outputs: {"accuracy": 100.0 * (chosen_option(outputs[0], options) == right)},
        group=" ".join(sorted((own, twin))),
    )


def _coco(raw: Mapping[str, Any], resolve: Resolve, task: str, instruct: bool) -> ImageItem:
    captions = list_of(raw, "captions", str, "texts")

    def score(outputs: Sequence[str]) -> dict[str, float]:
        scene = {} if instruct else {"things_f1": things_f1(outputs[0], captions[0])}
        return {"rouge_l": rouge_l(outputs[0], captions), **scene}

    return ImageItem(
        item_id=f"{task}/{raw['id']}",
        task=task,
        context=PLACEHOLDER if instruct else f"image 1 : {PLACEHOLDER}",
        images=(resolve(raw["file_name"]),),
        questions=("Describe the image in one sentence." if instruct else "what is there ?",),
        gold=captions[0],
        score=score,
    )


def _coco_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each image that has captions, with them, in the order of the images."""
    whole = json_object(path)
    try:
        captions: dict[Any, list[Any]] = {}
        for annotation in list_of(whole, "annotations", dict, "objects"):
            captions.setdefault(annotation["image_id"], []).append(annotation["caption"])
        for image in list_of(whole, "images", dict, "objects"):
            if image["id"] in captions:
                yield f"{path}: image {image['id']}", {**image, "captions": captions[image["id"]]}
    except KeyError as error:
        raise ValueError(f"{path}: missing field {error.args[0]!r} of coco") from error


def _with_options(question: str, options: Sequence[str]) -> str:
    listed = "\n".join(f"{chr(ord('A') + number)}. {option}" for number, option in enumerate(options))
    return f"{question}\n{listed}\n{CHOOSE}"


SCHEMAS: dict[str, Callable[[Mapping[str, Any], Resolve, str, bool], ImageItem]] = {
    "mm_niah": _mm_niah,
    "nlvr2": _nlvr2,
    "muirbench": _muirbench,
    "coco": _coco,
}
