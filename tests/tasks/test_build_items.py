from dataclasses import replace

import pytest

from octavo.scripts.tasks.build_items import build_items, notice
from octavo.scripts.tasks.items import CodeItem, dump_items, leaks, prompt_text, sha256
from octavo.scripts.tasks.packing import BuildSpec, likeness
from octavo.scripts.tasks.sources import Source

WHOLE = """\
# Repo Name: toy
# Path: toy/config.py
DEPTH = 3

# Path: toy/__init__.py
from .shapes import Square

# Path: toy/shapes.py
from .config import DEPTH


def scale(side, depth=DEPTH):
    return side * depth


class Square:
    def __init__(self, side):
        self.side = side

# Path: toy/draw.py
import os

from . import Square as Box
from toy.shapes import scale


def outline(width):
    box = width + 1
   """


def spec(*targets, **others):
    return BuildSpec(targets=targets, **{"shortfall": 1.0, "max_in_file": 1.0, "likeness": (0, 100), **others})


def test_the_item_of_a_small_project_exactly(toy, tokenizer):
    source, folder = toy
    (item,) = build_items(folder, tokenizer, spec(1000), sources=[source])
    assert prompt_text(item) == WHOLE
    assert item == CodeItem(
        item_id="toy-1.0/toy/draw.py:9",
        source="toy",
        version="1.0",
        licence="MIT",
        path="toy/draw.py",
        setting="cross_file_first",
        context=item.context,
        prefix=item.prefix,
        gold="    box = Box(scale(box))",
        uses="Square",
        defined_in="toy/shapes.py",
        tokens=len(tokenizer.encode(WHOLE)),
        prompt_sha256=sha256(WHOLE),
    )
    assert item.target == " box = Box(scale(box))"
    assert [path for path, _ in item.context] == ["toy/config.py", "toy/__init__.py", "toy/shapes.py"]


def test_a_file_that_does_not_fit_is_cut_by_lines_around_the_definition(toy, tokenizer):
    source, folder = toy
    in_file = len(tokenizer.encode(WHOLE[WHOLE.index("# Path: toy/draw.py") :]))
    cut = "# Repo Name: toy\n# Path: toy/shapes.py\nclass Square:\n    def __init__(self, side):\n\n\n"
    target = in_file + len(tokenizer.encode(cut))
    (item,) = build_items(folder, tokenizer, spec(target), sources=[source])
    assert item.context == (("toy/shapes.py", "class Square:\n    def __init__(self, side):"),)
    # With more room than the file has lines below the definition the window moves up.
    (item,) = build_items(folder, tokenizer, spec(target + 30), sources=[source])
    lines = item.context[-1][1].split("\n")
    assert lines[0] != "class Square:"
    assert lines[-3:] == ["class Square:", "    def __init__(self, side):", "        self.side = side"]


@pytest.mark.parametrize("target", range(110, 230, 7))
def test_prompts_never_exceed_their_target_and_always_show_the_definition(toy, tokenizer, target):
    source, folder = toy
    (item,) = build_items(folder, tokenizer, spec(target), sources=[source])
    assert item.tokens == len(tokenizer.encode(prompt_text(item))) <= target
    assert "class Square:" in item.context[-1][1]
    assert not leaks(item.gold, prompt_text(item))


def test_long_files_keep_their_imports_and_the_last_lines(toy, tokenizer):
    source, folder = toy
    (item,) = build_items(folder, tokenizer, spec(1000, in_file_lines=2), sources=[source])
    assert item.prefix == (
        "import os\nfrom . import Square as Box\nfrom toy.shapes import scale\n\n"
        "def outline(width):\n    box = width + 1"
    )


def test_the_same_seed_gives_the_same_list(toy, tokenizer):
    source, folder = toy
    for name in "bcdefgh":  # more files with a candidate each, so that the order could vary
        text = f"from .shapes import scale\n\n\ndef {name}():\n    return scale({name!r})\n"
        (folder / source.folder / "toy" / f"{name}.py").write_text(text)
    lists = [build_items(folder, tokenizer, spec(200, 200, 200), seed, [source]) for seed in (5, 5, 6)]
    texts = [dump_items(items, seed=0) for items in lists]
    assert texts[0] == texts[1] != texts[2]
    assert len({item.path for item in lists[0]}) == 3


def test_a_gold_line_that_the_context_holds_is_passed_over(toy, tokenizer):
    source, folder = toy
    shapes = folder / source.folder / "toy/shapes.py"
    shapes.write_text(shapes.read_text() + "\n\ndef twin(box):\n    box  =  Box(scale(box))\n")
    with pytest.raises(ValueError, match=r"no source has an item of 1000 tokens left \(item 0 of 1\)"):
        build_items(folder, tokenizer, spec(1000), sources=[source])


def test_a_gold_line_with_a_word_that_the_prompt_lacks_is_passed_over(toy, tokenizer):
    source, folder = toy
    draw = folder / source.folder / "toy/draw.py"
    draw.write_text(draw.read_text().replace("    box = Box(", "    crate = Box("))
    with pytest.raises(ValueError, match=r"no source has an item of 1000 tokens left"):
        build_items(folder, tokenizer, spec(1000), sources=[source])


@pytest.mark.parametrize(
    "limits", [{"shortfall": 0.02}, {"max_in_file": 0.01}, {"max_gold_tokens": 8}, {"likeness": (90, 95)}]
)
def test_limits_that_no_candidate_meets_are_named(toy, tokenizer, limits):
    source, folder = toy
    with pytest.raises(ValueError, match="no source has an item of 1000 tokens left"):
        build_items(folder, tokenizer, spec(1000, **limits), sources=[source])


def test_likeness_is_that_of_the_most_similar_cross_file_line(toy, tokenizer):
    source, folder = toy
    shapes = folder / source.folder / "toy/shapes.py"
    shapes.write_text(shapes.read_text() + "\n\ndef twin(cup):\n        cup = Cup(scale(cup))\n")
    (item,) = build_items(folder, tokenizer, spec(1000), sources=[source])
    # "box = Box(scale(box))" and "cup = Cup(scale(cup))" have 12 of 21 characters in common, in order.
    assert likeness(item) == pytest.approx(100 * 2 * 12 / 42)
    (again,) = build_items(folder, tokenizer, spec(1000, likeness=(57, 58)), sources=[source])
    assert again == item
    with pytest.raises(ValueError, match="no source has an item"):
        build_items(folder, tokenizer, spec(1000, likeness=(0, 57)), sources=[source])


def test_a_missing_source_says_how_to_get_it(toy, tokenizer):
    source, folder = toy
    with pytest.raises(ValueError, match=r"toy-2\.0 does not exist: run `python -m octavo\.scripts\.setup_sources`"):
        build_items(folder, tokenizer, spec(1000), sources=[replace(source, version="2.0")])


def test_notice_names_owner_and_terms(toy):
    source, folder = toy
    apache: Source = replace(source, name="other", licence="Apache-2.0", copyright="Copyright O.")
    text = notice([source, apache], folder)
    assert "toy 1.0\nMIT\nCopyright A. Toymaker\n\nDo what you like.\n" in text
    assert "other 1.0\nApache-2.0\nCopyright O.\n\nThe text of the Apache License 2.0 is in the LICENSE file" in text
