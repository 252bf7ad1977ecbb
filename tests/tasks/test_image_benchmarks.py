"""Benchmarks of images: scores, the public schemas read from files, and benchmarks made from seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from octavo.multimodal import load_image
from octavo.scripts.tasks.image_benchmarks import BENCHMARKS, NONE_OF_THESE, make, write
from octavo.scripts.tasks.image_items import PLACEHOLDER, image_file, load
from octavo.scripts.tasks.image_metrics import (
    chosen_option,
    open_answer,
    rouge_l,
    soft_accuracy,
    things_f1,
    true_or_false,
)


class TestScores:
    @pytest.mark.parametrize(
        ("output", "answer", "right"),
        [("The oak.", "oak", True), ("It is image three!", "3", True), ("oaks", "oak", False), ("", "oak", False),
         ("a red  ring", "red ring", True), ("ring red", "red ring", False), ("an", "an", False)],
    )  # fmt: skip
    def test_open_answers(self, output: str, answer: str, right: bool) -> None:
        assert open_answer(output, answer) == 100 * right

    @pytest.mark.parametrize(
        ("output", "points"),
        [("[1, 2, 3]", 100), ("[1, 0, 3, 9]", 200 / 3), ("[1]", 100 / 3), ("```json\n[1, 2, 3]```", 100), ("1 2 3", 0),
         ('{"a": 1}', 0), ("", 0)],
    )  # fmt: skip
    def test_soft_accuracy(self, output: str, points: float) -> None:
        assert soft_accuracy(output, [1, 2, 3]) == pytest.approx(points)

    @pytest.mark.parametrize(
        ("output", "option"),
        [("B", 1), ("b", 1), ("(C)", 2), ("The answer is (A), not (B)", 1), ("Answer: C.", 2), ("green", 1),
         ("I think it is blue there", 2), ("none", 3), ("", None), ("purple", None), ("E", None), ("I'd say A", 0)],
    )  # fmt: skip
    def test_options(self, output: str, option: int | None) -> None:
        """An empty answer chooses nothing; MileBench's released scorer counts it as an option."""
        assert chosen_option(output, ["red", "green", "blue", "none of the choices provided"]) == option

    @pytest.mark.parametrize(
        ("output", "truth"), [("True", True), ("no , there", False), ("yes", True), ("It is false.", False), ("", None)]
    )
    def test_truth(self, output: str, truth: bool | None) -> None:
        assert true_or_false(output) is truth

    def test_rouge_l(self) -> None:
        """Four of five words in order, four of six: P = 0.8, R = 2/3."""
        found = rouge_l("a cat sat on mats", ["the cat sat on a mats"])
        assert found == pytest.approx(100 * 2.44 * 0.8 * (4 / 6) / (4 / 6 + 1.44 * 0.8))
        assert rouge_l("a cat", ["x", "A cat!"]) == pytest.approx(100)
        assert rouge_l("", ["a cat"]) == rouge_l("dog", ["cat"]) == 0

    def test_things(self) -> None:
        reference = "small red ring top left , large blue circle top left"
        assert things_f1("large blue circle top left , small red ring top left", reference) == 100
        assert things_f1("small red ring top left , large cyan circle top left", reference) == 50
        assert things_f1("small red ring top left", reference) == pytest.approx(200 / 3)
        assert things_f1("nothing", reference) == 0 and things_f1("nothing", "nothing") == 100


