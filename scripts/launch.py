"""The command ``octavo-cpu``: octavo as a process of its own, with the environment that CPU execution wants.

See docs/cpu.md for what each setting does and what it was measured to bring. A variable that is set already is left as
it is, so that each of them can be chosen by hand.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path

NAME = "octavo-cpu"
ALLOCATORS = ("tcmalloc_minimal", "tcmalloc")
"""Libraries to preload, by the linker's name: the first that is found. jemalloc slowed large prompts down."""

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""For the C library's own allocator: blocks of up to 32 MiB, its most, come from memory that it keeps."""

SYSTEM = Path("/sys/devices/system")


def environment(given: Mapping[str, str], cores: int, allocator: str | None) -> dict[str, str]:
    """What to add to the environment ``given``, for a process on so many physical cores.

    Args:
        allocator: the library to preload, if there is one. It goes in front of what ``LD_PRELOAD`` lists already.
    """
    wanted = {"OMP_NUM_THREADS": str(cores)} | ({} if allocator else KEEP_MEMORY)
    added = {name: value for name, value in wanted.items() if name not in given}
    if allocator:
        added["LD_PRELOAD"] = ":".join(filter(None, (allocator, given.get("LD_PRELOAD"))))
    return added


def allocator(given: Mapping[str, str]) -> str | None:
    """``$OCTAVO_PRELOAD``, empty for none; without it the first of ``ALLOCATORS`` that the linker knows."""
    if "OCTAVO_PRELOAD" in given:
        return given["OCTAVO_PRELOAD"] or None
    return next(filter(None, map(find_library, ALLOCATORS)), None)


def cpus(text: str) -> set[int]:
    """The numbers in a list of the kernel's, such as ``0-3,8``."""
    bounds = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in bounds for cpu in range(int(first), int(last or first) + 1)}


def node_to_bind(allowed: set[int], system: Path = SYSTEM) -> tuple[int, set[int]] | None:
    """The NUMA node with the most CPUs, and those; None with one node, or where somebody has limited the process."""
    if allowed != cpus((system / "cpu" / "online").read_text()):
        return None
    nodes = {int(path.name[4:]): cpus((path / "cpulist").read_text()) for path in (system / "node").glob("node[0-9]*")}
    if len(nodes) < 2:
        return None
    return min(nodes.items(), key=lambda node: (-len(node[1]), node[0]))


def physical_cores(allowed: set[int], system: Path = SYSTEM) -> int:
    """Cores among some CPUs; hyper-threads of one core count once."""
    siblings = (system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in allowed)
    return len({path.read_text() if path.exists() else path for path in siblings})


def main() -> None:
    """Say what is set, and become octavo with the same arguments."""
    command = [sys.executable, "-P", "-m", "octavo.scripts.main", *sys.argv[1:]]
    allowed = os.sched_getaffinity(0)
    binding = node_to_bind(allowed) if shutil.which("numactl") else None
    if binding is not None:
        node, allowed = binding
        command = ["numactl", f"--cpunodebind={node}", f"--membind={node}", *command]
    added = environment(os.environ, physical_cores(allowed), allocator(os.environ))
    said = [f"{name}={value}" for name, value in added.items()] + command[: command.index(sys.executable)]
    print(f"{NAME}: {' '.join(said) or 'everything is set already'}", file=sys.stderr, flush=True)
    os.execvpe(command[0], command, {**os.environ, **added})


if __name__ == "__main__":
    main()
