"""What lines of code are worth, on small prompts whose every line is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.sparse.code_structure import Worth, line_worth, token_prior

CODE = '''\
# Path: tools.py
import os
from pathlib import (
    Path,
)

LIMIT = 3
UNUSED = 4


@decorated
def area(
    width,
    height,
):
    """Doc."""
    return width * height


def other():
    return 1


# Path: main.py
class Box:
    side = 2

    def __init__(self, side):
        self.side = side

    def grow(self):
        total = 0
        more = area(self.side, LIMIT)
       '''


def marked(text, **changes):
    worth = Worth(**{"near_lines": 3, **changes})
    return {number: value for number, value in enumerate(line_worth(text, worth)) if value}


def test_every_line_of_a_prompt():
    lines = CODE.split("\n")
    at = {line.strip(): number for number, line in enumerate(lines)}
    expected = {at["import os"]: 0.5, at["from pathlib import ("]: 0.5, at["Path,"]: 0.5, 4: 0.5}
    expected |= {at["LIMIT = 3"]: 1.0}
    expected |= dict.fromkeys(range(at["def area("], at["):"] + 1), 1.0)
    expected |= {at["def other():"]: 0.3, at["def __init__(self, side):"]: 0.3}
    expected |= {at["class Box:"]: 0.9, at["def grow(self):"]: 0.9}
    assert marked(CODE) == expected


def test_near_lines_name_what_they_use():
    at = CODE.split("\n").index("def area(")
    assert marked(CODE, near_lines=1)[at] == 0.3  # the cursor's own line is empty
    assert marked(CODE, near_lines=2)[at] == 1.0
    assert marked(CODE.rsplit("\n", 1)[0] + "\n        return other(")[CODE.split("\n").index("def other():")] == 1.0


def test_the_cursor_is_in_the_function_whose_body_it_continues():
    text = "class A:\n    def one(self):\n        pass\n\n    def two(self):\n        x = 1\n\n    y = 2\n   "
    assert marked(text) == {0: 0.9, 1: 0.3, 4: 0.3}  # between methods: in the class, and in no function
    assert marked("def a():\n    pass\n\n\nb = 1\n") == {0: 0.3}  # at module level: in nothing


@pytest.mark.parametrize(
    "text, lines",
    [
        ("        return 1\n\ndef f(x:\n    y = (", {2}),  # begins and ends in the middle of something
        ("def f(\n    a,\n    b,\n):\n    if (a\n", {0, 1, 2, 3}),
        ("from a import (\n    b,\n", {0}),
        ("class C(\n", {0}),
        ("", set()),
        ("x", set()),
    ],
)
def test_code_that_does_not_parse_is_read_by_its_lines(text, lines):
    assert set(marked(text)) == lines


def test_a_token_is_worth_its_best_line():
    text = "import os\nx = 1\ndef f():\n    pass"
    offsets = [(0, 6), (6, 9), (10, 12), (12, 18), (18, 27), (27, 31), (31, 31)]
    assert token_prior(text, offsets, Worth(near_lines=1)) == [0.5, 0.5, 0.0, 0.9, 0.9, 0.0, 0.0]


@given(st.text(st.sampled_from("def class import()[]:\n \t'\"#@=xyé"), max_size=80))
def test_any_text_has_a_worth(text):
    values = line_worth(text)
    assert len(values) == text.count("\n") + 1 and all(0 <= value <= 1 for value in values)
    assert len(token_prior(text, [(i, i + 1) for i in range(len(text))])) == len(text)
