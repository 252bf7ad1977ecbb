"""Allocator, eviction order, reference counts and two-level block tables, by exact page ids."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.core.block_table import LEAF_PAGES, BlockTable, check_tables
from octavo.core.page_pool import PagePool
from octavo.core.policies import LeastRecentlyUsed, StackAllocator
from octavo.core.prefix_cache import PrefixCache, page_key, root_key


def ids(*pages):
    return np.array(pages, np.int32)


def pool_of(pages, page_units=1, page_tokens=4):
    index = PrefixCache(pages * page_units, page_tokens)
    return PagePool(pages, page_units, StackAllocator(pages * page_units, page_units), LeastRecentlyUsed(), index)


def publish(pool, page, token=0):
    """Make a page findable as the first page of a prompt of one repeated token."""
    root = root_key()
    tokens = np.full(4, token, np.int32)
    return pool.index.publish(page, page_key(root, tokens), root, tokens, "")


class TestStackAllocator:
    def test_frames_begin_after_the_scratch_unit(self):
        assert StackAllocator(12, 3).allocate(4).tolist() == [1, 4, 7, 10]

    def test_the_last_page_freed_is_the_first_given_out(self):
        stack = StackAllocator(5, 1)
        assert stack.allocate(5).tolist() == [1, 2, 3, 4, 5]
        stack.free(ids(2, 5, 1))
        assert stack.allocate(2).tolist() == [1, 5] and stack.free_pages == 1
        assert stack.allocate(1).tolist() == [2]

    def test_a_unit_that_fills_no_frame_is_left_over(self):
        assert StackAllocator(7, 2).free_pages == 3

    @pytest.mark.parametrize("count, ok", [(0, True), (3, True), (4, False)])
    def test_no_more_than_there_are(self, count, ok):
        stack = StackAllocator(3, 1)
        if ok:
            assert len(stack.allocate(count)) == count
        else:
            with pytest.raises(AssertionError, match="4 pages asked for, 3 free"):
                stack.allocate(count)

    def test_check_finds_a_page_that_was_freed_twice(self):
        stack = StackAllocator(3, 1)
        stack.allocate(3)
        stack.free(ids(2, 2))
        with pytest.raises(AssertionError, match="twice"):
            stack.check()

    def test_what_was_handed_out_does_not_change_later(self):
        stack = StackAllocator(4, 1)
        first = stack.allocate(2)
        stack.free(ids(3))
        assert first.tolist() == [1, 2]


class TestLeastRecentlyUsed:
    def test_order_removal_and_return(self):
        lru = LeastRecentlyUsed()
        lru.add([3, 2, 1])
        lru.add([7])
        lru.remove([2])
        assert len(lru) == 3 and lru.check().tolist() == [3, 1, 7]
        lru.add([2])
        assert lru.evict(3) == [3, 1, 7] and lru.evict(1) == [2] and len(lru) == 0

    def test_the_victim_of_a_tie_is_always_the_same(self):  # BR-58: insertion order, not a clock
        victims = set()
        for _ in range(20):
            lru = LeastRecentlyUsed()
            lru.add([5, 9, 1])
            victims.add(lru.evict(1)[0])
        assert victims == {5}


class TestPagePool:
    def test_life_of_a_page(self):
        pool = pool_of(4)
        assert (pool.free_pages, pool.cached_pages, pool.held_pages) == (4, 0, 0)
        pages = pool.allocate(3)
        publish(pool, 1)
        assert (pool.free_pages, pool.cached_pages, pool.held_pages) == (1, 0, 3)
        pool.retain(ids(1))
        pool.release(ids(1, 2))
        assert pool.refs[1:4].tolist() == [1, 0, 1] and (pool.free_pages, pool.cached_pages) == (2, 0)
        pool.release(ids(3, 1))
        assert (pool.free_pages, pool.cached_pages, pool.held_pages) == (3, 1, 0)
        pool.retain(ids(1))
        assert (pool.cached_pages, pool.held_pages, pool.idle_among(pages)) == (0, 1, 2)
        pool.release(ids(1))
        pool.check()
        assert pool.allocate(4).tolist() == [1, 3, 2, 4] and pool.evictions == 1 and len(pool.index) == 0
        pool.check()

    def test_unfindable_pages_go_first_then_the_oldest_chain_tail(self):
        pool = pool_of(6)
        first, second = BlockTable(pool), BlockTable(pool)
        first.append(pool.allocate(3))
        second.append(pool.allocate(2))
        for page in (1, 2, 4, 5):
            publish(pool, page, page)
        first.release()
        second.release()
        assert (pool.free_pages, pool.cached_pages) == (2, 4)
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
            (lambda pool: pool.index.forget(2), "cannot be found"),
            (lambda pool: publish(pool, 4, 4), "can still be found"),
        ],
        ids=["lost", "held_and_free", "idle_without_key", "free_with_key"],
    )
    def test_check_finds(self, break_it, message):
        pool = pool_of(4)
        pool.allocate(2)
        publish(pool, 2)
        pool.release(ids(2))
        pool.check()
        break_it(pool)
        with pytest.raises(AssertionError, match=message):
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
        assert pool.held_pages == 200 and pool.refs.max() == 1 and [leaf.tables for leaf in table._root] == [1, 1]
        table.release()
        assert pool.free_pages == 300

    def test_copy_on_write(self):
        pool = pool_of(6)
        table = BlockTable(pool)
        table.append(pool.allocate(3))
        assert not table.copy_needed(2)
        twin, third = table.fork(), table.fork()
        twin.stale_from = twin.n_pages
        assert table.copy_needed(2) and twin.copy_needed(0)
        assert twin.copy_on_write(2) == (3, 4)
        assert (twin.pages().tolist(), table.pages().tolist()) == ([1, 2, 4], [1, 2, 3])
        assert not twin.copy_needed(2) and twin.copy_needed(0) and twin.stale_from == 2
        assert third.copy_on_write(2) == (3, 5) and not table.copy_needed(2)
        check_tables([table, twin, third], pool)
        for one in (twin, table, third):
            one.release()
        assert pool.free_pages == 6

    def test_truncating_a_shared_table_leaves_the_other_alone(self):
        pool = pool_of(300)
        table = BlockTable(pool)
        table.append(pool.allocate(260))
        twin = table.fork()
        twin.truncate(130)
        assert twin.pages().tolist() == table.pages(0, 130).tolist() and twin.n_pages == 130 and pool.held_pages == 260
        twin.truncate(0)
        assert twin.n_pages == 0 and twin._root == []
        check_tables([table, twin], pool)
        table.truncate(128)
        assert table.n_pages == 128 and len(table._root) == 1 and pool.held_pages == 128

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


class Tables(RuleBasedStateMachine):
    """Pool, tables and index against plain lists: each table is a list of page ids, each page a list of contents."""

    PAGES, TOKENS = 12, 4

    @initialize()
    def start(self):
        self.pool = pool_of(self.PAGES, page_tokens=self.TOKENS)
        self.tables = []  # (BlockTable, [content of each page])
        self.content = {}  # page -> what was written there last
        self.clock = 0

    def pick(self, number):
        return self.tables[number % len(self.tables)] if self.tables else None

    @rule()
    def new(self):
        self.tables.append((BlockTable(self.pool), []))

    @rule(number=st.integers(0, 9), count=st.integers(0, 4))
    def grow(self, number, count):
        if (picked := self.pick(number)) and count <= self.pool.available:
            table, contents = picked
            pages = self.pool.allocate(count)
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
        if picked and picked[1]:
            table, contents = picked
            page %= len(contents)
            if table.copy_needed(page):
                if not self.pool.available:
                    return
                source, target = table.copy_on_write(page)
                assert source != target and self.content[source] == contents[page]
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

    @rule(number=st.integers(0, 9))
    def release(self, number):
        if picked := self.pick(number):
            picked[0].release()
            self.tables.remove(picked)

    @rule(number=st.integers(0, 9), page=st.integers(0, 11))
    def publish(self, number, page):
        picked = self.pick(number)
        if picked and picked[1]:
            first = int(picked[0].pages()[page % len(picked[1])])
            if first not in self.pool.index:
                publish(self.pool, first, self.content[first])

    @rule(back=st.integers(0, 20))
    def find(self, back):
        root, tokens = root_key(), np.full(self.TOKENS, self.clock - back, np.int32)
        page = self.pool.index.find(page_key(root, tokens), root, tokens, "")
        if page is not None:
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
            assert [self.content[page] for page in table.pages().tolist()] == contents
        held = {page for table, _ in self.tables for page in table.pages().tolist()}
        assert held == set(np.flatnonzero(self.pool.refs).tolist()) and len(held) == self.pool.held_pages
        listed = Counter(page for table, _ in self.tables for page in set(table.pages().tolist()))
        assert all(self.pool.refs[page] <= count for page, count in listed.items())

    def teardown(self):
        for table, _ in getattr(self, "tables", []):
            table.release()
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.held_pages == 0


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=100, stateful_step_count=40)
