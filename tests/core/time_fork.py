"""Host time of forking a long sequence, by hand: ``python tests/core/time_fork.py``. No model runs: a sequence of
131,072 tokens is given its pages, keys and nodes, and forked as ``n`` samples and sessions fork."""

import statistics
import time
from types import SimpleNamespace

import numpy as np

from octavo.core import SamplingParams
from octavo.core.execution.token_list import TokenList
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_layout import PageLayout
from octavo.core.memory.page_pool import PagePool
from octavo.core.memory.prefix_cache import PrefixCache, root_key
from octavo.core.policies import ALLOCATORS, EVICTIONS, FixedPages
from octavo.core.request import Request
from octavo.core.sequence import Sequence

TOKENS, PAGE, FORKS = 131_072, 16, 2_000


def long_sequence() -> tuple[PagePool, Sequence]:
    """A sequence whose pages are all computed and findable."""
    pool = PagePool(ALLOCATORS["stack"](2 * TOKENS // PAGE), EVICTIONS["lru"](), PrefixCache())
    prompt = np.random.default_rng(0).integers(0, 50_000, TOKENS).tolist()
    layout = PageLayout([], {"text": FixedPages(PAGE)}, PAGE)
    request = Request("long", prompt, SamplingParams(), None, 0, 0, 0, root_key(), layout, 0, 2 * TOKENS, frozenset())
    sequence = Sequence(request, 0, TokenList(prompt), pool, LayerPlan.of((0,)))
    sequence.table.append(pool.allocate(TOKENS // PAGE))
    parent = request.root
    contents = sequence.contents(0, TOKENS // PAGE)
    for page, (key, content) in enumerate(zip(sequence.keys(TOKENS // PAGE), contents, strict=True)):
        parent = pool.index.enter(key, parent, *content)
        pool.publish(int(sequence.table.pages(page, page + 1)[0]), parent)
        sequence.nodes.append(parent)
    sequence.computed = TOKENS
    return pool, sequence


def microseconds(call) -> SimpleNamespace:
    times = []
    for _ in range(FORKS):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    return SimpleNamespace(median=statistics.median(times), p99=times[FORKS * 99 // 100])


def main() -> None:
    pool, sequence = long_sequence()

    def sample() -> Sequence:
        child = Sequence(sequence.request, 1, sequence.tokens.fork(), pool, LayerPlan.of((0,)))
        child.adopt_prefix(sequence)
        return child

    for name, call in (("block table", sequence.table.fork), ("sequence, with keys and nodes", sample)):
        took = microseconds(call)
        print(f"{name}: {TOKENS} tokens fork in {took.median:.1f} us (median of {FORKS}; p99 {took.p99:.1f} us)")


if __name__ == "__main__":
    main()
