import re

import pytest

from octavo.scripts.tasks.sources import Source


class WordTokenizer:
    """One token a word, sign or white-space character; lossless, so that lengths add up."""

    def __init__(self):
        self.ids = {}
        self.words = []

    def encode(self, text):
        return [self._id(word) for word in re.findall(r"\w+|\W", text)]

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)

    def _id(self, word):
        if word not in self.ids:
            self.ids[word] = len(self.words)
            self.words.append(word)
        return self.ids[word]


TOY_FILES = {
    "toy/__init__.py": "from .shapes import Square\n",
    "toy/config.py": "DEPTH = 3\n",
    "toy/shapes.py": (
        "from .config import DEPTH\n"
        "\n"
        "\n"
        "def scale(side, depth=DEPTH):\n"
        "    return side * depth\n"
        "\n"
        "\n"
        "class Square:\n"
        "    def __init__(self, side):\n"
        "        self.side = side\n"
    ),
    "toy/draw.py": (
        "import os\n"
        "\n"
        "from . import Square as Box\n"
        "from toy.shapes import scale\n"
        "\n"
        "\n"
        "def outline(width):\n"
        "    box = width + 1\n"
        "    box = Box(scale(box))\n"
        "    return os.fspath(box)\n"
        "\n"
        "\n"
        "def shadowed(scale):\n"
        "    return scale(1) + scale(2)\n"
        "\n"
        "\n"
        "def skipped(width):\n"
        "    result = scale(width)  # a comment\n"
        "    if scale(width): return None\n"
        "    return (\n"
        "        scale(width)\n"
        "    )\n"
    ),
    "toy/vendored.py": "raise SystemExit\n",
}


@pytest.fixture
def tokenizer():
    return WordTokenizer()


@pytest.fixture
def toy_files():
    return {path: text for path, text in TOY_FILES.items() if path != "toy/vendored.py"}


@pytest.fixture
def toy(tmp_path):
    """(source, folder of unpacked sources) of a project of four files, and one that may not be quoted."""
    source = Source(
        name="toy",
        version="1.0",
        wheel="toy-1.0-py3-none-any.whl",
        sha256="0" * 64,
        licence="MIT",
        copyright="Copyright A. Toymaker",
        licence_file="toy-1.0.dist-info/LICENSE",
        packages=("toy",),
        exclude=("toy/vendored.py",),
    )
    for path, text in {**TOY_FILES, source.licence_file: "Do what you like.\n"}.items():
        file = tmp_path / "sources" / source.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return source, tmp_path / "sources"
