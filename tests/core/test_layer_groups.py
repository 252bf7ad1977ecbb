"""Layers with a window have block tables of their own: the same tokens as one table for all, on fewer units."""

import random

import numpy as np
import pytest

from octavo.core import CapacityError, SamplingParams
from octavo.core.costs import predict_decode
from octavo.core.memory.layer_groups import LayerGroup, LayerPlace, LayerPlan
from octavo.core.policies import EVICTIONS
from octavo.scripts.build import method

from ..cells import covering

METHODS = ("oracle", "quest", "random", "sparq", "streaming")  # exact mass, digests, neither, keys, positions
WINDOW = 8
GREEDY = {"ignore_eos": True}


def tokens(n, seed=0):
    return random.Random(seed).choices(range(3, 128), k=n)


MODELS = ["g_model", "w_model"]


@pytest.fixture(params=MODELS)
def model(request):
    """Three layers with a window beside one without; and windows only."""
    return request.getfixturevalue(request.param)


class TestPlan:
    def test_gemma_3_270m(self):
        plan = LayerPlan.of(([512] * 5 + [0]) * 3)
        windowed = tuple(layer for layer in range(18) if layer not in (5, 11, 17))
        assert plan.groups == (LayerGroup((5, 11, 17), 0, 1), LayerGroup(windowed, 512, 5))
        assert (plan.unit_layers, plan.slices) == (3, 6)
        assert [plan.places[layer] for layer in (5, 11, 17)] == [LayerPlace(0, 0, at, at) for at in range(3)]
        assert plan.places[0] == LayerPlace(1, 1, 0, 0) and plan.places[6] == LayerPlace(1, 2, 2, 5)
        assert plan.places[16] == LayerPlace(1, 5, 2, 14)

    @pytest.mark.parametrize("window", [0, 8])
    @pytest.mark.parametrize("layers", [1, 30])
    def test_layers_that_are_all_alike_are_one_group_of_one_slice(self, layers, window):
        plan = LayerPlan.of([window] * layers)
        assert plan.groups == (LayerGroup(tuple(range(layers)), window, 1),)
        assert plan.unit_layers == layers and plan.slices == 1
        assert plan.places == tuple(LayerPlace(0, 0, layer, layer) for layer in range(layers))

    def test_numbers_of_layers_without_a_common_divisor_have_units_of_one_layer(self):
        plan = LayerPlan.of([8, 8, 0, 8])
        assert plan.groups == (LayerGroup((2,), 0, 1), LayerGroup((0, 1, 3), 8, 3)) and plan.unit_layers == 1
        assert plan.places == (
            LayerPlace(1, 1, 0, 0), LayerPlace(1, 2, 0, 1), LayerPlace(0, 0, 0, 0), LayerPlace(1, 3, 0, 2),
        )  # fmt: skip

    def test_windows_of_several_sizes_are_several_groups(self):
        plan = LayerPlan.of([16, 8, 16, 0, 8, 0])
        assert [(group.window, group.layers, group.slices) for group in plan.groups] == [
            (0, (3, 5), 1), (8, (1, 4), 1), (16, (0, 2), 1),
        ]  # fmt: skip

    def test_not_grouped_is_one_group_that_keeps_everything(self):
        plan = LayerPlan.of([8, 8, 0, 8], grouped=False)
        assert plan.groups == (LayerGroup((0, 1, 2, 3), 0, 1),) and plan.unit_layers == 4

    @pytest.mark.parametrize("windows", [[8, 8, 0, 8], [0] * 3, [4, 8, 8, 0, 0, 4], ([512] * 5 + [0]) * 3])
    def test_every_layer_has_a_place_of_its_own(self, windows):
        plan = LayerPlan.of(windows)
        assert len({(place.slice, place.unit_layer) for place in plan.places}) == len(windows)
        assert plan.slices * plan.unit_layers == len(windows)
        for layer, place in enumerate(plan.places):
            assert plan.groups[place.group].layers[place.group_layer] == layer

    @pytest.mark.parametrize("window, position, first", [(0, 99, 0), (8, 7, 0), (8, 8, 1), (1, 5, 5)])
    def test_first_seen(self, window, position, first):
        assert LayerGroup((0,), window, 1).first_seen(position) == first


