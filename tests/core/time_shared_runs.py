"""Host time of finding what a decoding batch shares, by hand: ``python tests/core/time_shared_runs.py``. No model runs:
256 block tables of 8,192 tokens on pages of 16 share nothing, one of four prompts, or all of one."""

import random
import statistics
import time
from types import SimpleNamespace

from octavo.core.execution.shared_runs import RunFinder
from octavo.core.memory.block_table import BlockTable
from octavo.core.memory.page_pool import PagePool
from octavo.core.memory.prefix_cache import PrefixCache
from octavo.core.policies import ALLOCATORS, EVICTIONS

TOKENS, PAGE, SEQUENCES, CHANGES = 8_192, 16, 256, 50
PAGES = TOKENS // PAGE


class Holder(SimpleNamespace):
    """What the finder looks at of a sequence."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def batch(kind: str) -> list[Holder]:
    pool = PagePool(ALLOCATORS["stack"](2 * SEQUENCES * PAGES), EVICTIONS["lru"](), PrefixCache())
    prompts = [pool.allocate(PAGES) for _ in range(4)]
    first = BlockTable(pool)
    first.append(prompts[0])
    holders = []
    for number in range(SEQUENCES + CHANGES):
        table = first.fork() if kind == "forks of one" else BlockTable(pool)
        if kind == "hits of four prompts":
            pages = prompts[number % 4][: PAGES - number % 7]
            pool.retain(pages)
            table.append(pages)
        table.append(pool.allocate(PAGES + 1 - table.n_pages))
        table.stale_from = table.n_pages
        holders.append(Holder(table=table))
    random.Random(0).shuffle(holders)
    return holders


def microseconds(finder: RunFinder, running: list[Holder]) -> float:
    began = time.perf_counter()
    finder.forget(running)
    finder.find(running, [TOKENS] * len(running))
    return (time.perf_counter() - began) * 1e6


def main() -> None:
    for kind in ("nothing shared", "hits of four prompts", "forks of one"):
        holders, finder = batch(kind), RunFinder(PAGE, 2048)
        first = statistics.median(microseconds(RunFinder(PAGE, 2048), holders[:SEQUENCES]) for _ in range(9))
        finder.find(holders[:SEQUENCES], [TOKENS] * SEQUENCES)
        same = [microseconds(finder, holders[:SEQUENCES]) for _ in range(CHANGES)]
        changed = [microseconds(finder, holders[i : SEQUENCES + i]) for i in range(1, CHANGES)]
        print(
            f"{kind}: {first:.0f} us when all come in, {statistics.median(same):.0f} us while they stay, "
            f"{statistics.median(changed):.0f} us when one ends and one comes in"
        )


if __name__ == "__main__":
    main()
