"""What an ImagePolicy refuses when it is made, its errors as values, and what importing the package starts."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import octavo.multimodal as multimodal
from octavo.multimodal import ImageError, ImageLimitError, ImagePolicy, load_image

BAD = [
    {name: value}
    for name in ("max_bytes", "max_pixels", "min_side", "max_side", "max_frames")
    for value in (0, -1, 1.5, True, "8", None)
] + [
    {"max_aspect": value} for value in (0.5, 0, -1, float("inf"), float("nan"), True, "2", None)
] + [
    {"background": value}
    for value in ("red", (1, 2), (1, 2, 3, 4), (0, 0, 256), (-1, 0, 0), (0.5, 0, 0), (True, 0, 0), 7, None, b"abc")
] + [
    {"resize": "stretch"}, {"resize": None},
    {"min_side": 9, "max_side": 8}, {"min_side": 9, "max_pixels": 80},
    {"allowed_root": "/nowhere/at/all"}, {"allowed_root": os.devnull}, {"allowed_root": 3}, {"allowed_root": "a\0b"},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_bad_fields_are_refused_by_name_and_value(fields):
    with pytest.raises(ValueError) as caught:
        ImagePolicy(**fields)
    message = str(caught.value)
    assert all(name in message and str(value) in message.replace("\\x00", "\0") for name, value in fields.items())


def test_good_fields():
    assert ImagePolicy(background=[1, 2, 3]).background == (1, 2, 3)
    assert ImagePolicy(min_side=9, max_pixels=81, max_aspect=1).max_aspect == 1
    hash(ImagePolicy())


def test_the_folder_is_kept_as_a_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ImagePolicy(allowed_root=".").allowed_root == tmp_path.resolve()


def test_a_limit_error_says_which_limit_and_both_numbers_and_survives_a_worker():
    with pytest.raises(ImageLimitError) as caught:
        load_image(np.zeros((8, 40, 3), np.uint8), ImagePolicy(max_pixels=300))
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(error, ImageError) and isinstance(error, ValueError)
        assert (error.limit, error.value, error.bound) == ("max_pixels", 320, 300)
        assert str(error) == (
            "the array is 40 x 8 (width x height), 320 pixels; the limit is max_pixels=300: "
            "resize the image, or give an ImagePolicy with another max_pixels"
        )


def test_every_public_name_is_there():
    assert set(multimodal._HOMES) == set(multimodal.__all__) == set(dir(multimodal))
    for name in multimodal.__all__:
        assert getattr(multimodal, name).__module__ == f"octavo.multimodal.{multimodal._HOMES[name]}"
    with pytest.raises(AttributeError, match="load_picture"):
        multimodal.load_picture  # noqa: B018


def test_importing_starts_neither_torch_nor_pillow():
    code = """
import sys
import octavo.multimodal
heavy = {"torch", "PIL", "numpy", "open_clip", "transformers", "octavo.core"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from octavo.multimodal import ImagePolicy, image_id, load_image
load_image.__module__
heavy -= {"numpy"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import numpy
load_image(numpy.zeros((8, 8, 3), numpy.uint8))
assert "PIL" in sys.modules and "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
