"""Scenes: what is drawn is where it should be, and every answer follows from the picture's scene by another way."""

import re
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.multimodal.scenes import (
    BLANK,
    CELL,
    COLOURS,
    COLUMNS,
    DIGITS,
    HELD_OUT,
    KINDS,
    ROWS,
    SHAPES,
    SIDE,
    SIZES,
    TRAINED,
    Background,
    Scene,
    Thing,
    place,
    some,
)
from octavo.multimodal.scenes_follow_ups import follow_ups
from octavo.multimodal.scenes_prompts import prompt_parts, varied_parts, words
from octavo.multimodal.scenes_questions import MAX_IMAGES, TASKS, ask, images_of
from octavo.multimodal.scenes_render import draw, render, scene_arrays, waves
from octavo.multimodal.scenes_tasks import SCENE_TASKS, verdict

BLACK = Background(0, 0, 0, 0, 0, 0)


def scene(*things, background=BLACK):
    return Scene(tuple(things), background)


def middle(thing):
    """Column and row of the pixel right below and right of a thing's middle."""
    half = CELL // 2
    return thing.column * CELL + half + thing.dx, thing.row * CELL + half + thing.dy


def box(image):
    """First and last row and column of whatever is not black."""
    rows, columns = np.nonzero(image.any(-1))
    return rows.min(), rows.max(), columns.min(), columns.max()


# Drawing


@pytest.mark.parametrize("colour", COLOURS)
def test_a_circle_has_its_colour_its_place_and_its_area(colour):
    thing = Thing("circle", colour, "large", 1, 2, -1, 1)
    [image] = draw([scene(thing)])
    assert image.shape == (SIDE, SIDE, 3) and image.dtype == np.uint8
    x, y = middle(thing)
    assert image[y, x].tolist() == list(COLOURS[colour])
    assert box(image) == (y - 14, y + 13, x - 14, x + 13)
    assert not image[:CELL].any() and not image[:, : 2 * CELL].any()
    area = (image / np.array(COLOURS[colour])).mean(-1).sum()
    assert area == pytest.approx(np.pi * 14**2, rel=0.01)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", SHAPES)
