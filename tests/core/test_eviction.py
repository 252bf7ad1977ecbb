"""Who goes first, for every policy; chains stay whole; counts are exact. BR numbers are those of public bug reports."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from octavo.core.memory.chains import Chains
from octavo.core.memory.eviction import IdlePages
from octavo.core.memory.page_facts import FactsBook
from octavo.core.policies.belady import NEVER, Belady
from octavo.core.policies.evictions import EVICTIONS
from octavo.core.policies.lru import LeastRecentlyUsed
from octavo.core.policies.lru_k import LruK
from octavo.core.policies.priority import PriorityClasses

POLICIES = EVICTIONS | {"belady": lambda: Belady(lambda pages: pages.astype(np.int64) * 7 % 5)}
every_policy = pytest.mark.parametrize("name", POLICIES)


def ids(*pages):
    return np.array(pages, np.int32)


@dataclass
class Scripted:
    """Ranks by page, as written down."""

    ranks: dict
    history = 1

    def rank(self, pages, facts):
        return np.array([self.ranks[page] for page in pages.tolist()], np.float64)


class Cache:
    """The smallest user of ``IdlePages``: a prefix cache of one token a page, keys being the prefixes themselves."""

    def __init__(self, policy, room, chained=True):
        self.policy = policy
        self.book = FactsBook(room, policy.history)
        self.idle = IdlePages(policy, self.book, chained=chained)
        self.free = list(range(room, 0, -1))
        self.tables = []
        self.prefix = {}  # findable page -> prefix
        self.nodes = {"": 0}  # prefix -> node
        self.since = {}  # page -> its place in the order of becoming idle
        self.rank = {}
        self.hits = 0

    def find(self, prefix):
        return next((page for page, held in self.prefix.items() if held == prefix), None)

    def held(self):
        return {page for table in self.tables for page in table}

    def start(self, prompt, priority=0, cost=1.0, nbytes=1, reuse=True):
        """A table of what is found of a prompt (nothing without ``reuse``) and new pages; None if there is no room."""
        table = []
        while reuse and len(table) < len(prompt) and (page := self.find(prompt[: len(table) + 1])) is not None:
            table.append(page)
        revived = [page for page in table if page not in self.held()]
        self.idle.remove(ids(*revived))
        if len(prompt) - len(table) > len(self.free) + self.idle.evictable:
            self.became_idle(revived[::-1])
            return None
        self.tables.append(table)
        self.hits += len(table)
        self.book.touch(ids(*table), priority)
        self.evict(max(0, len(prompt) - len(table) - len(self.free)))
        for length in range(len(table) + 1, len(prompt) + 1):
            page, prefix = self.free.pop(), prompt[:length]
            node = self.nodes.setdefault(prefix, len(self.nodes))
            self.idle.published(page, node, self.nodes[prefix[:-1]])
            self.book.publish(ids(page), priority, cost, nbytes)
            self.prefix[page] = prefix
            table.append(page)
        return table

    def release(self, table):
        self.tables.remove(table)
        unheld = [page for page in reversed(table) if page not in self.held()]
        self.free += [page for page in unheld if page not in self.prefix]
        self.became_idle([page for page in unheld if page in self.prefix])

    def became_idle(self, pages):
        self.idle.add(ids(*pages))
        self.rank |= zip(pages, self.policy.rank(ids(*pages), self.book.facts).tolist(), strict=True)
        start = max(self.since.values(), default=0)
        self.since |= {page: place for place, page in enumerate(pages, start + 1)}

    def visit(self, prompt, **options):
        self.release(self.start(prompt, **options))

    def evict(self, count):
        victims = self.idle.evict(count).tolist()
        self.free += victims
        return [self.prefix.pop(page) for page in victims]


def by_the_rules(idle, node, parent, rank, since):
    """All pages that may go, in order, one at a time, straight from the definition.

    ``idle`` pages; ``node`` and ``parent`` of all findable ones.
    """
    node, parent, victims = dict(node), dict(parent), []
    while True:
        leaves = [
            page
            for page in idle
            if page in node
            and rank[page] < np.inf
            and (node[page] not in parent.values() or list(node.values()).count(node[page]) > 1)
        ]
        if not leaves:
            return victims
        victims.append(min(leaves, key=lambda page: (rank[page], since[page])))
        del node[victims[-1]], parent[victims[-1]]


# clock   1 2 3 4 5 6 7 8 9
# use     A A A B C D D D B
HISTORY = "AAABCDDDB"
PRIORITY = {"A": 0, "B": -1, "C": 5, "D": 0}
SECONDS = {"A": 4.0, "B": 2.0, "C": 4.0, "D": 2.0}
NBYTES = {"A": 1, "B": 2, "C": 2, "D": 2}
NEXT = {"A": 20, "B": 12, "C": 11, "D": NEVER}
VICTIMS = {
    "lru": "ACDB",  # last used at 3, 5, 8, 9
    "lru_k": "CABD",  # last but one at -, 2, 4, 7
    "fifo": "ABCD",  # published at 1, 4, 5, 6
    "lfu": "CBAD",  # uses 1, 2, 3, 3
    "priority": "BADC",  # low, normal, normal, high
    "cost": "DBCA",  # 1, 1, 2, 4 seconds a byte
    "belady": "DABC",  # never, 20, 12, 11
}


class TestPolicies:
    @every_policy
    def test_victims_of_a_history(self, name):
        policy = POLICIES[name]()
        if name == "belady":
            policy = Belady(lambda pages: np.array([NEXT[cache.prefix[page]] for page in pages.tolist()]))
        cache = Cache(policy, room=4)
        for cache.book.clock, item in enumerate(HISTORY, start=1):
            cache.visit(item, priority=PRIORITY[item], cost=SECONDS[item], nbytes=NBYTES[item])
        assert "".join(cache.evict(4)) == VICTIMS[name]

    def test_br58_what_was_just_stored_is_not_the_victim(self):
        cache = Cache(LeastRecentlyUsed(), room=3)
        for cache.book.clock, item in enumerate("ABACD", start=1):
            cache.visit(item)
        assert sorted(cache.prefix.values()) == ["A", "C", "D"]

    @every_policy
    def test_br58_among_equals_the_first_to_become_idle(self, name):
        for _ in range(20):
            cache = Cache(POLICIES[name]() if name != "belady" else Belady(np.zeros_like), room=3)
            for item in "CAB":
                cache.visit(item)
            assert cache.evict(3) == ["C", "A", "B"]

    def test_a_page_is_used_until_nobody_holds_it(self):
        cache = Cache(LeastRecentlyUsed(), room=2)
        cache.book.clock = 1
        long_request = cache.start("A")
        cache.book.clock = 2
        cache.visit("B")
        cache.book.clock = 3
        cache.release(long_request)
        assert cache.evict(2) == ["B", "A"]

    @pytest.mark.parametrize("k, victims", [(1, "ABC"), (2, "CAB"), (3, "ACB")])
    def test_lru_k_is_by_the_kth_last_use(self, k, victims):
        cache = Cache(LruK(k), room=3)
        for cache.book.clock, item in enumerate("ABABBC" if k == 2 else "BABABCC", start=1):
            cache.visit(item)
        assert "".join(cache.evict(3)) == victims

    @pytest.mark.parametrize(
        "priority, rank", [(-9, 0), (-1, 0), (0, 1), (1, 2), (99, 2), (100, np.inf), (101, np.inf)]
    )
    def test_priority_classes(self, priority, rank):
        book = FactsBook(1)
        book.publish(ids(1), priority, 1.0, 1)
        assert PriorityClasses().rank(ids(1), book.facts).tolist() == [rank]

    @pytest.mark.parametrize(
        "make, message",
        [
            (lambda: LruK(0), "at least 1, not 0"),
            (lambda: PriorityClasses(low_below=2), "low_below 2, high_from 1"),
            (lambda: PriorityClasses(pinned_from=0), "high_from 1 and pinned_from 0"),
        ],
    )
    def test_refused(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()

    @given(st.lists(st.sampled_from("ABCDEFG"), max_size=40), st.integers(1, 4))
    @settings(max_examples=60)
    def test_nothing_beats_belady_on_a_cache_of_single_pages(self, trace, room):
        def next_use(pages):
            items = [cache.prefix[page] for page in pages.tolist()]
            return np.array([trace.index(item, now + 1) if item in trace[now + 1 :] else NEVER for item in items])

        hits = {}
        for name, policy in (POLICIES | {"belady": lambda: Belady(next_use)}).items():
            cache = Cache(policy(), room, chained=False)
            for now, item in enumerate(trace):
                cache.book.clock = now
                cache.visit(item, priority=ord(item) % 3 - 1, cost=1.0 + ord(item) % 4)
            hits[name] = cache.hits
        assert max(hits.values()) == hits["belady"]


class TestFacts:
    def test_life_of_a_page(self):
        book = FactsBook(2, history=2)
        facts = book.facts
        book.clock = 3
        book.publish(ids(1), priority=4, recompute_s=0.5, nbytes=64)
        book.clock = 9
        book.touch(ids(1), priority=-2)
        book.clock = 11
        book.release(ids(1))
        assert facts.published.tolist() == [-1, 3, -1] and facts.last_used.tolist() == [-1, 11, -1]
        assert facts.uses.tolist() == [0, 2, 0] and facts.history.tolist() == [[-1, -1], [9, 3], [-1, -1]]
        assert facts.priority[1] == 4 and (facts.recompute_s[1], facts.nbytes[1]) == (0.5, 64)
        book.touch(ids(1, 2), priority=7)
        assert facts.history.tolist() == [[-1, -1], [11, 9], [11, -1]] and facts.priority.tolist() == [0, 7, 7]
        book.publish(ids(1), priority=1, recompute_s=0.25, nbytes=32)  # new contents: nothing of the old is left
        assert (facts.published[1], facts.uses[1], facts.priority[1], facts.history[1].tolist()) == (11, 1, 1, [11, -1])

    def test_growth_keeps_what_is_known(self):
        book = FactsBook(1, history=2)
        book.publish(ids(1), 5, 0.5, 64)
        book.grow(2)
        assert book.facts.uses.tolist() == [0, 1, 0, 0] and book.facts.published.tolist() == [-1, 0, -1, -1]
        assert book.facts.history.shape == (4, 2) and book.facts.history[3].tolist() == [-1, -1]

    @given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=4), st.integers(-2, 2)), max_size=12))
    @settings(max_examples=50)
    def test_facts_fall_along_a_chain(self, visits):
        cache = Cache(LeastRecentlyUsed(), room=30)
        for cache.book.clock, (prompt, priority) in enumerate(visits):
            cache.visit(prompt, priority=priority)
        facts = cache.book.facts
        for page, prefix in cache.prefix.items():
            if len(prefix) > 1:
                front = cache.find(prefix[:-1])
                assert all(known[front] >= known[page] for known in (facts.uses, facts.last_used, facts.priority))


def forest(parents, twins, policy):
    """Findable pages of a forest: node i + 1 is behind node ``parents[i] % (i + 1)``, in 1 + ``twins[i]`` pages."""
    node, parent = {}, {}
    for i, above in enumerate(parents):
        for _ in range(1 + twins[i]):
            page = len(node) + 1
            node[page], parent[page] = i + 1, above % (i + 1)
    book = FactsBook(len(node), policy.history)
    idle = IdlePages(policy, book)
    for page in node:
        idle.published(page, node[page], parent[page])
    return idle, book, node, parent


forests = st.integers(1, 9).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 9), min_size=n, max_size=n),
        st.lists(st.sampled_from([0, 0, 1, 2]), min_size=n, max_size=n),
    )
)


class TestChains:
    def compare(self, policy, shape, cut, facts=lambda book: None):
        """Evict all that may go, in two calls, and compare with the definition."""
        idle, book, node, parent = forest(*shape, policy)
        facts(book)
        pages = ids(*reversed(node))
        idle.add(pages)
        rank = dict(zip(pages.tolist(), policy.rank(pages, book.facts).tolist(), strict=True))
        since = {page: place for place, page in enumerate(pages.tolist())}
        expected = by_the_rules(list(node), node, parent, rank, since)
        assert idle.idle_count == len(node) and idle.evictable == len(expected)
        cut %= len(expected) + 1
        gone = idle.evict(cut).tolist()
        assert idle.evictable == len(expected) - cut
        left = idle.check().tolist()
        assert sorted(left + gone) == sorted(node)
        gone += idle.evict(len(expected) - cut).tolist()
        assert gone == expected and idle.evictable == 0
        assert idle.check().tolist() == sorted(set(node) - set(gone))
        return idle, node, parent, rank, gone

    @every_policy
    @given(shape=forests, cut=st.integers(0, 30), seed=st.integers(0, 99))
    @settings(max_examples=30)
    def test_order_of_every_policy(self, name, shape, cut, seed):
        def facts(book):
            rng = np.random.default_rng(seed)
            for field in ("published", "uses", "history", "priority"):
                array = getattr(book.facts, field)
                array[:] = rng.integers(-1, 3, array.shape)
            book.facts.priority *= 50
            book.facts.recompute_s[:] = rng.integers(1, 4, len(book.facts.recompute_s))
            book.facts.nbytes[:] = 2

        _, node, parent, _, gone = self.compare(POLICIES[name](), shape, cut, facts)
        for number, page in enumerate(gone):
            left = {node[other] for other in node if other not in gone[: number + 1]}
            unreachable = [other for other in node if parent[other] == node[page] and node[page] not in left]
            assert all(other in gone[:number] for other in unreachable)

    @given(shape=forests, cut=st.integers(0, 30), data=st.data())
    def test_pinned_pages_and_what_they_need_stay(self, shape, cut, data):
        ranks = st.sampled_from([-np.inf, 0.0, 1.0, np.inf])
        policy = Scripted({page: data.draw(ranks) for page in range(1, 28)})
        idle, node, parent, rank, _ = self.compare(policy, shape, cut)
        left = idle.check().tolist()
        kept_nodes = {node[page] for page in left}
        for page in node:
            if rank[page] == np.inf:
                assert page in left
        for page in left:
            assert parent[page] == 0 or parent[page] in kept_nodes
            assert rank[page] == np.inf or node[page] in {parent[other] for other in left}

    def test_the_lowest_rank_waits_for_what_stands_behind_it(self):
        idle, *_ = forest([0, 1, 2, 0], [0] * 4, Scripted({1: 0, 2: 1, 3: 9, 4: 5}))
        idle.add(ids(3, 2, 1, 4))
        assert idle.evict(4).tolist() == [4, 3, 2, 1]

    def test_a_twin_stands_in_until_it_is_the_last(self):
        idle, *_ = forest([0, 1], [1, 0], Scripted({1: 1, 2: 0, 3: 9}))
        idle.add(ids(3, 2, 1))
        assert idle.evict(3).tolist() == [2, 3, 1]

    def test_a_held_twin_lets_all_idle_ones_go(self):
        idle, *_ = forest([0, 1], [2, 0], Scripted({1: 0, 2: 1, 3: 1, 4: np.inf}))
        idle.add(ids(4, 3, 2))
        assert (idle.idle_count, idle.evictable) == (3, 2) and idle.evict(2).tolist() == [3, 2]
        idle.add(ids(1))  # the last page of its node, which a pinned one needs
        assert (idle.idle_count, idle.evictable) == (2, 0)

    def test_evictable_follows_what_happens_around_a_pinned_page(self):
        idle, *_ = forest([0, 1], [1, 0], Scripted({1: 0, 2: 0, 3: np.inf}))
        idle.add(ids(3, 2))
        assert idle.evictable == 1  # page 1 is held and can stand in for its twin
        idle.forgotten(1)
        assert idle.evictable == 0
        idle.published(1, 1, 0)
        assert idle.evictable == 1
        idle.add(ids(1))
        assert idle.evictable == 1
        idle.remove(ids(3))
        assert idle.evictable == 2

    def test_nothing_is_kept_for_a_pinned_page_that_cannot_be_reached(self):
        idle, *_ = forest([0, 1, 2], [0] * 3, Scripted({1: 0, 3: np.inf}))
        idle.forgotten(2)
        idle.add(ids(3, 1))
        assert idle.evictable == 1 and idle.evict(1).tolist() == [1]

    def test_unchained_pages_go_by_rank_alone(self):
        cache = Cache(EVICTIONS["fifo"](), room=4, chained=False)
        for cache.book.clock, prompt in enumerate(["a", "ab", "abc"]):
            cache.visit(prompt)
        assert cache.evict(3) == ["a", "ab", "abc"]

    def test_a_page_whose_parent_was_forgotten_is_like_any_other(self):
        idle, *_ = forest([0, 1, 2], [0] * 3, Scripted({1: 0, 3: 1}))
        idle.forgotten(2)  # held, and not findable any more: 3 cannot be reached, and 1 is not needed
        idle.add(ids(3, 1))
        idle.check()
        assert idle.evictable == 2 and idle.evict(2).tolist() == [1, 3]
        idle.published(2, 7, 0)  # the rows of nodes 1, 2 and 3 are used again
        assert idle._chains._rows == {7: int(idle._chains.row[2])}
        idle.check()

    def test_growth(self):
        idle, book, *_ = forest([0], [0], Scripted({1: 1, 2: 0, 3: 2}))
        idle.add(ids(1))
        book.grow(2)
        idle.grow(2)
        for page in (2, 3):
            idle.published(page, page, page - 1)
        idle.add(ids(3, 2))
        assert idle.check().tolist() == [1, 2, 3] and idle.evict(3).tolist() == [3, 2, 1]


class TestPrecondition:
    @pytest.mark.parametrize(
        "misuse, message",
        [
            (lambda idle: idle.add(ids(1)), "idle already"),
            (lambda idle: idle.remove(ids(2)), "not idle"),
            (lambda idle: idle.forgotten(1), "page 1 is idle"),
            (lambda idle: idle.forgotten(3), "page 3 is not findable"),
            (lambda idle: idle.published(2, 5, 0), "page 2 is published already"),
            (lambda idle: idle.published(3, 2, 1), "node 2 has two parents"),
            (lambda idle: idle.add(ids(3)), "cannot be found"),
            (lambda idle: idle.evict(2), "2 pages asked for, 1 can be evicted"),
        ],
    )
    def test_misuse(self, misuse, message):
        idle = IdlePages(Scripted({1: 0.0, 2: 0.0}), FactsBook(3))
        idle.published(1, 1, 0)
        idle.published(2, 2, 0)
        idle.add(ids(1))
        with pytest.raises(AssertionError, match=message):
            misuse(idle)
        assert np.flatnonzero(idle._idle).tolist() == [1]

    def test_the_book_must_remember_enough(self):
        with pytest.raises(AssertionError, match="reads 3 uses, the book keeps 2"):
            IdlePages(LruK(3), FactsBook(1, history=2))
        with pytest.raises(AssertionError, match="not 0"):
            FactsBook(1, history=0)

    @pytest.mark.parametrize(
        "break_it, message",
        [
            (lambda idle: idle._idle.__setitem__(2, False), "3 idle and 1 pinned counted, 2 and 1 found"),
            (lambda idle: idle._rank.__setitem__(2, np.inf), "3 idle and 1 pinned counted, 3 and 2 found"),
            (lambda idle: idle._since.__setitem__(2, idle._since[1]), "the same place"),
            (lambda idle: idle._chains.pages.__setitem__(1, 3), "hold a node is wrong"),
            (lambda idle: idle._chains.children.__setitem__(1, 0), "behind a node is wrong"),
            (lambda idle: idle._chains._twin.__setitem__(2, 0), "listed under a node"),
            (lambda idle: idle._chains._rows.__setitem__(9, 9), "belong to a node"),
            (lambda idle: idle._chains.forgotten(3), "cannot be found"),
        ],
    )
    def test_check_finds(self, break_it, message):
        idle, *_ = forest([0, 1], [1, 0], Scripted({1: 0, 2: 0, 3: np.inf}))
        idle.add(ids(3, 2, 1))
        idle.check(held=np.zeros(4, bool))
        break_it(idle)
        with pytest.raises(AssertionError, match=message):
            idle.check()

    def test_check_finds_a_held_page_that_needs_an_idle_one(self):
        idle, *_ = forest([0, 1], [0, 0], Scripted({1: 0}))
        idle.add(ids(1))
        with pytest.raises(AssertionError, match=r"pages behind \[1\] are held"):
            idle.check(held=np.array([False, False, True]))
        with pytest.raises(AssertionError, match=r"pages \[1\] are idle and held"):
            idle.check(held=np.array([False, True, False]))


prompts = st.text("ab", min_size=1, max_size=4)


class Traffic(RuleBasedStateMachine):
    """Requests with hits, twins and priorities on a small cache; every step is held against the definition."""

    ROOM = 10
    policy = None

    @initialize()
    def begin(self):
        self.cache = Cache(self.policy(), self.ROOM)

    def idle_pages(self):
        return sorted(set(self.cache.prefix) - self.cache.held())

    def expected(self):
        cache = self.cache
        node = {page: cache.nodes[prefix] for page, prefix in cache.prefix.items()}
        parent = {page: cache.nodes[prefix[:-1]] for page, prefix in cache.prefix.items()}
        return by_the_rules(self.idle_pages(), node, parent, cache.rank, cache.since)

    @rule(prompt=prompts, priority=st.sampled_from([-1, 0, 0, 1, 100]), cost=st.integers(1, 3), reuse=st.booleans())
    def start(self, prompt, priority, cost, reuse):
        self.cache.book.clock += 1
        self.cache.start(prompt, priority, float(cost), reuse=reuse)

    @rule(number=st.integers(0, 9))
    def release(self, number):
        if self.cache.tables:
            self.cache.release(self.cache.tables[number % len(self.cache.tables)])

    @rule(count=st.integers(0, 10))
    def evict(self, count):
        expected = [self.cache.prefix[page] for page in self.expected()]
        count %= len(expected) + 1
        assert self.cache.evict(count) == expected[:count]

    @rule(number=st.integers(0, 9))
    def lose(self, number):
        """A held page with nothing behind it is not findable any more, as if one of its runs had been given back."""
        behind = {prefix[:-1] for prefix in self.cache.prefix.values()}
        last = [page for page in self.cache.held() if self.cache.prefix.get(page, "") not in behind | {""}]
        if last:
            page = last[number % len(last)]
            self.cache.idle.forgotten(page)
            del self.cache.prefix[page]

    @invariant()
    def agrees(self):
        if hasattr(self, "cache"):
            held = np.zeros(self.ROOM + 1, bool)
            held[list(self.cache.held())] = True
            assert self.cache.idle.check(held).tolist() == self.idle_pages()
            assert self.cache.idle.idle_count == len(self.idle_pages())
            assert self.cache.idle.evictable == len(self.expected())


@every_policy
def test_traffic(name):
    machine = type("Traffic", (Traffic,), {"policy": staticmethod(POLICIES[name])})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=30))


@given(st.lists(st.tuples(prompts, st.booleans(), st.integers(0, 3)), max_size=14))
def test_lru_is_the_order_in_which_pages_became_idle(steps):
    """Against a plain ordered dictionary: chains come tail first, so that order keeps them whole by itself."""
    cache, order = Cache(LeastRecentlyUsed(), room=60), OrderedDict()
    for cache.book.clock, (prompt, reuse, release) in enumerate(steps):
        for page in cache.start(prompt, reuse=reuse):
            order.pop(page, None)
        if release < len(cache.tables):
            table = cache.tables[release]
            cache.release(table)
            order.update(dict.fromkeys(page for page in reversed(table) if page not in cache.held()))
    assert cache.idle.evict(len(order)).tolist() == list(order)


def test_rows_are_found_again_after_many_lives():
    chains = Chains(2)
    for node in range(1, 50, 2):
        chains.published(1, node, 0)
        chains.published(2, node + 1, node)
        chains.forgotten(2)
        chains.forgotten(1)
        chains.check()
    assert len(chains._spare_rows) == 2
