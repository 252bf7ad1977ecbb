"""The CPU launcher: what it sets, what it leaves alone, where it binds, and that it becomes octavo."""

import subprocess
import sys

import pytest

from octavo.scripts import launch


def machine(folder, online, nodes, siblings):
    """A folder like /sys/devices/system: CPUs that are online, each node's, and the hyper-threads of each CPU."""
    (folder / "cpu").mkdir()
    (folder / "cpu" / "online").write_text(online + "\n")
    for number, listed in enumerate(nodes):
        (folder / "node" / f"node{number}").mkdir(parents=True)
        (folder / "node" / f"node{number}" / "cpulist").write_text(listed + "\n")
    for cpu, listed in enumerate(siblings):
        topology = folder / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(listed + "\n")
    return folder


def test_lists_of_cpus():
    assert launch.cpus("0-3,8\n") == {0, 1, 2, 3, 8}
    assert launch.cpus("\n") == set()


@pytest.mark.parametrize(
    ("nodes", "allowed", "bound"),
    [
        (["0-3"], {0, 1, 2, 3}, None),
        (["0-1", "2-3"], {0, 1, 2, 3}, (0, {0, 1})),
        (["0", "1-3"], {0, 1, 2, 3}, (1, {1, 2, 3})),
        (["0-1", "2-3"], {2, 3}, None),
    ],
    ids=["one-node", "even", "uneven", "limited-already"],
)
def test_node_to_bind(tmp_path, nodes, allowed, bound):
    assert launch.node_to_bind(allowed, machine(tmp_path, "0-3", nodes, [])) == bound


def test_hyper_threads_count_once(tmp_path):
    system = machine(tmp_path, "0-3", ["0-3"], ["0,2", "1,3", "0,2", "1,3"])
    assert launch.physical_cores({0, 1, 2, 3}, system) == 2
    assert launch.physical_cores({0, 2}, system) == 1
    assert launch.physical_cores({7, 8}, system) == 2  # the kernel says nothing of them


def test_what_is_set_already_stays():
    assert launch.environment({}, 2, None) == {"OMP_NUM_THREADS": "2"} | launch.KEEP_MEMORY
    given = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": "own.so"}
    assert launch.environment(given, 2, "libx.so") == {"LD_PRELOAD": "libx.so:own.so"}
    assert launch.environment({"OMP_NUM_THREADS": "1"} | dict.fromkeys(launch.KEEP_MEMORY, "0"), 2, None) == {}


def test_allocator_is_found_named_or_refused(monkeypatch):
    monkeypatch.setattr(launch, "find_library", lambda name: "libtcmalloc.so.4" if name == "tcmalloc" else None)
    assert launch.allocator({}) == "libtcmalloc.so.4"
    assert launch.allocator({"OCTAVO_PRELOAD": "/own/libx.so"}) == "/own/libx.so"
    assert launch.allocator({"OCTAVO_PRELOAD": ""}) is None


def test_it_becomes_octavo(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = subprocess.run([sys.executable, "-P", "-m", launch.__name__, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "OMP_NUM_THREADS" in done.stderr and "experiment" in done.stdout