def submit(engine, requests):
    for request_id, (prompt, params, *rest) in requests.items():
        engine.submit(
            prompt, SamplingParams(**{**GREEDY, **params}), request_id=request_id, **(rest[0] if rest else {})
        )


def outcome(drained):
    """All that a user sees of each sample but its bytes."""
    return {
        (request_id, number): (sample.token_ids, sample.finish_reason, sample.logprobs)
        for request_id, completion in drained.completions.items()
        for number, sample in enumerate(completion.samples)
    }


def assert_same(got, expected):
    """The same tokens; log-probabilities to what a sum in another order changes."""
    assert got.keys() == expected.keys()
    for key, (ids, reason, entries) in got.items():
        assert (ids, reason) == expected[key][:2]
        for one, other in zip(entries or [], expected[key][2] or [], strict=True):
            assert one == pytest.approx(other, abs=1e-3)


def units_seen(engine, stored, position):
    """Units of ``stored`` tokens, in closed form, if layers with a window keep what a query at ``position`` sees."""
    page = engine.config.text_page_tokens
    pages, entries = -(-stored // page), page // engine.config.unit_tokens
    units = 0
    for group in engine._plan.groups:
        gone = max(0, position - group.window + 1) // page if group.window else 0
        units += (pages - gone) * entries * group.slices
    return units


BATCH = {
    "a": (tokens(41, 1), {"max_tokens": 12, "logprobs": 3}),
    "b": (tokens(5, 2), {"max_tokens": 20, "logprobs": 3}),
    "c": (tokens(24, 3), {"max_tokens": 9, "n": 2, "temperature": 0.9, "seed": 5, "logprobs": 3}),
}


class TestSameTokens:
    @pytest.mark.parametrize(
        "sizes, model",
        covering([(1, 16), (1, 8192), (4, 5), (4, 8192), (5, 7), (16, 10), (16, 8192)], MODELS),
        indirect=["model"],
    )
    def test_pages_and_chunks_of_every_size(self, model, engine_for, drain, assert_idle, sizes):
        (page_tokens, step_tokens), found = sizes, []
        for grouped in (True, False):
            engine = engine_for(
                model, layer_groups=grouped, page_tokens=page_tokens, step_tokens=step_tokens, pool_tokens=800
            )
            submit(engine, BATCH)
            found.append(outcome(drain(engine)))
            assert_idle(engine)
        assert_same(*found)

    def test_the_cpu_kernels(self, model, engine_for, drain):
        found = []
        for backend, grouped in (("cpu", True), ("reference", False)):
            engine = engine_for(model, layer_groups=grouped, backend=backend, page_tokens=16, step_tokens=10)
            submit(engine, BATCH)
            found.append(outcome(drain(engine)))
        assert_same(*found)

    @pytest.mark.parametrize("page_tokens, prefix_cache", [(4, True), (4, False), (16, True)])
    def test_preemption(self, model, engine_for, drain, assert_idle, page_tokens, prefix_cache):
        roomy = engine_for(model, layer_groups=False, prefix_cache=False)
        submit(roomy, BATCH)
        expected = outcome(drain(roomy))
        engine = engine_for(model, page_tokens=page_tokens, prefix_cache=prefix_cache, step_tokens=16)
        needed = units_seen(engine, 52, 51)
        tokens_of_pool = -(-needed // engine._plan.slices) * engine.config.unit_tokens
        engine = engine_for(
            model, page_tokens=page_tokens, prefix_cache=prefix_cache, step_tokens=16, pool_tokens=tokens_of_pool + 16
        )
        submit(engine, BATCH)
        assert_same(outcome(drain(engine)), expected)
        assert engine.stats().preemptions > 0
        assert_idle(engine)

    @pytest.mark.parametrize("name", METHODS)
    def test_sparse_methods_choose_in_the_layers_without_a_window(self, g_model, engine_for, drain, name):
        chosen = method(name, budget_tokens=16, keep={"sink_tokens": 4, "recent_tokens": 4}, dense_layers=[])
        found, read = [], []
        for grouped in (True, False):
            engine = engine_for(g_model, layer_groups=grouped, method=chosen)
            submit(engine, BATCH)
            drained = drain(engine)
            found.append(outcome(drained))
            samples = [sample for completion in drained.completions.values() for sample in completion.samples]
            read.append([(s.decode_steps, s.kv_bytes_read, s.digest_bytes_read) for s in samples])
        assert_same(*found)
        assert sorted(read[0]) == sorted(read[1])

    def test_digests_are_of_the_layers_without_a_window(self, g_model, engine_for):
        engine = engine_for(g_model)
        quest = method("quest", budget_tokens=16, keep={"sink_tokens": 4, "recent_tokens": 4}, dense_layers=[])
        engine.submit(tokens(45), SamplingParams(**GREEDY), method=quest)
        for _ in range(4):
            engine.step()
        (sequence,) = engine._scheduler.running
        (store,) = engine._runner._digests.values()
        pages = sequence.table.pages(0, 11)
        keys = engine._runner.kv[pages.astype(np.int64)][:, 0, 0]  # [n, Hkv, p, D]: a unit of one layer a page
        assert store.parts["min"].shape[1] == 1
        assert (store.parts["min"][pages.astype(np.int64), 0] == keys.amin(2)).all()

    def test_scores(self, model, engine_for, assert_idle):
        prompt, target = tokens(21), tokens(30, 1)
        grouped = engine_for(model, step_tokens=7)
        score = grouped.score(prompt, target)
        assert score == pytest.approx(engine_for(model, layer_groups=False).score(prompt, target), abs=1e-3)
        assert_idle(grouped)


def lose(engine, pages):
    """Let the pool give up some idle pages, and no others."""
    pool = engine._pool
    pages = np.array(pages, np.int32)
    assert not pool.refs[pages].any()
    units, before = int(pool.size[pages].sum()), pool.evictions
    pool._idle._rank[pages] = -1
    pool.release(pool.allocate(pool.free_units + units))
    assert pool.evictions == before + len(pages) and not any(page in pool.index for page in pages.tolist())
    engine.check()


class TestPrefixHits:
    """Pages of 4 tokens and a window of 8: a hit of k pages needs the window's pages k - 2 and k - 1."""

    PROMPT = tokens(41)

    def run(self, engine, drain, prompt, **params):
        submit(engine, {"it": (prompt, {"max_tokens": 3, **params})})
        drained = drain(engine)
        return drained.completions["it"].cached_tokens, drained.tokens_of("it")

    @pytest.mark.parametrize(
        "lost, lost_full, hits",
        [
            ((), 0, 10), ((9,), 0, 9), ((8,), 0, 8), ((0, 1, 2, 3, 4, 5, 6, 7), 0, 10), ((6, 9), 0, 9), ((6, 8), 0, 6),
            ((1, 3, 5, 7, 9), 0, 1), ((0, 2, 4, 6, 8), 0, 0), (range(10), 0, 0), ((), 1, 9), ((7,), 1, 7), ((8,), 3, 7),
        ],
    )  # fmt: skip
    def test_a_hit_ends_where_the_window_has_its_pages(
        self, g_model, engine_for, drain, assert_idle, lost, lost_full, hits
    ):
        engine = engine_for(g_model)
        cold = self.run(engine, drain, self.PROMPT)
        nodes = self.nodes(engine)
        assert cold[0] == 0 and len(nodes) == len(engine._pool.index) // 2 == 10
        lose(engine, [node.page(1) for node in (nodes[at] for at in lost)])
        lose(engine, [nodes[-1 - at].page(0) for at in range(lost_full)])
        assert self.run(engine, drain, self.PROMPT) == (4 * hits, cold[1])
        assert_idle(engine)
        assert self.run(engine, drain, self.PROMPT) == (40, cold[1])  # what was gone has been published again
        assert_idle(engine)

    @pytest.mark.parametrize("lost, hits", [((), 10), ((9,), 9), ((8,), 8), ((0, 1, 2, 3, 4, 5, 6, 7), 10), ((0,), 10)])
    def test_where_all_layers_have_a_window(self, w_model, engine_for, drain, assert_idle, lost, hits):
        engine = engine_for(w_model)
        cold = self.run(engine, drain, self.PROMPT)
        nodes = self.nodes(engine)
        lose(engine, [nodes[at].page(0) for at in lost])
        assert self.run(engine, drain, self.PROMPT) == (4 * hits, cold[1])
        assert_idle(engine)

    def nodes(self, engine):
        """The nodes of the only chain in the index, in order."""
        nodes = [node for nodes in engine._pool.index._nodes.values() for node in nodes]
        return sorted(nodes, key=lambda node: node.id)

    def test_pages_behind_the_window_of_a_living_request_are_found_and_come_back_to_life(
        self, g_model, engine_for, drain, assert_idle
    ):
        engine = engine_for(g_model)
        submit(engine, {"first": (self.PROMPT, {"max_tokens": 30})})
        for _ in range(20):
            engine.step()
        engine.check()
        (first,) = engine._scheduler.running
        assert first.computed == 60 and first.tables[1].first_page == 13  # position 59 sees 52 to 59
        assert engine.stats().units_cached == 13 * 3
        idle = first.nodes[8].page(1)
        assert engine._pool.refs[idle] == 0
        submit(engine, {"second": (self.PROMPT, {"max_tokens": 6})})
        engine.step()
        engine.check()
        second = engine._scheduler.running[1]
        assert engine._pool.refs[idle] == 1 and second.tables[1].pages(7, 10).tolist() == [
            0,
            idle,
            first.nodes[9].page(1),
        ]
        assert engine._pool.refs[first.table.pages(0, 10)].tolist() == [2] * 10
        assert engine.stats().units_cached == 11 * 3
        drained = drain(engine)
        assert drained.completions["second"].cached_tokens == 40
        alone = engine_for(g_model, layer_groups=False, prefix_cache=False)
        assert (
            drained.tokens_of("second")
            == alone.generate([self.PROMPT], SamplingParams(max_tokens=6, **GREEDY))[0].samples[0].token_ids
        )
        assert_idle(engine)

    def test_a_sequence_whose_window_passed_its_pages_still_leads_to_its_last_ones(self, w_model, engine_for, drain):
        """Pages of 16 tokens, which is more than the window: its earlier pages are evicted while it lives."""
        engine = engine_for(w_model, page_tokens=16)
        prompt = tokens(41)
        submit(engine, {"first": (prompt, {"max_tokens": 30})})
        for _ in range(16):
            engine.step()
        (first,) = engine._scheduler.running
        lose(engine, [node.page(0) for node in first.nodes[:2]])
        drained = drain(engine)
        cached, _ = self.run(engine, drain, prompt + drained.tokens_of("first"))
        assert cached == 64

    @pytest.mark.parametrize("eviction, model", covering(EVICTIONS, MODELS), indirect=["model"])
    def test_prompts_that_return_in_a_pool_that_holds_few_of_them(
        self, model, engine_for, drain, assert_idle, eviction
    ):
        engine = engine_for(model, pool_tokens=80, eviction=eviction)
        alone = engine_for(model, layer_groups=False, prefix_cache=False)
        shared, chooser, hits = [tokens(30, seed) for seed in range(3)], random.Random(0), 0
        for number in range(10):
            prompt = shared[chooser.randrange(3)][: chooser.randrange(12, 30)] + tokens(chooser.randrange(1, 9), number)
            expected = alone.generate([prompt], SamplingParams(max_tokens=5, **GREEDY))[0].samples[0].token_ids
            cached, found = self.run(engine, drain, prompt, max_tokens=5)
            assert found == expected
            hits += cached
        assert hits > 40 and engine.stats().evictions > 10
        assert_idle(engine)


class TestSamples:
    def test_br01_samples_grow_past_the_window(self, model, engine_for, drain, assert_idle):
        engine, hot = engine_for(model), {"temperature": 0.9, "max_tokens": 40}
        singles = []
        for seed in range(3):
            submit(engine, {"it": (tokens(6), {**hot, "seed": 7 + seed})})
            singles.append(drain(engine).tokens_of("it"))
        engine = engine_for(model)
        submit(engine, {"it": (tokens(6), {**hot, "seed": 7, "n": 3})})

        def counts(_):
            listed = np.zeros_like(engine._pool.refs)
            for table in (table for sequence in engine._scheduler.running for table in sequence.tables):
                np.add.at(listed, table.pages()[table.first_page :], 1)
            leaves = {id(leaf): leaf for s in engine._scheduler.running for t in s.tables for leaf in t._root}
            if all(leaf.tables == 1 for leaf in leaves.values()):
                assert np.array_equal(listed, engine._pool.refs)

        assert drain(engine, counts).tokens_of("it") == singles
        assert_idle(engine)

    def test_a_fork_lets_go_of_its_window_alone(self, g_model, engine_for):
        """Before the samples write, they share the leaves of both tables."""
        engine = engine_for(g_model)
        submit(engine, {"it": (tokens(22), {"n": 2, "temperature": 1.0, "seed": 1, "max_tokens": 9})})
        engine.step()
        one, two = engine._scheduler.running
        assert [leaf.tables for table in one.tables for leaf in table._root] == [2, 2]
        assert (one.tables[1].first_page, engine.stats().units_held) == (0, 6 * 4)
        engine.step()
        engine.check()
        # Position 22 sees 15 to 22: pages 3 to 5 of the window, of which each has the last for itself.
        assert one.tables[1].pages(0, 3).tolist() == two.tables[1].pages(0, 3).tolist() == [0, 0, 0]
        assert one.tables[1].pages(3, 5).tolist() == two.tables[1].pages(3, 5).tolist()
        assert engine.stats().units_held == (6 + 1) + (2 + 2) * 3 and engine.stats().copies == 2


class TestUnits:
    @pytest.mark.parametrize(
        "sizes, prefix_cache, model",
        covering([(1, 64), (4, 64), (4, 5), (5, 7), (24, 3)], [True, False], MODELS, together=2),
        indirect=["model"],
    )
    def test_what_a_request_holds_is_known_in_closed_form(self, model, engine_for, drain, sizes, prefix_cache):
        """The full layers hold all pages; the others those that the last chunk and its window touch."""
        page_tokens, step_tokens = sizes
        engine = engine_for(
            model, page_tokens=page_tokens, step_tokens=step_tokens, prefix_cache=prefix_cache, pool_tokens=240
        )
        submit(engine, {"it": (tokens(50), {"max_tokens": 14})})
        begun = [0]

        def held(_):
            for sequence in engine._scheduler.running:
                assert engine.stats().units_held == units_seen(engine, sequence.computed, begun[0])
                begun[0] = sequence.computed

        drain(engine, held)
        assert begun == [62]

    def test_pages_behind_the_window_serve_others_while_the_request_lives(
        self, w_model, engine_for, drain, assert_idle
    ):
        """A pool of 9 pages: one request of 80 tokens, which would take 20 pages, beside another."""
        engine = engine_for(w_model, pool_tokens=36, step_tokens=8)
        submit(engine, {"long": (tokens(60), {"max_tokens": 21}), "other": (tokens(9, 1), {"max_tokens": 30})})
        together = []
        drained = drain(engine, lambda _: together.append(engine.stats().running))
        assert together.count(2) == 20 and engine.stats().preemptions == 0
        alone = engine_for(w_model, layer_groups=False)
        assert (
            drained.tokens_of("long")
            == alone.generate([tokens(60)], SamplingParams(max_tokens=21, **GREEDY))[0].samples[0].token_ids
        )
        assert_idle(engine)

    @pytest.mark.parametrize("page_tokens", [1, 4, 5, 16])
    def test_bytes_read_are_the_predicted_ones(self, model, engine_for, drain, page_tokens):
        engine = engine_for(model, page_tokens=page_tokens)
        submit(engine, {"it": (tokens(21), {"max_tokens": 30})})
        sample = drain(engine).completions["it"].samples[0]
        cost = predict_decode(
            engine.spec, None, prompt_tokens=21, new_tokens=30, page_tokens=page_tokens,
            unit_tokens=engine.config.unit_tokens, itemsize=4,
        )  # fmt: skip
        assert (sample.decode_steps, sample.kv_bytes_read) == (cost.steps, cost.kv_bytes)

    @pytest.mark.parametrize(
        "request_tokens, page_tokens, model",
        covering([(30, 1), (31, 2), (32, 3), (33, 3), (6, 33), (1, 20)], [1, 4], MODELS, together=2),
        indirect=["model"],
    )
    def test_the_smallest_pool_that_is_not_refused_serves(
        self, model, engine_for, drain, assert_idle, request_tokens, page_tokens
    ):
        """Most is held where a page begins: there the window touches one page more than where one ends. A prompt that
        is longer than the pool has room for is computed in chunks, while the window passes."""
        prompt, new = request_tokens
        engine = engine_for(model, page_tokens=page_tokens)
        most = max(units_seen(engine, at + 1, at) for at in range(prompt + new - 1))
        least = -(-most * engine.config.unit_tokens // engine._plan.slices)
        request = {"it": (tokens(prompt), {"max_tokens": new})}
        engine = engine_for(model, page_tokens=page_tokens, pool_tokens=least)
        submit(engine, request)
        drained = drain(engine)
        assert drained.completions["it"].samples[0].finish_reason == "length" and len(drained.tokens_of("it")) == new
        assert_idle(engine)
        refused = engine_for(model, page_tokens=page_tokens, pool_tokens=least - page_tokens)
        with pytest.raises(CapacityError, match=f"raise pool_tokens to at least {least} from"):
            submit(refused, request)
        assert not refused.has_work()


class TestSessions:
    PROMPT = tokens(30, 4)

    def conversation(self, engine, stop):
        """A turn that a stop string cuts short, a fork, and a turn of each branch."""
        said = []

        def turn(session, **params):
            completion = session.generate(SamplingParams(**{"max_tokens": 14, "logprobs": 1, **GREEDY, **params}))
            engine.check()
            sample = completion.samples[0]
            said.append((session.tokens.copy(), sample.token_ids, sample.text, sample.finish_reason))

        session = engine.session(self.PROMPT)
        turn(session, stop=stop)
        kept = session._parked.computed
        session.append(tokens(5, 1))
        twin = session.fork()
        engine.check()
        twin.append(tokens(11, 2))
        turn(twin, max_tokens=25)
        turn(session)
        turn(twin)
        session.close()
        twin.close()
        return kept, said

    @pytest.mark.parametrize("cut, model", covering([(0, 43), (1, 42), (3, 40), (12, 0)], MODELS), indirect=["model"])
    def test_turns_forks_and_cut_stop_strings(self, model, engine_for, piece_tokenizer, assert_idle, cut):
        """A turn of 14 tokens, or 13 of which a stop string cuts the last. One that is longer than the window takes the
        session back to where pages are gone: it keeps none."""
        (length, kept), tokenizer = cut, piece_tokenizer([chr(0x4E00 + token) for token in range(128)])
        free = engine_for(model, tokenizer, layer_groups=False)
        text = free.generate([self.PROMPT], SamplingParams(max_tokens=14, **GREEDY))[0].samples[0].text
        stop = (text[13 - length : 13],) if length else ()
        engines = [engine_for(model, tokenizer, layer_groups=grouped) for grouped in (True, False)]
        (found, said), (_, expected) = (self.conversation(engine, stop) for engine in engines)
        assert said == expected and found == kept
        assert said[0][3] == ("stop" if length else "length") and len(said[0][0]) == 30 + (
            13 - length if length else 14
        )
        for engine in engines:
            assert_idle(engine)

    def test_idle_sessions_make_room(self, model, engine_for, assert_idle):
        engine = engine_for(model, pool_tokens=64)
        turns = []
        for pool in (engine, engine_for(model, layer_groups=False)):
            sessions = [pool.session(tokens(20, seed)) for seed in range(4)]
            said = []
            for _ in range(3):
                for session in sessions:
                    session.append(tokens(3, len(session.tokens)))
                    said.append(session.generate(SamplingParams(max_tokens=6, **GREEDY)).samples[0].token_ids)
                    pool.check()
            for session in sessions:
                session.close()
            turns.append(said)
        assert turns[0] == turns[1] and engine.stats().evictions > 0
        assert_idle(engine)
