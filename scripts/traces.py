"""Page traffic that comes with octavo, recorded from real runs by ``octavo.scripts.record_traces``."""

from __future__ import annotations

from importlib.resources import as_file, files

from octavo.core.inspection.trace import Trace

SHIPPED = ("main_job", "chat")
"""The main job on its first items, five methods each; and a conversation in turns whose sessions fork."""


def file_name(name: str) -> str:
    return f"trace_{name}.npz"


def load_shipped(name: str) -> Trace:
    """A shipped trace by its name."""
    with as_file(files("octavo.scripts.tasks") / "data" / file_name(name)) as file:
        return Trace.load(file)
