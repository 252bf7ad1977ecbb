"""Which modules of races there are, and which of their races a run takes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from octavo.scripts.kernel_races.race import Race
from octavo.scripts.refusal import one_of

MODULES = (
    "attention",
    "prefill",
    "shared",
    "select",
    "pages",
    "append_fused",
    "append_decode",
    "step",
    "sampling",
    "rotation",
)
"""In the order in which they run. A module is a file of this folder that exports ``races()``; to add one, name it here.
One that is named and not there is passed over."""


def races(only: Sequence[str] = (), limit: int | None = None) -> list[Race]:
    """The first ``limit`` races of the modules or kernels that ``only`` names, or of all; judged ones come last.

    A name is a module (``select``), a kernel's number (``k13``) or its name (``sample``), in any case.

    Raises:
        ConfigError: a name that is none of them.
    """
    found = {
        module: import_module(f"{__package__}.{module}").races()
        for module in MODULES
        if find_spec(f"{__package__}.{module}")
    }
    names = {race.name: _names(module, race) for module, listed in found.items() for race in listed}
    known = tuple(dict.fromkeys(name for own in names.values() for name in own))
    for name in only:
        one_of("only", name.lower(), known)
    wanted = {name.lower() for name in only}
    taken = [race for listed in found.values() for race in listed if not wanted or wanted & set(names[race.name])]
    return sorted(taken[:limit], key=lambda race: race.fit == "judged")


def _names(module: str, race: Race) -> list[str]:
    """What a race can be called by."""
    return [module, *race.kernel.lower().replace("+", " ").split()]
