"""A long random life of the pool: tables grow, fork, are written to, cut, lose what lies behind a window, and their
pages are found again and evicted, for every allocator and eviction policy, and no invariant breaks."""

from itertools import product
from random import Random

import numpy as np
import pytest

from octavo.core.memory.block_table import BlockTable, check_tables
from octavo.core.memory.page_pool import PagePool
from octavo.core.memory.prefix_cache import PrefixCache, page_key, root_key
from octavo.core.policies import ALLOCATORS, EVICTIONS

UNITS = 512
LONGEST = 32
"""Pages of a table, at most."""

SIZES = (1, 2, 3, 5)
"""Units of a page: each table has pages of one of these sizes."""


class Life:
    """Random traffic on one pool. ``operations`` counts pages that were allocated or freed, references included."""

    def __init__(self, allocator, eviction, seed):
        self.random = Random(seed)
        self.pool = PagePool(ALLOCATORS[allocator](UNITS), EVICTIONS[eviction](), PrefixCache())
        self.tables = []  # (table, units of a page, text number); odd texts are of layers with a window
        self.operations = 0
        self.texts = 0

    def step(self):
        self.pool.book.clock += 1
        move = self.random.choice(
            [self.grow, self.grow, self.open, self.fork, self.write, self.cut, self.drop, self.end]
        )
        move()

    def open(self):
        """A table whose text begins like an earlier one's or is new, with a prefix hit as far as there is one."""
        size = self.random.choice(SIZES)
        text = self.random.randrange(self.texts + 1)
        self.texts = max(self.texts, min(text + 1, 40))
        found = []
        for key, parent, tokens in self.chain(text, size, LONGEST):
            node = self.pool.index.find(key, parent if not found else found[-1], tokens, "")
            if node is None or not node.page(0):
                break
            found.append(node)
        table = BlockTable(self.pool)
        pages = np.array([node.page(0) for node in found], np.int32)
        if self.pool.idle_among(pages) <= self.pool.available:
            self.pool.retain(pages)
            self.pool.book.touch(pages, 0)
            table.append(pages)
            self.operations += len(pages)
        self.tables.append((table, size, text))
        if len(self.tables) > 24:
            self.end()

    def chain(self, text, size, pages):
        """Key, root and tokens of the first pages of a text; texts of one kind share their beginnings in threes."""
        key = root = root_key([("size", str(size)), ("window", str(text % 2))])
        for page in range(pages):
            tokens = np.full(2, text // 6 if page < 4 else text, np.int32) * 100 + page
            key = page_key(key, tokens)
            yield key, root, tokens

    def grow(self):
        if not self.tables:
            return
        table, size, text = self.random.choice(self.tables)
        count = self.random.randrange(1, LONGEST // 2)
        if count * size > self.pool.available or table.n_pages + count > LONGEST:
            return
        table.append(self.pool.allocate(count, size, table.near))
        self.operations += count
        if self.random.random() < 0.7:
            self.publish(table, size, text)

    def publish(self, table, size, text):
        """All pages of a table that has every one of them, in order."""
        if table.first_page:
            return
        pages, parent = table.pages().tolist(), None
        for (key, root, tokens), page in zip(self.chain(text, size, table.n_pages), pages, strict=True):
            node = self.pool.index.enter(key, parent or root, tokens, "")
            if page not in self.pool.index:
                self.pool.publish(page, node, chained=text % 2 == 0)
            parent = self.pool.index.node(page)
            if parent is not node:
                return

    def fork(self):
        if self.tables and len(self.tables) < 24:
            table, size, text = self.random.choice(self.tables)
            self.tables.append((table.fork(), size, text))

    def write(self):
        """To the last page, as decoding does."""
        if not self.tables:
            return
        table, size, _ = self.random.choice(self.tables)
        last = table.n_pages - 1
        if last >= table.first_page and table.copy_needed(last) and size <= self.pool.available:
            pairs = table.copy_on_write(last)
            assert pairs.shape == (size, 2) and not set(pairs[:, 0]) & set(pairs[:, 1])
            self.operations += 2

    def cut(self):
        if self.tables:
            table, _, _ = self.random.choice(self.tables)
            kept = self.random.randrange(table.n_pages + 1)
            self.operations += table.n_pages - max(kept, table.first_page)
            table.truncate(kept)

    def drop(self):
        """What lies behind a window: whoever holds a page of a chain holds those in front of it, too."""
        table, _, text = self.random.choice(self.tables) if self.tables else (None, None, 0)
        if text % 2:
            before = table.first_page
            table.drop_before(self.random.randrange(table.n_pages + 1))
            self.operations += table.first_page - before

    def end(self):
        if self.tables:
            table, _, _ = self.tables.pop(self.random.randrange(len(self.tables)))
            self.operations += table.n_pages - table.first_page
            table.release()

    def check(self):
        self.pool.check()
        check_tables((table for table, _, _ in self.tables), self.pool)
        for table, size, _ in self.tables:
            assert (self.pool.size[table.held] == size).all()

    def live(self, operations, every):
        steps = 0
        while self.operations < operations:
            self.step()
            steps += 1
            if steps % every == 0:
                self.check()
        while self.tables:
            self.end()
        self.check()
        assert self.pool.held_units == 0 and self.pool.evictions > 0


COMBINATIONS = list(product(ALLOCATORS, EVICTIONS))


@pytest.mark.parametrize(("allocator", "eviction"), COMBINATIONS)
def test_a_short_life(allocator, eviction):
    Life(allocator, eviction, seed=1).live(operations=2000, every=20)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("allocator", "eviction"), COMBINATIONS)
def test_a_long_life(allocator, eviction):
    """A million operations over all combinations."""
    Life(allocator, eviction, seed=2).live(operations=1_000_000 // len(COMBINATIONS) + 1, every=100)
