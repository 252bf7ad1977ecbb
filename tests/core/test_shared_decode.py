"""Sequences whose tables begin alike are decoded as a group: the groups are right, and nobody's tokens change."""

import random
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import SamplingParams
from octavo.core.costs import predict_decode
from octavo.core.execution.shared_runs import RunFinder, choose_runs
from octavo.core.memory.block_table import BlockTable
from octavo.core.memory.page_pool import PagePool
from octavo.core.memory.prefix_cache import PrefixCache
from octavo.core.policies import ALLOCATORS, EVICTIONS
from octavo.core.serving.prompts import TokenSegment
from octavo.kernels import ops
from octavo.kernels.cpu import backend as cpu
from octavo.kernels.cpu.shared import decode_shared_gathered
from octavo.scripts.build import method

GREEDY = {"ignore_eos": True}
PAGE = 4


def tokens(n, seed=0):
    return random.Random(seed).choices(range(3, 128), k=n)


def partitions(items):
    """Every way to part a list in groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], [first, *part], *parts[i + 1 :]]


class TestChoice:
    def test_a_shared_prompt(self):
        (run,) = choose_runs([0, 64, 64, 64], 100)
        assert (sorted(run.places), run.tokens, run.gain) == ([0, 1, 2, 3], 64, 3 * 64 - 100)

    def test_a_group_must_spare_more_than_it_costs(self):
        for cost, size in ((191, 4), (192, 1)):
            assert max(len(run.places) for run in choose_runs([0, 64, 64, 64], cost)) == size

    @pytest.mark.parametrize(("deep", "together"), [(96, False), (60, True)])
    def test_a_pair_goes_with_the_others_unless_it_shares_much_more(self, deep, together):
        """Two of four share ``deep`` tokens, all share 32; the two spare ``deep`` apart, and 2 * 32 with the rest."""
        runs = sorted((len(run.places), run.tokens) for run in choose_runs([0, deep, 32, 32], 0))
        assert runs == ([(4, 32)] if together else [(2, 32), (2, 96)])

    def test_nothing_in_common(self):
        assert all(run.places == [i] and run.gain == 0 for i, run in enumerate(choose_runs([0, 0, 0], 0)))
        assert choose_runs([], 0) == []

    def test_near_the_best_of_all_ways_to_part_them(self):
        """Deepest first is no exhaustive search: where three runs compete it may miss a little."""
        best_found = 0
        for seed in range(300):
            rng = random.Random(seed)
            common = [0] + [rng.randint(0, rng.choice([3, 10, 100])) for _ in range(rng.randint(0, 5))]
            cost = rng.choice([0, 0, 1, 5])

            def gain(group, common=common, cost=cost):
                return (len(group) - 1) * min(common[min(group) + 1 : max(group) + 1]) - cost if len(group) > 1 else 0

            runs = choose_runs(common, cost)
            assert sorted(place for run in runs for place in run.places) == list(range(len(common)))
            for run in runs:
                assert run.gain == gain(run.places) >= 0
            best = max(sum(max(0, gain(group)) for group in parts) for parts in partitions(list(range(len(common)))))
            found = sum(run.gain for run in runs)
            assert 0.75 * best <= found <= best
            best_found += found == best
        assert best_found >= 290


class Holder:
    """As much of a sequence as the finder looks at."""

    def __init__(self, table):
        self.table = table


class Tables:
    """Tables of a pool, changed as the engine changes them, with positions at which their sequences decode."""

    def __init__(self, pages=2000, cost=0):
        self.pool = PagePool(ALLOCATORS["stack"](pages), EVICTIONS["lru"](), PrefixCache())
        self.finder = RunFinder(PAGE, cost)
        self.held = []

    def new(self, pages):
        return self.take(self.pool.allocate(pages))

    def hit(self, pages):
        """A table of pages that others list too, as the prefix cache gives them."""
        self.pool.retain(pages)
        return self.take(pages)

    def take(self, pages):
        table = BlockTable(self.pool)
        table.append(pages)
        self.held.append(Holder(table))
        return self.held[-1]

    def fork(self, holder):
        self.held.append(Holder(holder.table.fork()))
        return self.held[-1]

    def grow(self, holder, pages=1):
        holder.table.append(self.pool.allocate(pages))

    def write(self, holder, page):
        """Write into a page, which is copied if others list it."""
        if holder.table.copy_needed(page):
            holder.table.copy_on_write(page)

    def close(self, holder):
        holder.table.release()
        self.held.remove(holder)

    def find(self, batch=None, running=None):
        """One step; gives {(members, tokens)} and checks what was found against the tables."""
        batch = self.held if batch is None else batch
        self.finder.forget(self.held if running is None else running)
        found = self.finder.find(batch, [holder.table.n_pages * PAGE for holder in batch])
        for holder in self.held:
            holder.table.stale_from = holder.table.n_pages
        return runs_of(found, batch)


def runs_of(found, batch):
    if found is None:
        return set()
    members, bounds, shared, own = found.groups.tolist()
    assert found.groups.dtype == np.int32 and found.groups.shape == (4, len(batch) + 1)
    assert sorted(members[:-1]) == list(range(len(batch)))
    runs, spared = set(), 0
    for (start, stop), tokens_shared in zip(pairwise(bounds), shared, strict=False):
        rows = members[start:stop]
        if rows:
            assert len(rows) > 1 and tokens_shared > 0 and {own[row] for row in rows} == {tokens_shared}
            heads = {tuple(batch[row].table.pages(0, tokens_shared // PAGE).tolist()) for row in rows}
            assert len(heads) == 1 and len(next(iter(heads))) * PAGE == tokens_shared
            runs.add((tuple(sorted(rows)), tokens_shared))
            spared += (len(rows) - 1) * tokens_shared
    assert all(own[row] == 0 for row in members[bounds[-1] : len(batch)])
    assert found.spared == spared > 0
    return runs


class TestFinder:
    def test_forks_of_a_whole_table_and_what_each_writes(self):
        """A fork lists the tail page too, until somebody writes into it: then the run ends in front of that page."""
        tables = Tables()
        parent = tables.new(300)  # three leaves
        children = [tables.fork(parent) for _ in range(3)]
        for child in children:
            tables.write(child, 299)
            tables.grow(child)
        assert tables.find() == {((0, 1, 2, 3), 299 * PAGE)}

    def test_a_page_is_replaced_in_the_middle_of_a_run_that_was_found(self):
        tables = Tables()
        parent = tables.new(6)
        others = [tables.fork(parent) for _ in range(3)]
        assert tables.find() == {((0, 1, 2, 3), 6 * PAGE)}
        tables.write(others[0], 2)
        # The three others spare 2 * 6 pages by themselves, and all four 3 * 2.
        assert tables.find() == {((0, 2, 3), 6 * PAGE)}
        tables.write(others[1], 0)
        assert tables.find() == {((0, 3), 6 * PAGE)}

    def test_hits_of_several_lengths(self):
        tables = Tables()
        first = tables.new(8)
        pages = first.table.pages()
        tables.hit(pages[:8])
        tables.hit(pages[:3])
        tables.new(5)
        assert tables.find() == {((0, 1), 8 * PAGE)}  # as much as 2 * 3 with the third: 8 is more
        tables.hit(pages[:7])
        assert tables.find() == {((0, 1, 4), 7 * PAGE)}

    def test_what_is_filled_later_is_nobody_elses(self):
        tables = Tables()
        first = tables.new(2)
        tables.fork(first)
        for _ in range(4):
            assert tables.find() == {((0, 1), 2 * PAGE)}
            for holder in tables.held:
                tables.grow(holder)

    def test_the_order_of_the_batch_does_not_matter(self):
        tables = Tables()
        a, b = tables.new(4), tables.new(3)
        batch = [tables.fork(x) for x in (a, b, a, b, a)]
        assert tables.find(batch) == {((0, 2, 4), 4 * PAGE), ((1, 3), 3 * PAGE)}
        assert tables.find(batch[::-1]) == {((0, 2, 4), 4 * PAGE), ((1, 3), 3 * PAGE)}
        assert tables.find(batch[1:]) == {((1, 3), 4 * PAGE), ((0, 2), 3 * PAGE)}

    def test_who_sits_out_a_step_is_known_when_it_is_back(self):
        tables = Tables()
        parent = tables.new(4)
        tables.fork(parent)
        tables.find()
        assert tables.find(batch=tables.held[:1]) == set()
        tables.finder._come_in = None  # nobody is to be looked at again
        assert tables.find() == {((0, 1), 4 * PAGE)}

    def test_a_sequence_that_stopped_and_runs_again_is_looked_at_again(self):
        tables = Tables()
        parent = tables.new(4)
        child = tables.fork(parent)
        assert tables.find() == {((0, 1), 4 * PAGE)}
        child.table.release()
        child.table.append(tables.pool.allocate(4))  # preempted, and computed anew between two steps
        assert tables.find() == set()

    @pytest.mark.parametrize(("middle", "last"), [(2, 3), (3, 2)])
    def test_two_that_one_stood_between(self, middle, last):
        """Pages that the one in the middle shared with either side, and they do not with each other, do not count."""
        tables = Tables()
        first = tables.new(4)
        between = tables.fork(first)
        tables.write(between, middle)
        tables.write(tables.fork(between), last)
        tables.find()
        tables.close(between)
        assert tables.find() == {((0, 1), 2 * PAGE)}

    def test_the_same_batch_is_not_thought_about_twice(self):
        tables = Tables()
        tables.fork(tables.new(4))
        tables.find()
        tables.finder._choose = None
        tables.grow(tables.held[0])
        assert tables.find() == {((0, 1), 4 * PAGE)}

    def test_nothing_is_kept_of_those_that_are_gone(self):
        tables = Tables()
        for _ in range(3):
            tables.fork(tables.new(4))
        tables.find()
        tables.find(batch=[], running=[])
        finder = tables.finder
        assert not (finder._order or finder._known or finder._asked or finder._answer)

    @given(st.lists(st.tuples(st.sampled_from("nhffgwwc"), st.integers(0, 50), st.integers(0, 9)), max_size=30))
    def test_random_fork_trees(self, steps):
        """After each change, what is found is true of the tables, and as much as one who sees them first would find;
        except after a growth, since what is filled while decoding is taken for its owner's even if it is forked."""
        tables, grown = Tables(), False
        for what, which, amount in steps:
            holder = tables.held[which % len(tables.held)] if tables.held else None
            if what == "n" or holder is None:
                tables.new(amount)
            elif what == "h":
                pages = holder.table.pages()
                tables.hit(pages[: min(amount, len(pages))])
            elif what == "f":
                tables.fork(holder)
            elif what == "g":
                tables.grow(holder, amount)
                grown = True
            elif what == "w" and holder.table.n_pages:
                tables.write(holder, amount % holder.table.n_pages)
            elif what == "c":
                tables.close(holder)
            runs = tables.find()
            first_sight = RunFinder(PAGE, 0).find(tables.held, [h.table.n_pages * PAGE for h in tables.held])
            spared = sum((len(rows) - 1) * n for rows, n in runs)
            assert spared == first_sight.spared if first_sight and not grown else spared >= 0


