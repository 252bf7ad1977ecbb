"""Items made from projects at hand, on a small project that stands for all of them."""

import pytest

from octavo.scripts.tasks import project_lines
from octavo.scripts.tasks.items import leaks, prompt_text
from octavo.scripts.tasks.metrics import closest
from octavo.scripts.tasks.mining import all_candidates, candidates, import_lines, parse_project
from octavo.scripts.tasks.sources import Source

PAD = "".join(f"def pad_{n}(value):\n    return value * {n}\n\n\n" for n in range(30))
HELPER = "def area(width, height):\n    return width * height\n\n\ndef twin(side):\n    count = area(side, side) + 1\n"
USER = (
    "import os\nfrom .helper import (\n    area,\n)\n\n\ndef local(side):\n    return side\n\n\n"
    f"{PAD}def near(side):\n    value = local(side) + 2\n    return value\n\n\n"
    "def use(side):\n    value = local(side) * 3\n    count = area(side, side) * 3\n    return count\n"
)
FILES = {"toy/__init__.py": "", "toy/helper.py": HELPER, "toy/use.py": USER, "toy/zebra.py": "Z = 1\n" * 900}


@pytest.fixture
def toy_projects(monkeypatch):
    project = parse_project(FILES)
    source = Source("toy", "1.0", "", "", "MIT", "", "", ("toy",))
    monkeypatch.setattr(project_lines, "PROJECTS", (("toy", "toy"), ("gone", "gone")))
    monkeypatch.setattr(project_lines, "_read", lambda name, folder: (source, project) if name == "toy" else None)
    return project


def make(tokenizer, lengths, classes=project_lines.CLASSES, count=3, room=8):
    return project_lines.make(tokenizer, lengths, classes, count, room, 0)


@pytest.mark.parametrize("length", [900, 1500])
def test_classes_and_lengths(length, toy_projects, tokenizer):
    made = make(tokenizer, [length])
    assert [(line.kind, line.length) for line in made] == [("in_project", length), ("in_file", length)]
    for line in made:
        item, prompt = line.item, prompt_text(line.item)
        assert 0.95 * (line.length - 8) <= item.tokens <= line.length - 8
        assert item.tokens == len(tokenizer.encode(prompt)) and not leaks(item.gold, prompt)
        assert (item.defined_in == item.path) is (line.kind == "in_file") is (item.setting == "in_file")
        assert (item.uses, item.source) == ("area" if line.kind == "in_project" else "local", "toy")


def test_what_the_line_uses_is_in_the_prompt_and_far_away(toy_projects, tokenizer):
    project, own = (line.item for line in make(tokenizer, [1500]))
    assert "def area" in project.context[-1][1] and "def pad_0(" not in project.prefix  # the file's begin is cropped
    before = own.prefix.split("\n")
    assert len(before) - before.index("def local(side):") >= project_lines.DISTANCE


def test_the_same_seed_gives_the_same_items(toy_projects, tokenizer):
    assert make(tokenizer, [900]) == make(tokenizer, [900])


def test_a_line_is_asked_for_once(toy_projects, tokenizer):
    with pytest.raises(ValueError, match="no line of class in_project has a prompt of 1500 tokens"):
        make(tokenizer, [900, 1500])  # the project has one line of the class


@pytest.mark.parametrize(
    "lengths, message",
    [([8], "8 tokens has no room for a prompt"), ([90_000], "no line of class in_project has a prompt")],
)
def test_what_cannot_be_had_is_said(lengths, message, toy_projects, tokenizer):
    with pytest.raises(ValueError, match=message):
        make(tokenizer, lengths)


def test_a_line_that_reads_both_is_of_the_other_file():
    project = parse_project(
        {**FILES, "toy/both.py": "from .helper import area\n\n\ndef own(x):\n    return own(area(x, 1))\n"}
    )
    (found,) = all_candidates(project["toy/both.py"], project)
    assert (found.name, found.setting) == ("area", "cross_file_first")
    assert candidates(project["toy/use.py"], project) == [
        c for c in all_candidates(project["toy/use.py"], project) if c.setting != "in_file"
    ]


def test_imports_are_quoted_as_they_stand():
    module = parse_project(FILES)["toy/use.py"]
    assert import_lines(module, before=99) == ["import os", "from .helper import (\n    area,\n)"]
    assert import_lines(module, before=3) == ["import os"]
    ünder = parse_project({"a.py": "if True:\n    x = 'ü'; import os  # é\n"})["a.py"]
    assert import_lines(ünder, before=99) == ["import os"]


def test_the_closest_line():
    assert closest(["abcd", "xy"], "abce") == 75.0 and closest([], "a") == 0.0


def test_the_projects_come_with_octavo():
    """Folders of packages that are there in any case; reading them takes long, so only that they are there."""
    from importlib.metadata import distribution

    assert len(set(project_lines.PROJECTS)) == len(project_lines.PROJECTS) >= 15
    for name, folder in project_lines.PROJECTS:
        assert distribution(name).locate_file(folder).is_dir(), folder