MM_NIAH: dict[str, Any] = {
    "id": 7, "images_list": ["a.png", "sub/b.png"], "context": f"Once {PLACEHOLDER} upon {PLACEHOLDER} a time.",
    "question": "Which tree?", "answer": "oak",
    "meta": {"placed_depth": [0.2, 0.4], "context_length": 900, "context_length_text": 500, "context_length_image": 400,
             "num_images": 2, "needles": ["an oak"], "choices": None, "choices_image_path": None},
}  # fmt: skip
NLVR2 = {
    "identifier": "dev-850-1-0", "sentence": "Both have dogs.", "label": "True", "left_url": "http://x/a.png",
    "right_url": "http://x/b.png", "writer": 10, "validation": {"5": "True"}, "synset": "dog", "query": "dogs0",
}  # fmt: skip
MUIR = {
    "idx": "3", "task": "Counting", "image_relation": "Independent", "image_type": "Photography",
    "question": f"How many in {PLACEHOLDER} and {PLACEHOLDER}?",
    "options": ["one", "two", "None of the choices provided"], "answer": "B", "image_list": ["a.png", "sub/b.png"],
    "counterpart_idx": "4",
}  # fmt: skip
COCO = {
    "info": {}, "licenses": [],
    "images": [{"id": 9, "file_name": "a.png", "height": 4, "width": 4}, {"id": 8, "file_name": "sub/b.png"}],
    "annotations": [
        {"id": 1, "image_id": 8, "caption": "A dog."}, {"id": 2, "image_id": 8, "caption": "Brown dog"},
    ],
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """a.png, sub/b.png, and what NLVR2 calls its pair; each of a colour of its own."""
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    for shade, name in enumerate(("a.png", "sub/b.png", "dev-850-1-img0.png", "dev-850-1-img1.png")):
        Image.new("RGB", (4, 4), (shade, 0, 0)).save(folder / name)
    return folder


@pytest.fixture
def written(tmp_path: Path, root: Path) -> Any:
    def written(*records: Any, name: str = "records.jsonl") -> Path:
        file = tmp_path / name
        whole = name.endswith("captions.json")
        file.write_text(json.dumps(records[0]) if whole else "".join(json.dumps(raw) + "\n" for raw in records))
        return file

    return written


def shades(images: tuple[Any, ...]) -> list[int]:
    return [int(load_image(image).pixels[0, 0, 0]) for image in images]


class TestSchemas:
    def test_mm_niah_open(self, written: Any, root: Path) -> None:
        [item] = load("mm_niah", written(MM_NIAH, name="retrieval-text.jsonl"), root)
        assert (item.item_id, item.task, item.gold) == ("retrieval-text/7", "retrieval-text", "oak")
        assert item.depth == pytest.approx(0.3) and shades(item.images) == [0, 1]
        assert item.questions == ("Which tree?\nAnswer with one word or a short phrase.",)
        assert item.score(["An oak."]) == {"accuracy": 100} and item.score(["elm"]) == {"accuracy": 0}

    def test_mm_niah_options(self, written: Any, root: Path) -> None:
        meta = {**MM_NIAH["meta"], "choices": ["elm", "oak"]}
        [item] = load("mm_niah", written({**MM_NIAH, "answer": 1, "meta": meta}), root)
        assert item.questions[0].startswith("Which tree?\nA. elm\nB. oak\n")
        assert [item.score([said])["accuracy"] for said in ("B", "1", "oak", "A", "0", "")] == [100, 100, 100, 0, 0, 0]
        [bare] = load("mm_niah", written({**MM_NIAH, "answer": 1, "meta": meta}), root, instruct=False)
        assert bare.questions == ("Which tree?",)

    def test_mm_niah_images_as_options(self, written: Any, root: Path) -> None:
        meta = {**MM_NIAH["meta"], "choices_image_path": ["sub/b.png", "a.png"]}
        [item] = load("mm_niah", written({**MM_NIAH, "answer": 0, "meta": meta}), root)
        assert shades(item.images) == [0, 1, 1, 0] and item.questions[0].count(PLACEHOLDER) == 2

    def test_mm_niah_lists(self, written: Any, root: Path) -> None:
        [item] = load("mm_niah", written({**MM_NIAH, "answer": [2, 0]}), root)
        assert item.score(["[2, 1]"]) == {"soft_accuracy": 50}
        meta = {**MM_NIAH["meta"], "questions": ["first?", "second?"]}
        [item] = load("mm_niah", written({**MM_NIAH, "answer": [2, 0], "meta": meta}), root, instruct=False)
        assert item.questions == ("first?", "second?") and item.score(["2", "0"]) == {"soft_accuracy": 100}

    def test_nlvr2(self, written: Any, root: Path) -> None:
        [item] = load("nlvr2", written(NLVR2), root)
        assert (item.item_id, item.group, shades(item.images)) == ("dev-850-1-0", "dev-850-0", [2, 3])
        assert item.score(["true"]) == {"accuracy": 100} and item.score(["No"]) == item.score([""]) == {"accuracy": 0}

    def test_nlvr2_keeps_training_images_in_folders(self, written: Any, root: Path) -> None:
        (root / "51").mkdir()
        for side in (0, 1):
            Image.new("RGB", (4, 4), (9, 0, 0)).save(root / "51" / f"train-1-2-img{side}.png")
        [item] = load("nlvr2", written({**NLVR2, "identifier": "train-1-2-0", "directory": 51}), root)
        assert shades(item.images) == [9, 9]

    def test_muirbench(self, written: Any, root: Path) -> None:
        twin = {**MUIR, "idx": "4", "answer": "C", "counterpart_idx": "3"}
        item, other = load("muirbench", written(MUIR, twin), root)
        assert item.group == other.group and item.task == "Counting" and shades(item.images) == [0, 1]
        assert (
            item.score(["(B)"])["accuracy"] == 100 and other.score(["none of the choices provided"])["accuracy"] == 100
        )
        assert item.questions[0].endswith(
            "A. one\nB. two\nC. None of the choices provided\nAnswer with the letter of one option."
        )
        [front] = load("muirbench", written({**MUIR, "question": "How many?"}), root)
        assert front.context == f"image 1 : {PLACEHOLDER} image 2 : {PLACEHOLDER}"

    def test_images_inside_records(self, root: Path) -> None:
        data = (root / "a.png").read_bytes()
        assert image_file(root, {"bytes": data, "path": None}) == data

    def test_coco(self, written: Any, root: Path) -> None:
        [item] = load("coco", written(COCO, name="captions.json"), root)
        assert (
            item.item_id == "captions/8" and shades(item.images) == [1] and item.score(["a brown dog"])["rouge_l"] > 80
        )

    @pytest.mark.parametrize(
        ("schema", "record", "message"),
        [
            ("mm_niah", {**MM_NIAH, "images_list": ["a.png"]}, "have 2 <image>, and images_list 1 images"),
            ("mm_niah", {**MM_NIAH, "images_list": ["a.png", "c.png"]}, "line 1: the image 'c.png' is not in"),
            ("mm_niah", {**MM_NIAH, "images_list": ["a.png", "http://x/b.png"]}, "is a URL"),
            ("mm_niah", {**MM_NIAH, "images_list": ["a.png", "../records.jsonl"]}, "is not below"),
            ("mm_niah", {**MM_NIAH, "images_list": ["a.png", "/etc/hostname"]}, "is not below"),
            ("mm_niah", {**MM_NIAH, "answer": 2}, "answer is option 2, and there are 0"),
            ("mm_niah", {**MM_NIAH, "answer": None}, "answer must be text, a number or a list, got null"),
            ("mm_niah", {k: v for k, v in MM_NIAH.items() if k != "question"}, "missing field 'question' of mm_niah"),
            ("nlvr2", {**NLVR2, "label": "maybe"}, "label must be True or False, got 'maybe'"),
            ("nlvr2", {**NLVR2, "identifier": "850-1"}, "identifier must be split-set-pair-sentence"),
            ("muirbench", {**MUIR, "answer": "D"}, "answer must be a letter of 3 options, got 'D'"),
            ("muirbench", {**MUIR, "image_list": ["a.png"]}, "have 2 <image>, and image_list 1 images"),
            ("coco", {"images": []}, "missing field 'annotations' of coco"),
        ],
    )
    def test_refused(self, schema: str, record: Any, message: str, written: Any, root: Path) -> None:
        name = "captions.json" if schema == "coco" else "records.jsonl"
        with pytest.raises(ValueError, match=message.replace("[", r"\[")):
            load(schema, written(record, name=name), root)

    def test_a_link_out_of_the_root_is_refused(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "secret.png").write_bytes((root / "a.png").read_bytes())
        (root / "link.png").symlink_to(tmp_path / "secret.png")
        with pytest.raises(ValueError, match="is not below"):
            image_file(root, "link.png")

    def test_what_is_not_there(self, written: Any, root: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="unknown schema 'vqa'; known: mm_niah, nlvr2, muirbench, coco"):
            load("vqa", tmp_path, root)
        with pytest.raises(ValueError, match=r"the images' folder .* is not there"):
            load("nlvr2", written(NLVR2), root / "nowhere")
        with pytest.raises(ValueError, match="no records"):
            load("nlvr2", written(), root)


@pytest.mark.parametrize("name", BENCHMARKS)
class TestMade:
    def test_right_answers_are_right(self, name: str) -> None:
        benchmark = make(name, 0, 12)
        items = benchmark.items()
        assert len(items) >= 12
        for item, raw in zip(items, benchmark.records, strict=True):
            if name == "unanswerable":
                said = ["none" if item.gold == NONE_OF_THESE else item.gold]
            elif name == "pairs":
                said = ["yes" if item.gold == "True" else "no"]
            elif isinstance(raw.get("answer"), list):
                said = [str(count) for count in raw["answer"]]
                assert len(item.questions) == len(said)
            else:
                said = [item.gold]
            assert all(points == pytest.approx(100) for points in item.score(said).values())
            assert not any(item.score([""] * len(item.questions)).values())
            assert item.context.count(PLACEHOLDER) == len(item.images)

    def test_files_say_the_same(self, name: str, tmp_path: Path) -> None:
        benchmark = make(name, 1, 6)
        items = load(benchmark.schema, write(benchmark, tmp_path), tmp_path / "images", instruct=False)
        for item, own in zip(items, benchmark.items(), strict=True):
            assert (item.context, item.questions, item.gold, item.group) == (
                own.context,
                own.questions,
                own.gold,
                own.group,
            )
            for file, pixels in zip(item.images, own.images, strict=True):
                assert np.array_equal(load_image(file).pixels, pixels)

    def test_words_are_the_demo_models(self, name: str) -> None:
        from octavo.multimodal.demo_tokenizer import VOCABULARY

        for item in make(name, 2, 12).items():
            for text in (item.context, *item.questions):
                assert set(text.split()) <= VOCABULARY.keys(), text

    def test_the_seed_decides(self, name: str) -> None:
        assert make(name, 1, 8).records == make(name, 1, 8).records != make(name, 2, 8).records


def test_pairs_are_balanced_and_in_groups() -> None:
    items = make("pairs", 3, 16).items()
    groups: dict[str | None, list[str]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item.gold)
    assert len(groups) == 4 and all(sorted(golds) == ["False", "False", "True", "True"] for golds in groups.values())


def test_twins_differ_in_one_image() -> None:
    benchmark = make("unanswerable", 0, 8)
    for first, second in zip(benchmark.items()[::2], benchmark.items()[1::2], strict=True):
        assert first.group == second.group and first.questions == second.questions
        assert first.gold != NONE_OF_THESE == second.gold
        same = [np.array_equal(one, other) for one, other in zip(first.images, second.images, strict=True)]
        assert sorted(same) == [False, True]


def test_needles_lie_where_they_say() -> None:
    for item in make("needle", 0, 18).items():
        if item.depth is not None:
            assert int(item.gold) == round(item.depth * (len(item.images) - 1)) + 1