@pytest.fixture(scope="session")
def shared_for(engine_for):
    """An engine that groups whoever shares a page, whatever it spares."""

    def build(model, **fields):
        return engine_for(model, **{"shared_decode_bytes": 0, "max_seqs": 16, "pool_tokens": 800, **fields})

    return build


@pytest.fixture
def calls(monkeypatch):
    """(layer, groups that share, rows) of each call of the op. The reference backend asserts what the groups say."""
    made = []
    real = ops.decode_shared

    def spy(q, pool, layer, table, lengths, q_pos, groups, *rest):
        made.append((layer, int((groups[1].diff() > 0).sum()), len(q)))
        return real(q, pool, layer, table, lengths, q_pos, groups, *rest)

    monkeypatch.setattr(ops, "decode_shared", spy)
    return made


traffic = st.tuples(  # what, and how: which of the common prefixes, how much of it, samples, new tokens
    st.sampled_from(["submit", "submit", "submit", "abort", "step"]),
    st.integers(0, 3), st.integers(0, 14), st.integers(1, 4), st.integers(3, 12),
)  # fmt: skip


def outcome(drained):
    return {
        (request_id, number): (sample.token_ids, sample.finish_reason)
        for request_id, completion in drained.completions.items()
        for number, sample in enumerate(completion.samples)
    }


