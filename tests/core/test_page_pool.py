"""Reference counts, idle pages, pages of several units and two-level block tables, by exact page ids."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from octavo.core.memory.block_table import LEAF_PAGES, BlockTable, check_tables
from octavo.core.memory.page_layout import PageLayout, Segment
from octavo.core.memory.page_pool import PagePool
from octavo.core.memory.prefix_cache import PrefixCache, page_key, root_key
from octavo.core.policies import ALLOCATORS, EVICTIONS, FixedPages


def ids(*pages):
    return np.array(pages, np.int32)


def pool_of(units, allocator="stack", **fields):
    return PagePool(ALLOCATORS[allocator](units), EVICTIONS["lru"](), PrefixCache(), **fields)


def publish(pool, page, token=0):
    """Make a page findable as the first page of a prompt of one repeated token."""
    tokens = np.full(4, token, np.int32)
    pool.publish(page, pool.index.enter(page_key(root_key(), tokens), root_key(), tokens, ""))


class TestPagePool:
    def test_life_of_a_page(self):
        pool = pool_of(4)
        assert (pool.free_units, pool.cached_units, pool.held_units) == (4, 0, 0)
        pages = pool.allocate(3)
        publish(pool, 1)
        assert (pool.free_units, pool.cached_units, pool.held_units) == (1, 0, 3)
        pool.retain(ids(1))
        pool.release(ids(1, 2))
        assert pool.refs[1:4].tolist() == [1, 0, 1] and (pool.free_units, pool.cached_units) == (2, 0)
        pool.release(ids(3, 1))
        assert (pool.free_units, pool.cached_units, pool.held_units) == (3, 1, 0)
        pool.retain(ids(1))
        assert (pool.cached_units, pool.held_units, pool.idle_among(pages)) == (0, 1, 2)
        pool.release(ids(1))
        pool.check()
        assert pool.allocate(4).tolist() == [1, 3, 2, 4] and pool.evictions == 1 and len(pool.index) == 0
        pool.check()

    def test_unchained_pages_need_nothing_in_front_of_them(self):
        """Pages 1 and 2 hold one node, 3 stands behind it. Whoever holds 3 holds 2 as well, which is unchained; so 1 is
        idle in front of a held page, and may go."""
        pool = pool_of(4)
        pool.allocate(3)
        head, tail = np.zeros(4, np.int32), np.ones(4, np.int32)
        key = page_key(root_key(), head)
        node = pool.index.enter(key, root_key(), head, "")
        for page in (1, 2):
            pool.publish(page, node)
        pool.unchain(ids(2))
        pool.publish(3, pool.index.enter(page_key(key, tail), node, tail, ""))
        pool.release(ids(1))
        pool.check()
        assert (pool.free_units, pool.cached_units, pool.available) == (1, 1, 2)
        assert sorted(pool.allocate(2).tolist()) == [1, 4] and pool.evictions == 1
        pool.check()
        assert node.page(0) == 2

    def test_unfindable_pages_go_first_then_the_oldest_chain_tail(self):
        pool = pool_of(6)
        first, second = BlockTable(pool), BlockTable(pool)
        first.append(pool.allocate(3))
        second.append(pool.allocate(2))
        for page in (1, 2, 4, 5):
            publish(pool, page, page)
        first.release()
        second.release()
        assert (pool.free_units, pool.cached_units) == (2, 4)
        taken = [pool.allocate(1)[0] for _ in range(6)]
        assert set(taken[:2]) == {3, 6} and taken[2:] == [2, 1, 5, 4]

    def test_generation_tells_owners_apart(self):
        pool = pool_of(2)
        (page,) = pool.allocate(1)
        before = pool.generation[page]
        pool.release(ids(page))
        assert pool.allocate(1)[0] == page and pool.generation[page] == before + 1

    def test_a_release_too_many_is_an_error(self):
        pool = pool_of(2)
        pool.allocate(1)
        pool.release(ids(1))
        with pytest.raises(AssertionError, match="released more often"):
            pool.release(ids(1))

    @pytest.mark.parametrize(
        "break_it, message",
        [
            (lambda pool: pool.refs.__setitem__(1, 0), "do not partition"),
            (lambda pool: pool.refs.__setitem__(3, 1), "do not partition"),
            (lambda pool: pool.refs.__setitem__(4, 1), r"pages \[4\] are held and were never given out"),
            (lambda pool: pool.index.forget(2), "cannot be found"),
            (lambda pool: publish(pool, 4, 4), "can still be found"),
            (lambda pool: setattr(pool, "_cached", 2), "2 units are counted as cached, 1 are"),
            (lambda pool: pool._findable.__setitem__(1, True), r"pages \[1\] are marked as findable and are not"),
            (lambda pool: pool._following.__setitem__(1, 2) or pool.size.__setitem__(1, 2), "do not partition"),
        ],
        ids=[
            "lost",
            "held_and_free",
            "held_and_new",
            "idle_without_key",
            "free_with_key",
            "cached",
            "findable",
            "unit",
        ],
    )
    def test_check_finds(self, break_it, message):
        pool = pool_of(4)
        pool.allocate(3)
        publish(pool, 2)
        pool.release(ids(2, 3))
        pool.check()
        break_it(pool)
        with pytest.raises(AssertionError, match=message):
            pool.check()

    def test_a_page_is_a_chain_of_units(self):
        pool = pool_of(9)
        assert pool.allocate(2, 3).tolist() == [1, 4] and pool.allocate(1).tolist() == [7]
        assert pool.units_of(ids(4, 0, 1), 3).tolist() == [[4, 5, 6], [0, 0, 0], [1, 2, 3]]
        assert (pool.free_units, pool.held_units) == (2, 7) and pool.size[[1, 4, 7]].tolist() == [3, 3, 1]
        publish(pool, 4)
        pool.release(ids(7))
        pool.release(ids(4, 1))
        assert (pool.free_units, pool.cached_units, pool.idle_among(ids(4))) == (6, 3, 3)
        pool.check()
        assert pool.allocate(1, 2).tolist() == [1] and pool.units_of(ids(1), 2).tolist() == [[1, 2]]
        pool.check()

    def test_units_of_a_page_may_lie_apart(self):
        pool = pool_of(6)
        pool.allocate(6)
        pool.release(ids(2, 5, 4))
        assert pool.allocate(1, 3).tolist() == [2] and pool.units_of(ids(2), 3).tolist() == [[2, 5, 4]]
        pool.check()
        pool.release(ids(2))
        assert pool.free_units == 3
        pool.check()

    def test_eviction_counts_pages_and_frees_their_units(self):
        pool = pool_of(8)
        for page in pool.allocate(2, 4).tolist():
            publish(pool, page, page)
            pool.release(ids(page))
        assert (pool.free_units, pool.cached_units, pool.available) == (0, 8, 8)
        assert len(pool.allocate(3)) == 3 and pool.evictions == 1
        assert (pool.free_units, pool.cached_units, pool.held_units) == (1, 4, 3)
        pool.check()

    def test_a_pool_grows_before_it_evicts_and_shrinks_from_its_end(self):
        added, asked = [3, 0], []
        pool = pool_of(2, growable=4, grow=lambda units: asked.append(units) or added.pop(0))
        pool.allocate(1)
        publish(pool, 1)
        pool.release(ids(1))
        pool.prepare(1)
        assert (pool.total_units, pool.most_units, pool.available, asked) == (2, 6, 2, [])
        pool.prepare(2)
        assert (pool.total_units, pool.growable, pool.available, asked) == (5, 1, 5, [1])
        assert pool.allocate(1, 2).tolist() == [2] and pool.units_of(ids(2), 2).tolist() == [[2, 3]]
        assert pool.evictions == 0
        pool.check()
        pool.prepare(9)
        assert (pool.total_units, pool.growable, asked) == (5, 0, [1, 1])  # what cannot be had is asked for once
        assert len(pool.allocate(3)) == 3 and pool.evictions == 1
        pool.check()
        pool.release(ids(4, 5))
        assert (pool.shrink(2), pool.total_units, pool.growable, pool.free_units) == (True, 3, 2, 0)
        pool.check()


class TestBlockTable:
    @pytest.mark.parametrize("lengths", [[1], [128], [129], [127, 1, 1], [100, 100, 100], [0, 300, 0]])
    def test_appending_fills_leaves(self, lengths):
        pool, expected = pool_of(400), []
        table = BlockTable(pool)
        for length in lengths:
            pages = pool.allocate(length)
            expected += pages.tolist()
            table.append(pages)
        assert table.pages().tolist() == expected and table.n_pages == len(expected)
        assert [len(leaf.pages) for leaf in table._root[:-1]] == [LEAF_PAGES] * (len(table._root) - 1)
        for start, stop in [(0, 1), (127, 129), (128, 128), (5, len(expected)), (130, 10)]:
            stop = min(stop, len(expected))
            assert table.pages(start, stop).tolist() == expected[start:stop]
        check_tables([table], pool)

    def test_a_fork_shares_leaves_and_counts_no_page(self):
        pool = pool_of(300)
        table = BlockTable(pool)
        table.append(pool.allocate(200))
        twin = table.fork()
        assert [leaf.tables for leaf in table._root] == [2, 2] and pool.refs.max() == 1
        twin.append(pool.allocate(1))  # owns the second leaf now; the first is still shared
        assert [leaf.tables for leaf in twin._root] == [2, 1]
        assert pool.refs[1] == 1 and pool.refs[129] == 2 and pool.refs[201] == 1
        check_tables([table, twin], pool)
        twin.release()
        assert pool.held_units == 200 and pool.refs.max() == 1 and [leaf.tables for leaf in table._root] == [1, 1]
        table.release()
        assert pool.free_units == 300

    def test_copy_on_write(self):
        pool = pool_of(6)
        table = BlockTable(pool)
        table.append(pool.allocate(3))
        assert not table.copy_needed(2)
        twin, third = table.fork(), table.fork()
        twin.stale_from = twin.n_pages
        assert table.copy_needed(2) and twin.copy_needed(0)
        assert twin.copy_on_write(2).tolist() == [[3, 4]]
        assert (twin.pages().tolist(), table.pages().tolist()) == ([1, 2, 4], [1, 2, 3])
        assert not twin.copy_needed(2) and twin.copy_needed(0) and twin.stale_from == 2
        assert third.copy_on_write(2).tolist() == [[3, 5]] and not table.copy_needed(2)
        check_tables([table, twin, third], pool)
        for one in (twin, table, third):
            one.release()
        assert pool.free_units == 6

    def test_truncating_a_shared_table_leaves_the_other_alone(self):
        pool = pool_of(300)
        table = BlockTable(pool)
        table.append(pool.allocate(260))
        twin = table.fork()
        twin.truncate(130)
        assert twin.pages().tolist() == table.pages(0, 130).tolist() and twin.n_pages == 130 and pool.held_units == 260
        twin.truncate(0)
        assert twin.n_pages == 0 and twin._root == []
        check_tables([table, twin], pool)
        table.truncate(128)
        assert table.n_pages == 128 and len(table._root) == 1 and pool.held_units == 128

    def test_check_tables_finds_a_table_that_was_forgotten(self):
        pool = pool_of(4)
        table = BlockTable(pool)
        table.append(pool.allocate(2))
        twin = table.fork()
        with pytest.raises(AssertionError, match="counts 2 tables, 1 hold it"):
            check_tables([table], pool)
        twin.release()
        with pytest.raises(AssertionError, match=r"pages \[1, 2\]"):
            check_tables([], pool)

    def test_a_page_lists_the_entries_of_each_slice(self):
        """Two slices of pages of three entries: a page has six units, slice by slice."""
        pool = pool_of(12)
        table = BlockTable(pool, slices=2)
        table.append(pool.allocate(2, 6))
        layout = PageLayout([], {"text": FixedPages(12)}, 4)
        assert table.pages().tolist() == [1, 7] and table.near == 12
        assert table.entries(0, 2, layout).tolist() == [[1, 2, 3, 7, 8, 9], [4, 5, 6, 10, 11, 12]]
        assert table.entries(1, 2, layout).tolist() == [[7, 8, 9], [10, 11, 12]]
        assert table.entries(1, 1, layout).shape == (2, 0)

    def test_entries_of_pages_of_several_sizes(self):
        pool = pool_of(20)
        layout = PageLayout(
            [Segment("text", 5), Segment("image", 9)], {"text": FixedPages(4), "image": FixedPages(8)}, 4
        )
        sizes = [layout.page_entries(page) for page in range(5)]
        assert sizes == [1, 1, 2, 2, 1]
        table = BlockTable(pool, slices=2)
        for size in sizes:
            table.append(pool.allocate(1, 2 * size))
        assert table.entries(1, 4, layout).tolist() == [[3, 5, 6, 9, 10], [4, 7, 8, 11, 12]]
        assert table.entries(0, 0, layout).shape == (2, 0)

    def test_pages_behind_a_window_become_holes(self):
        pool = pool_of(300)
        table = BlockTable(pool)
        table.append(pool.allocate(260))
        table.stale_from = 260
        table.drop_before(130)
        assert table.pages(127, 132).tolist() == [0, 0, 0, 131, 132] and table.n_pages == 260
        assert (table.first_page, table.stale_from, pool.free_units) == (130, 0, 170)
        check_tables([table], pool)
        table.drop_before(100)
        assert table.first_page == 130 and pool.free_units == 170
        table.drop_before(999)
        assert (table.first_page, table.n_pages, table.near, pool.free_units) == (260, 260, None, 300)
        table.append(pool.allocate(1))
        assert table.first_page == 260 and table.n_pages == 261 and table.near == table.pages()[-1]
        check_tables([table], pool)
        table.truncate(100)
        assert (table.first_page, table.n_pages, pool.free_units) == (100, 100, 300)
        check_tables([table], pool)

    def test_holes_of_one_table_are_pages_of_its_twin(self):
        pool = pool_of(8)
        table = BlockTable(pool)
        table.append(pool.allocate(4))
        twin = table.fork()
        twin.drop_before(2)
        assert (twin.pages().tolist(), table.pages().tolist()) == ([0, 0, 3, 4], [1, 2, 3, 4])
        assert pool.refs[1:5].tolist() == [1, 1, 2, 2] and pool.held_units == 4
        third = twin.fork()
        assert third.first_page == 2
        check_tables([table, twin, third], pool)
        table.release()
        assert pool.refs[1:5].tolist() == [0, 0, 1, 1]
        third.release()
        twin.release()
        assert pool.free_units == 8

    def test_a_table_that_begins_with_holes(self):
        """A prefix hit of which only the last pages are seen."""
        pool = pool_of(4)
        table = BlockTable(pool)
        table.append(ids(0, 0))
        assert (table.first_page, table.n_pages, table.near) == (2, 2, None)
        table.append(np.concatenate([ids(0), pool.allocate(2)]))
        assert (table.first_page, table.pages().tolist(), table.near) == (3, [0, 0, 0, 1, 2], 2)
        check_tables([table], pool)

    def test_a_fork_of_128k_tokens_touches_only_the_root(self):
        """8,192 pages of 16 tokens are 64 leaves: 64 counts go up, and no page is looked at."""
        pool = pool_of(8192)
        table = BlockTable(pool)
        table.append(pool.allocate(8192))
        rows = [leaf.row for leaf in table._root]
        for leaf in table._root:
            leaf.row = None
        table._pool = None
        twin = table.fork()
        assert [leaf.tables for leaf in twin._root] == [2] * 64 and twin._root == table._root
        table._pool = twin._pool = pool
        for leaf, row in zip(table._root, rows, strict=True):
            leaf.row = row
        check_tables([table, twin], pool)

    @pytest.mark.parametrize(
        "break_it, message",
        [
            (lambda table: setattr(table, "n_pages", 3), "a table of 3 pages lists another number"),
            (lambda table: setattr(table, "first_page", 1), r"begins at page 1 has holes at \[\]"),
            (lambda table: table._root[0].pages.__setitem__(1, 0), r"begins at page 0 has holes at \[1\]"),
        ],
        ids=["length", "first_page", "hole"],
    )
    def test_check_tables_finds(self, break_it, message):
        pool = pool_of(4)
        table = BlockTable(pool)
        table.append(pool.allocate(2))
        break_it(table)
        with pytest.raises(AssertionError, match=message):
            check_tables([table], pool)


class Tables(RuleBasedStateMachine):
    """Pool, tables and index against plain lists: each table is a list of page ids, each page a list of contents."""

    PAGES, TOKENS = 12, 4
    allocator, size = "stack", 1

    @initialize()
    def start(self):
        self.pool = pool_of(self.PAGES * self.size, self.allocator)
        self.tables = []  # (BlockTable, [content of each page; None behind a window])
        self.content = {}  # page -> what was written there last
        self.clock = 0

    def pick(self, number):
        return self.tables[number % len(self.tables)] if self.tables else None

    @rule()
    def new(self):
        self.tables.append((BlockTable(self.pool), []))

    @rule(number=st.integers(0, 9), count=st.integers(0, 4))
    def grow(self, number, count):
        if (picked := self.pick(number)) and count * self.size <= self.pool.available:
            table, contents = picked
            pages = self.pool.allocate(count, self.size, table.near)
            table.append(pages)
            for page in pages.tolist():
                self.clock += 1
                self.content[page] = self.clock
                contents.append(self.clock)

    @rule(number=st.integers(0, 9))
    def fork(self, number):
        if picked := self.pick(number):
            self.tables.append((picked[0].fork(), picked[1].copy()))

    @rule(number=st.integers(0, 9), page=st.integers(0, 11))
    def write(self, number, page):
        picked = self.pick(number)
        if picked and any(picked[1]):
            table, contents = picked
            page = max(page % len(contents), table.first_page)
            if table.copy_needed(page):
                if self.pool.available < self.size:
                    return
                pairs = table.copy_on_write(page)
                source, target = pairs[0].tolist()
                assert pairs.shape == (self.size, 2) and len(set(pairs.ravel().tolist())) == 2 * self.size
                assert self.content[source] == contents[page]
                self.content[target] = self.content[source]
            elif int(table.pages(page, page + 1)[0]) in self.pool.index:
                return  # a findable page is never written
            self.clock += 1
            contents[page] = self.content[int(table.pages(page, page + 1)[0])] = self.clock

    @rule(number=st.integers(0, 9), pages=st.integers(0, 11))
    def truncate(self, number, pages):
        if picked := self.pick(number):
            picked[0].truncate(min(pages, len(picked[1])))
            del picked[1][pages:]

    @rule(number=st.integers(0, 9), pages=st.integers(0, 11))
    def pass_window(self, number, pages):
        if picked := self.pick(number):
            picked[0].drop_before(pages)
            picked[1][:pages] = [None] * min(pages, len(picked[1]))

    @rule(number=st.integers(0, 9))
    def release(self, number):
        if picked := self.pick(number):
            picked[0].release()
            self.tables.remove(picked)

    @rule(number=st.integers(0, 9), page=st.integers(0, 11))
    def publish(self, number, page):
        picked = self.pick(number)
        if picked and any(picked[1]):
            table, contents = picked
            first = int(table.pages()[max(page % len(contents), table.first_page)])
            if first not in self.pool.index:
                publish(self.pool, first, self.content[first])

    @rule(back=st.integers(0, 20))
    def find(self, back):
        root, tokens = root_key(), np.full(self.TOKENS, self.clock - back, np.int32)
        node = self.pool.index.find(page_key(root, tokens), root, tokens, "")
        if node is not None:
            page = node.page(0)
            assert self.content[page] == self.clock - back
            self.pool.retain(ids(page))
            table = BlockTable(self.pool)
            table.append(ids(page))
            self.tables.append((table, [self.content[page]]))

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        check_tables([table for table, _ in self.tables], self.pool)
        for table, contents in self.tables:
            assert [self.content.get(page) for page in table.pages().tolist()] == contents
        listed = Counter(page for table, _ in self.tables for page in set(table.pages().tolist()) if page)
        assert set(listed) == set(np.flatnonzero(self.pool.refs).tolist())
        assert len(listed) * self.size == self.pool.held_units
        assert all(self.pool.refs[page] <= count for page, count in listed.items())

    def teardown(self):
        for table, _ in getattr(self, "tables", []):
            table.release()
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.held_units == 0


@pytest.mark.parametrize("allocator, size", [("stack", 1), ("stack", 3), ("first_fit", 2), ("buddy", 3)])
def test_tables(allocator, size):
    machine = type("Tables", (Tables,), {"allocator": allocator, "size": size})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=40))
