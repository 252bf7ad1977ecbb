"""docs/sparse.md lists what there is."""

import re
from pathlib import Path

from .method_cases import CONFIGS

GUIDE = (Path(__file__).parents[2] / "docs" / "sparse.md").read_text()


def test_the_guide_lists_every_method():
    named = set(re.findall(r"`(\w+)`", GUIDE[GUIDE.index("## The methods") :]))
    assert {path.stem for path in CONFIGS.glob("*.yaml")} <= named