def test_shapes_fill_what_they_should(kind, size):
    """Areas by their formulas; and upright, mirrored left and right."""
    r = SIZES[size]
    areas = {
        "circle": np.pi * r**2,
        "square": (1.7 * r) ** 2,
        "triangle": 1.8 * r * (2 * r) / 2,
        "diamond": 2 * r**2,
        "cross": 4 * r * 0.7 * r - (0.7 * r) ** 2,
        "ring": np.pi * r**2 * (1 - 0.55**2),
    }
    [image] = draw([scene(Thing(kind, "white", size, 1, 1, 0, 0))])
    covered = image[..., 0] / COLOURS["white"][0]
    assert covered.sum() == pytest.approx(areas[kind], rel=0.03)
    assert (covered == covered[:, ::-1]).all()
    assert (covered[SIDE // 2, SIDE // 2] == 0) == (kind == "ring")


def test_digits_are_ten_pictures_that_a_display_would_show():
    images = draw([scene(Thing(digit, "white", "large", 1, 1, 0, 0)) for digit in DIGITS])
    assert len({image.tobytes() for image in images}) == 10
    lit = {digit: (image[..., 0] > 128).sum() for digit, image in zip(DIGITS, images, strict=True)}
    assert min(lit, key=lit.get) == "1" and max(lit, key=lit.get) == "8"
    eight, zero = (images[int(digit)] for digit in "80")
    changed = np.argwhere((eight != zero).any(-1))
    assert set(changed[:, 0]) <= set(range(SIDE // 2 - 3, SIDE // 2 + 3)), "only the bar in the middle"


def test_things_do_not_disturb_each_other_or_other_images():
    """A full image is the sum of its things, bit by bit, whatever is drawn beside it."""
    rng = Random(0)
    full = place(rng, some(rng, TRAINED, 9, digits=0.5))._replace(background=BLACK)
    together, *alone = draw([full, *(scene(thing) for thing in full.things)])
    assert (together == sum(image.astype(int) for image in alone)).all()


def test_backgrounds_are_darker_than_things_and_differ():
    rng = Random(0)
    scenes = [place(rng, []) for _ in range(200)]
    grounds = waves(torch.from_numpy(scene_arrays(scenes)[1]))
    assert grounds.min() >= 0 and grounds.max() <= 85 < min(max(colour) for colour in COLOURS.values())
    assert len({image.numpy().tobytes() for image in grounds}) == 200
    assert draw([BLANK])[0].tolist() == np.full((SIDE, SIDE, 3), 30).tolist()


def test_no_scenes_and_empty_scenes_can_be_drawn():
    things, backgrounds = map(torch.from_numpy, scene_arrays([]))
    assert render(things, backgrounds).shape == (0, SIDE, SIDE, 3)
    assert len(draw([scene(), scene()])) == 2


@given(st.integers(0, 10**6), st.integers(0, 9))
def test_scenes_are_in_order_inside_their_cells_and_repeat(seed, number):
    made = place(Random(seed), some(Random(seed), TRAINED, number, digits=0.3))
    assert made == place(Random(seed), some(Random(seed), TRAINED, number, digits=0.3))
    assert len(made.things) == number == len({thing.cell for thing in made.things})
    assert [*made.things] == sorted(made.things, key=lambda thing: thing.cell)
    for thing in made.things:
        assert max(abs(thing.dx), abs(thing.dy)) + SIZES[thing.size] < CELL // 2
        assert thing.pair not in HELD_OUT and (thing.kind not in DIGITS or thing.size == "large")


# Questions


def seen(scene_):
    """A scene as an examiner notes it who has only its description."""
    text = scene_.description
    if text == "nothing":
        return []
    names = ("size", "colour", "kind", "row", "column")
    return [dict(zip(names, part.split(), strict=True)) for part in text.split(" , ")]


def tally(notes):
    """Things of each row, and of all."""
    rows = Counter(note["row"] for note in notes)
    return f"top {rows['top']} , middle {rows['middle']} , bottom {rows['bottom']} . {len(notes)}"


def up_to(steps, last):
    """Steps of an answer up to the first of which ``last`` is true; and whether there is one."""
    for number, step in enumerate(steps, 1):
        if last(step):
            return steps[:number], True
    return steps, False


def examiner(question, scenes):
    """The answer, from the words of the question and the descriptions of the scenes."""
    notes = [seen(scene_) for scene_ in scenes]
    if found := re.fullmatch(r"in image (\d) , (.*)", question):
        return examiner(found[2], [scenes[int(found[1]) - 1]])
    if question == "what is there ?":
        return scenes[0].description
    if found := re.fullmatch(r"what (colour|size) is the (\w+) \?", question):
        return next((note[found[1]] for note in notes[0] if note["kind"] == found[2]), "none")
    if found := re.fullmatch(r"what shape is (\w+) \?", question):
        return next((note["kind"] for note in notes[0] if note["colour"] == found[1]), "none")
    if found := re.fullmatch(r"where is the (\w+) \?", question):
        return next((f"{note['row']} {note['column']}" for note in notes[0] if note["kind"] == found[1]), "none")
    if found := re.fullmatch(r"how many (\w+) objects \?", question):
        return tally([note for note in notes[0] if note["colour"] == found[1]])
    if question == "how many objects ?":
        return tally(notes[0])
    if found := re.fullmatch(r"how many (\w+?)(es|s) \?", question):
        singular = {**{f"{shape}s": shape for shape in SHAPES}, "crosses": "cross"}[found[1] + found[2]]
        return tally([note for note in notes[0] if note["kind"] == singular])
    if question == "which digit is there ?":
        [digit] = [note["kind"] for note in notes[0] if note["kind"].isdigit()]
        return digit
    if found := re.fullmatch(r"is there an? (\w+) (\w+) \?", question):
        alike = [f"{n['kind']} {n['row']} {n['column']}" for n in notes[0] if n["colour"] == found[1]]
        told, there = up_to(alike, lambda step: step.split()[0] == found[2])
        return f"{' , '.join(told) or 'none'} . {'yes' if there else 'no'}"
    if found := re.fullmatch(r"is the (\w+) (left of|right of|above|below) the (\w+) \?", question):
        [first], [second] = ([n for n in notes[0] if n["kind"] == kind] for kind in (found[1], found[3]))
        key, order = ("column", COLUMNS) if "of" in found[2] else ("row", ROWS)
        difference = order.index(first[key]) - order.index(second[key])
        holds = difference < 0 if found[2] in ("left of", "above") else difference > 0
        before, behind = ("left", "right") if key == "column" else ("above", "below")
        lie = before if difference < 0 else behind if difference > 0 else "same"
        return f"{found[1]} {first[key]} , {found[3]} {second[key]} , {lie} . {'yes' if holds else 'no'}"
    if question == "which image has more objects ?":
        left, right = map(len, notes)
        return "equal" if left == right else "1" if left > right else "2"
    if question == "do the images show the same objects ?":
        left, right = ({f"{n['colour']} {n['kind']}": f"{n['row']} {n['column']}" for n in note} for note in notes)
        assert len(left) == len(notes[0]) == len(notes[1]) == len(right), "no look twice"
        pairs = [f"{look} {where} : {right.get(look, 'none')}" for look, where in left.items()]
        told, _ = up_to(pairs, lambda step: step.endswith("none"))
        return f"{' , '.join(told)} . {'yes' if left.keys() == right.keys() else 'no'}"
    if found := re.fullmatch(r"which image has the digit (\d) \?", question):
        [image] = [number for number, note in enumerate(notes, 1) if any(n["kind"] == found[1] for n in note)]
        shown = [[n["kind"] for n in note if n["kind"] in DIGITS] for note in notes[:image]]
        told = [f"image {number} : {' '.join(digits) or 'none'}" for number, digits in enumerate(shown, 1)]
        return f"{' , '.join(told)} . {image}"
    if found := re.fullmatch(r"which image has an? (\w+) (\w+) \?", question):
        [image] = [
            i for i, note in enumerate(notes, 1) if any((n["colour"], n["kind"]) == found.groups() for n in note)
        ]
        return str(image)
    found = re.fullmatch(r"what shape in image (\d) has the colour of the (\w+) in image (\d) \?", question)
    asked, there = notes[int(found[1]) - 1], notes[int(found[3]) - 1]
    [colour] = [note["colour"] for note in there if note["kind"] == found[2]]
    [shape] = [note["kind"] for note in asked if note["colour"] == colour]
    return f"image {found[3]} : {found[2]} {colour} , image {found[1]} : {colour} . {shape}"


def counts(task):
    low, high = images_of(task)
    return sorted({low, min(high, 3), high})


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_follows_from_the_scenes(task):
    rng = Random(0)
    known = set(words())
    for images in counts(task):
        for _ in range(60):
            question = ask(rng, task, images)
            assert question.task == task and len(question.scenes) == images
            assert question.answer == examiner(question.question, question.scenes)
            assert set(question.question.split()) | set(question.answer.split()) <= known
            assert not {thing.pair for scene_ in question.scenes for thing in scene_.things} & set(HELD_OUT)


@pytest.mark.parametrize("task", TASKS)
def test_no_answer_can_be_guessed_from_the_question(task):
    """What answers come to differs, and none is more than 7 in 10 of all."""
    rng = Random(1)
    answers = Counter(verdict(ask(rng, task, images_of(task)[1]).answer) for _ in range(200))
    assert len(answers) >= 2 and answers.most_common(1)[0][1] <= 140


def test_what_is_asked_later_follows_from_the_scenes_too():
    rng = Random(5)
    known, answers, kinds = set(words()), {"is": Counter(), "what": Counter(), "which": Counter()}, Counter()
    for task in TASKS:
        for images in counts(task):
            for _ in range(20):
                first = ask(rng, task, images)
                later = follow_ups(rng, first.scenes, TRAINED, 6)
                assert len({question for question, _ in later}) == len(later) <= 6
                for question, answer in later:
                    assert answer == examiner(question, first.scenes), question
                    assert set(question.split()) <= known
                    plain = re.sub(r"in image \d , ", "", question)
                    kinds[" ".join(plain.split()[:2])] += 1
                    answers.get(plain.split()[0], Counter())[verdict(answer)] += 1
    assert set(kinds) >= {
        "what colour", "what shape", "what size", "where is", "how many", "which digit", "is there", "is the",
        "which image",
    }  # fmt: skip
    assert min(kinds.values()) >= 20
    assert 0.8 < answers["is"]["yes"] / answers["is"]["no"] < 1.25
    assert follow_ups(rng, [BLANK, BLANK], TRAINED, 0) == []
    assert all(
        verdict(answer) in ("0", "no", "none", "equal") for _, answer in follow_ups(rng, [BLANK, BLANK], TRAINED, 9)
    )


def test_answers_say_what_was_seen_before_what_follows():
    shown = scene(
        Thing("circle", "red", "large", 0, 0, 0, 0),
        Thing("ring", "red", "small", 0, 2, 0, 0),
        Thing("square", "blue", "small", 2, 1, 0, 0),
    )
    answers = {
        ("relation", ("circle", "left of", "ring")): "circle left , ring right , left . yes",
        ("relation", ("circle", "above", "ring")): "circle top , ring top , same . no",
        ("relation", ("square", "above", "ring")): "square bottom , ring top , below . no",
        ("exists", ("red", "ring")): "circle top left , ring top right . yes",
        ("exists", ("red", "square")): "circle top left , ring top right . no",
        ("exists", ("green", "square")): "none . no",
        ("count", "red"): "top 2 , middle 0 , bottom 0 . 2",
    }
    for (task, subject), answer in answers.items():
        assert SCENE_TASKS[task].answer(shown, subject) == answer
    assert verdict("circle left , ring right , left . yes") == "yes"
    assert verdict("large red circle top left , small") == "large red circle top left , small"


def test_what_two_images_have_in_common_does_not_answer_the_multihop_question():
    """All images have the same colours."""
    rng = Random(2)
    for _ in range(50):
        question = ask(rng, "multihop", 4)
        assert len({frozenset(thing.colour for thing in scene_.things) for scene_ in question.scenes}) == 1


def test_every_image_of_an_indexed_question_is_asked_the_same():
    rng = Random(3)
    answers = Counter()
    for _ in range(100):
        question = ask(rng, "indexed_colour", 4)
        plain = question.question.split(" , ")[1]
        answers[len({examiner(plain, [scene_]) for scene_ in question.scenes})] += 1
    assert answers[1] < 10 < answers[4] + answers[3]


@pytest.mark.parametrize("task", SCENE_TASKS)
def test_scenes_of_combinations_held_out(task):
    rng = Random(4)
    for _ in range(30):
        question = ask(rng, task, 1, HELD_OUT)
        looks = {thing.pair for thing in question.scenes[0].things if thing.kind in SHAPES}
        assert looks <= set(HELD_OUT) and question.answer == examiner(question.question, question.scenes)


def test_all_combinations_are_either_trained_or_held_out():
    assert len(TRAINED) + len(HELD_OUT) == len(COLOURS) * len(SHAPES) and set(KINDS) == {*SHAPES, *DIGITS}
    assert {shape for _, shape in HELD_OUT} == set(SHAPES) and {shape for _, shape in TRAINED} == set(SHAPES)


@pytest.mark.parametrize(
    ("task", "images", "message"),
    [
        ("color", 1, "there is no task 'color'; one of: describe, colour"),
        ("colour", 2, "task 'colour' has 1 to 1 images, got 2"),
        ("compare", 3, "2 to 2 images, got 3"),
        ("multihop", MAX_IMAGES + 1, "2 to 8 images, got 9"),
    ],
)
def test_what_cannot_be_asked(task, images, message):
    with pytest.raises(ValueError, match=message):
        ask(Random(0), task, images)


# Prompts


def test_the_plain_prompt_ends_with_the_question():
    assert prompt_parts("where is the ring ?", 2) == [
        "image 1 :", 0, "image 2 :", 1, "question : where is the ring ? answer :",
    ]  # fmt: skip


def test_varied_prompts_hold_every_image_once_in_order_and_the_question_once():
    rng = Random(0)
    first = 0
    for _ in range(200):
        parts = varied_parts(rng, "where is the ring ?", 3)
        assert [part for part in parts if isinstance(part, int)] == [0, 1, 2]
        text = " ".join(part for part in parts if isinstance(part, str))
        assert text.count("question : where is the ring ?") == 1 and text.endswith("answer :")
        assert set(text.split()) <= set(words())
        first += parts[0] == "question : where is the ring ?"
    assert 30 <= first <= 90