def token_bytes(engine, layers):
    """Bytes of K and V of one token in so many layers, fp32."""
    return layers * 2 * engine.spec.kv_heads * engine.spec.head_dim * 4


class TestEngine:
    @pytest.mark.parametrize("backend", ["reference", "cpu", "cpu-gathered"])
    @pytest.mark.parametrize("prompt_tokens", [33, 36])
    def test_sixteen_samples_of_one_prompt(
        self, backend, prompt_tokens, t_model, shared_for, drain, assert_idle, monkeypatch, calls
    ):
        """The prompt's full pages are shared to the end; the last page is each sample's own, by copy on write."""
        if backend == "cpu-gathered":
            monkeypatch.setattr(cpu, "decode_shared", decode_shared_gathered)
        engines = {}
        got = {}
        for shared in (True, False):
            engine = engines[shared] = shared_for(t_model, shared_decode=shared, backend=backend.split("-")[0])
            hot = SamplingParams(n=16, temperature=0.9, seed=3, max_tokens=7, **GREEDY)
            engine.submit(tokens(prompt_tokens), hot, request_id="it")
            drained = drain(engine)
            got[shared] = outcome(drained)
            assert_idle(engine)
        assert got[True] == got[False] and len({tuple(ids) for ids, _ in got[True].values()}) > 8
        assert len(calls) == 6 * 2 and set(calls) == {(0, 1, 16), (1, 1, 16)}
        spared = 6 * 15 * (prompt_tokens // PAGE * PAGE) * token_bytes(engines[True], 2)
        assert (
            engines[True]._runner.accounts.bytes_spared == spared and engines[False]._runner.accounts.bytes_spared == 0
        )

    def test_bytes_of_a_sample_do_not_depend_on_company(self, t_model, shared_for, drain):
        """They are those of the table that the kernel was given, as the closed form has them."""
        engine = shared_for(t_model)
        engine.submit(tokens(21), SamplingParams(n=4, max_tokens=9, **GREEDY), request_id="it")
        samples = drain(engine).completions["it"].samples
        cost = predict_decode(
            engine.spec, None, prompt_tokens=21, new_tokens=9, page_tokens=PAGE, unit_tokens=PAGE, itemsize=4
        )
        assert {(s.decode_steps, s.kv_bytes_read) for s in samples} == {(cost.steps, cost.kv_bytes)}
        assert engine._runner.accounts.bytes_spared == 8 * 3 * 20 * token_bytes(engine, 2)

    def test_prefix_hits_share_and_strangers_do_not(self, t_model, shared_for, drain, calls):
        engine = shared_for(t_model)
        engine.generate([tokens(24)], SamplingParams(max_tokens=1))
        for number in range(3):
            engine.submit(tokens(24) + tokens(3, 10 + number), SamplingParams(max_tokens=5, **GREEDY))
        engine.submit(tokens(30, 5), SamplingParams(max_tokens=5, **GREEDY))
        drain(engine)
        assert set(calls) == {(0, 1, 4), (1, 1, 4)}
        assert engine._runner.accounts.bytes_spared == 4 * 2 * 24 * token_bytes(engine, 2)

    def test_the_cost_of_a_group_is_a_setting(self, t_model, shared_for, drain):
        """Four samples of 20 shared tokens spare 60 tokens of 2 heads of 16, fp32, in a layer."""
        worth = 60 * 2 * 2 * 16 * 4
        for cost, grouped in ((worth - 1, True), (worth, False)):
            engine = shared_for(t_model, shared_decode_bytes=cost)
            engine.submit(tokens(21), SamplingParams(n=4, max_tokens=9, **GREEDY))
            drain(engine)
            assert bool(engine._runner.accounts.bytes_spared) == grouped

    def test_forked_sessions_that_part_within_a_page(self, t_model, shared_for, engine_for, assert_idle, calls):
        engine = shared_for(t_model)
        session = engine.session(tokens(22))
        session.generate(SamplingParams(max_tokens=3, **GREEDY))  # 24 tokens are computed, the 25th is drawn
        kept = list(session.tokens)
        branches = [session, session.fork(), session.fork()]
        wanted = {}
        for number, branch in enumerate(branches):
            branch.append(tokens(2 + number, 20 + number))
            wanted[branch.submit(SamplingParams(max_tokens=12, **GREEDY))] = kept + tokens(2 + number, 20 + number)
        for request_id, completion in engine.finish(list(wanted)).items():
            alone = engine_for(t_model, shared_decode=False).generate(
                [wanted[request_id]], SamplingParams(max_tokens=12, **GREEDY)
            )
            assert completion.samples[0].token_ids == alone[0].samples[0].token_ids
        assert (0, 1, 3) in calls
        assert engine._runner.accounts.bytes_spared == 11 * 2 * 24 * token_bytes(engine, 2)
        for branch in branches:
            branch.close()
        assert_idle(engine)

    @pytest.mark.parametrize("grouped", [True, False])
    def test_only_layers_without_a_window_share(self, grouped, g_model, shared_for, drain, calls):
        """Of four layers one sees everything, whether or not the others have tables of their own."""
        got = {}
        for shared in (True, False):
            engine = shared_for(g_model, layer_groups=grouped, shared_decode=shared)
            engine.submit(tokens(21), SamplingParams(n=3, max_tokens=9, temperature=0.9, seed=1, **GREEDY))
            got[shared] = outcome(drain(engine))
            assert engine._runner.accounts.bytes_spared == shared * 8 * 2 * 20 * token_bytes(engine, 1)
        assert got[True] == got[False] and len(calls) == 8

    def test_a_model_of_windows_looks_for_nothing(self, w_model, shared_for, drain, calls):
        engine = shared_for(w_model)
        engine.submit(tokens(21), SamplingParams(n=3, max_tokens=9, **GREEDY))
        drain(engine)
        assert engine._runner._runs is None and not calls

    def test_beside_prompts_and_sparse_requests(self, t_model, shared_for, drain, calls):
        """Dense samples are a group of their own rows; a method's rows and a prompt's chunks are served as ever."""
        got = {}
        for shared in (True, False):
            engine = shared_for(t_model, shared_decode=shared, step_tokens=12)
            few = method("quest", budget_tokens=3 * PAGE, keep={"sink_tokens": 4, "recent_tokens": 4}, dense_layers=[])
            engine.submit(tokens(30), SamplingParams(n=3, max_tokens=20, **GREEDY), request_id="dense")
            engine.submit(tokens(30), SamplingParams(n=2, max_tokens=20, **GREEDY), request_id="sparse", method=few)
            engine.submit(tokens(60, 1), SamplingParams(max_tokens=9, **GREEDY), request_id="long")
            got[shared] = outcome(drain(engine))
        assert got[True] == got[False] and calls
        assert max(rows for _, _, rows in calls) == 4  # the three dense samples and "long"

    def test_a_batch_with_sealed_pages_is_read_row_by_row(self, t_model, engine_for, drain, calls):
        """Stored order is not logical order there; once such a request has ended, the others share again."""
        got = {}
        for shared in (True, False):
            engine = engine_for(
                t_model, page_tokens=16, page_policies={"text": 8, "image": 12}, pool_tokens=800,
                shared_decode=shared, shared_decode_bytes=0,
            )  # fmt: skip
            prompt = [TokenSegment("text", tokens(5)), TokenSegment("image", tokens(10, 1))]
            engine.submit(prompt, SamplingParams(max_tokens=4, n=2, **GREEDY), request_id="image")
            engine.submit(tokens(20), SamplingParams(max_tokens=9, n=2, **GREEDY), request_id="text")
            got[shared] = outcome(drain(engine))
        assert got[True] == got[False]
        assert engine._runner.accounts.bytes_spared == 0 and len(calls) == (8 - 3) * 2

    def test_traffic_on_a_tight_pool(self, t_model, shared_for, assert_idle):
        """Samples and prefix hits come, are preempted, aborted and admitted again; each token is what it is alone."""
        roomy = shared_for(t_model, shared_decode=False, pool_tokens=2000)
        spared, preempted, hits = [], [], []
        known = {}

        def alone(prompt, params):
            key = tuple(prompt), params
            if key not in known:
                known[key] = roomy.generate([prompt], params)[0].samples
            return known[key]

        @given(st.lists(traffic, min_size=6, max_size=14), st.sampled_from([40, 72]), st.sampled_from([9, 64]))
        @settings(max_examples=4)
        def run(steps, pool_tokens, step_tokens):
            engine = shared_for(t_model, pool_tokens=pool_tokens, step_tokens=step_tokens, max_seqs=6)
            asked, done = {}, {}

            def take(count):
                for _ in range(count):
                    if engine.has_work():
                        done.update({o.request_id: o.completion for o in engine.step() if o.completion is not None})
                        engine.check()

            for what, prefix, cut, n, count in steps:
                if what == "submit":
                    prompt = tokens(16, prefix % 2)[: cut + 2] + tokens(prefix, 7)
                    params = SamplingParams(n=n, max_tokens=count, temperature=0.8, seed=cut, **GREEDY)
                    asked[engine.submit(prompt, params)] = prompt, params
                elif what == "abort" and asked:
                    engine.abort(list(asked)[cut % len(asked)])
                take(count if what == "step" else 1)
            take(3000)
            assert done.keys() == asked.keys()
            for request_id, (prompt, params) in asked.items():
                for sample, wanted in zip(done[request_id].samples, alone(prompt, params), strict=False):
                    length = len(sample.token_ids)
                    assert sample.token_ids == wanted.token_ids[:length]
                    assert sample.finish_reason == "abort" or length == params.max_tokens
            assert_idle(engine)
            spared.append(engine._runner.accounts.bytes_spared)
            preempted.append(engine.stats().preemptions)
            hits.append(engine.stats().hit_tokens)

        run()
        for seen in (spared, preempted, hits):
            assert any(seen), f"the traffic was too light: {seen}"


def test_a_group_of_groups_is_made_of_equal_tables():
    """Whatever the finder says of random tables, two rows of a run have one head (by the tables, pair by pair)."""
    rng = random.Random(0)
    tables = Tables()
    for _ in range(40):
        if tables.held and rng.random() < 0.7:
            child = tables.fork(rng.choice(tables.held))
            tables.write(child, rng.randrange(child.table.n_pages))
        else:
            tables.new(rng.randint(1, 150))
    runs = tables.find()
    assert len(runs) > 2
    for rows, shared in runs:
        for a, b in combinations(rows, 2):
            one, other = (tables.held[row].table.pages(0, shared // PAGE) for row in (a, b))
            assert np.array_equal(one, other)


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_a_bad_cost_is_refused(value, t_model, engine_for):
    with pytest.raises(ValueError, match=f"shared_decode_bytes must be an integer of at least 0, got {value!r}"):
        engine_for(t_model, shared_decode_bytes=value)


def test_a_switch_is_true_or_false(t_model, engine_for):
    with pytest.raises(ValueError, match="shared_decode must be True or False, got 'yes'"):
        engine_for(t_model, shared_decode="yes")
