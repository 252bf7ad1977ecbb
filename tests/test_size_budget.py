"""The mechanism stays small enough to read in an afternoon."""

from pathlib import Path

CORE = Path(__file__).parents[1] / "core"


def lines(path):
    return len(path.read_text().splitlines())


def test_the_engine_stays_near_3000_lines():
    assert sum(map(lines, CORE.glob("*.py"))) <= 3850


def test_so_does_the_memory_system():
    assert sum(map(lines, (CORE / "memory").glob("*.py"))) <= 2900


def test_no_file_needs_a_table_of_contents():
    long = {path.name: lines(path) for path in CORE.rglob("*.py") if lines(path) > 600}
    assert not long
