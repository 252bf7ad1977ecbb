"""Photographs in exams: what they hide, what they leave, and what is said where there are none."""

from itertools import chain

import numpy as np
import pytest

from octavo.multimodal import demo_photographs
from octavo.multimodal.demo_data import exam_questions
from octavo.multimodal.demo_photographs import (
    PHOTOGRAPH_EXAMS,
    needed_images,
    on_photograph,
    photograph_exam,
    photographs,
)
from octavo.multimodal.scenes_render import draw


def test_photographs_are_darkened_and_drawn_upon():
    [question] = exam_questions("digit", 0, 1)
    image = on_photograph(question.scenes[0], np.full((96, 96, 3), 200, np.uint8))
    assert image.min() <= 70 and (image == 70).all(-1).mean() > 0.3 and image.max() > 200


def test_there_is_one_wherever_octavo_is_installed():
    """matplotlib ships one, and octavo needs matplotlib."""
    found = photographs()
    assert "admiral" in found and all(image.shape == (96, 96, 3) for image in found.values())


@pytest.mark.parametrize("name", [name for name in PHOTOGRAPH_EXAMS if name.endswith("among photographs")])
def test_half_of_the_images_without_a_part_in_the_answer_are_photographs(name):
    questions, shown = photograph_exam(name, 3, 10)
    there = [image.tobytes() for image in photographs().values()]
    for question, images in zip(questions, shown, strict=True):
        needed = needed_images(question)
        assert len(needed) == (2 if name.startswith("multihop") else 1)
        drawn = draw(question.scenes)
        changed = {place for place, image in enumerate(images) if image.tobytes() != drawn[place].tobytes()}
        assert not changed & needed and len(changed) == (len(images) - len(needed) + 1) // 2
        assert all(images[place].tobytes() in there for place in changed)


def test_exams_repeat_and_differ_by_seed():
    for name in PHOTOGRAPH_EXAMS:
        one, same, other = (photograph_exam(name, seed, 3) for seed in (1, 1, 2))
        assert one.questions == same.questions != other.questions
        pairs = zip(chain(*one.images), chain(*same.images), strict=True)
        assert all(np.array_equal(first, second) for first, second in pairs)


def test_where_there_are_none(monkeypatch):
    monkeypatch.setattr(demo_photographs, "PHOTOGRAPHS", {"unicorn": ("no_such_package", "data/unicorn.png")})
    assert photographs() == {}
    with pytest.raises(ImportError, match=r"none of no_such_package is installed; pip install 'octavo\[photographs\]'"):
        photograph_exam("colour, on photographs", 0, 1)
