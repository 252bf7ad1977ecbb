"""Admission, copy-on-write, chunks and limits, page by page. BR numbers are those of public bug reports."""

import numpy as np
import pytest
import torch

from octavo.core import CapacityError, SamplingParams

from .scheduler_cases import GREEDY, alone, pages, record_plans, tokens


class TestPagesOfOneRequest:
    @pytest.mark.parametrize("length, new, held", [(1, 1, 1), (4, 1, 1), (4, 2, 2), (5, 4, 2), (5, 5, 3)])
    def test_pages_grow_with_the_stored_tokens(self, t_model, engine_for, assert_idle, length, new, held):
        engine = engine_for(t_model)
        engine.generate([tokens(length)], SamplingParams(max_tokens=new, **GREEDY))
        assert engine.stats().units_held_peak == held  # the last token's KV is never stored
        assert pages(engine) == {"free": 100 - (length + new - 1) // 4, "cached": (length + new - 1) // 4, "held": 0}
        assert_idle(engine)

    def test_without_a_prefix_cache_no_page_is_hashed(self, t_model, engine_for):
        engine = engine_for(t_model, prefix_cache=False)
        engine.submit(tokens(9), SamplingParams(max_tokens=3, **GREEDY))
        engine.step()
        (sequence,) = engine._scheduler.running
        assert len(sequence._keys) == 0

    def test_exact_page_ids(self, t_model, engine_for, drain):
        engine = engine_for(t_model, prefix_cache=False)
        engine.submit(tokens(9), SamplingParams(max_tokens=3, **GREEDY), request_id="a")
        engine.submit(tokens(4, 1), SamplingParams(max_tokens=3, **GREEDY), request_id="b")
        engine.step()
        a, b = engine._scheduler.running
        assert a.table.pages().tolist() == [1, 2, 3] and b.table.pages().tolist() == [4]
        engine.step()
        assert b.table.pages().tolist() == [4, 5]
        engine.abort("a")
        assert engine._pool.allocate(3).tolist() == [3, 2, 1]  # a stack: they come back as they were given, tail first
        engine._pool.release(np.array([3, 2, 1], np.int32))
        drain(engine)

    @pytest.mark.parametrize("page_tokens, unit", [(16, 16), (24, 8), (5, 1), (48, 16), (256, 64)])
    def test_units_are_counted_beside_pages(self, t_model, engine_for, page_tokens, unit):
        engine = engine_for(t_model, page_tokens=page_tokens, pool_tokens=3 * page_tokens)
        engine.submit(tokens(7), SamplingParams(max_tokens=4))
        engine.step()
        stats = engine.stats()
        per_page = page_tokens // unit
        assert engine.config.unit_tokens == unit
        assert stats.pages_total == 3 and stats.units_total == 3 * per_page
        assert stats.units_held == stats.pages_held * per_page == -(-7 // page_tokens) * per_page
        assert stats.units_held + stats.units_cached + stats.units_free == stats.units_total


class TestAdmissionIsATransaction:
    @pytest.mark.parametrize("extra, fresh", [(20, 5), (8, 2)], ids=["needs_5_new", "needs_2_new"])
    def test_br02_refused_hit_changes_nothing(self, t_model, engine_for, drain, assert_idle, extra, fresh):
        engine = engine_for(t_model, pool_tokens=40)
        shared, r = tokens(12), tokens(21, 1)
        engine.generate([shared], SamplingParams(max_tokens=1))
        assert pages(engine) == {"free": 7, "cached": 3, "held": 0}
        engine.submit(r, SamplingParams(max_tokens=4, **GREEDY), request_id="r")
        engine.step()
        assert pages(engine) == {"free": 1, "cached": 3, "held": 6}
        prompt = shared + tokens(extra, 2)
        assert -(-len(prompt) // 4) - 3 == fresh
        engine.submit(prompt, SamplingParams(max_tokens=3, **GREEDY), request_id="q")
        refs = engine._pool.refs.copy()
        for _ in range(2):
            assert [out.completion for out in engine.step()] == [None]
            engine.check()
            assert pages(engine) == {"free": 1, "cached": 3, "held": 6}
            assert np.array_equal(engine._pool.refs, refs) and len(engine._pool.index) == 3 + 5
            assert engine.stats().hit_tokens == 0 and engine.stats().preemptions == 0
        drained = drain(engine)
        assert drained.order == ["r", "q"] and drained.completions["q"].cached_tokens == 12
        assert drained.tokens_of("q") == alone(engine_for, t_model, prompt, max_tokens=3, **GREEDY)
        assert_idle(engine)

    def test_pinned_pages_leave_no_room(self, t_model, engine_for, drain):
        engine = engine_for(t_model, pool_tokens=40, eviction="priority")
        pinned = tokens(33)
        engine.submit(pinned, SamplingParams(max_tokens=1), priority=100)
        drain(engine)
        assert pages(engine) == {"free": 2, "cached": 8, "held": 0} and engine._pool.available == 2
        engine.submit(tokens(9, 1), SamplingParams(max_tokens=1), request_id="large")
        engine.submit(tokens(5, 1), SamplingParams(max_tokens=4, **GREEDY), request_id="small")
        engine.submit(pinned, SamplingParams(max_tokens=4, **GREEDY), request_id="hit")
        drained = drain(engine)
        reasons = {key: completion.samples[0].finish_reason for key, completion in drained.completions.items()}
        assert reasons == {"large": "capacity", "small": "length", "hit": "length"}
        assert drained.completions["hit"].cached_tokens == 32 and engine._pool.pinned_units == 8

    @pytest.mark.parametrize("length, together", [(24, True), (25, False)], ids=["just_fits", "one_page_too_many"])
    def test_br12_hit_pages_are_no_victims(self, t_model, engine_for, drain, assert_idle, length, together):
        engine = engine_for(t_model, pool_tokens=40)
        shared = tokens(12)
        engine.generate([shared], SamplingParams(max_tokens=1))
        hit_pages = [page for page in range(1, 11) if page in engine._pool.index]
        first, second = shared + tokens(4, 1), tokens(length, 2)
        engine.submit(first, SamplingParams(max_tokens=1, logprobs=3), request_id="first")
        engine.submit(second, SamplingParams(max_tokens=1), request_id="second")
        plans = record_plans(engine)
        drained = drain(engine)
        assert plans[0][0] == [("first", 4), *([("second", length)] if together else [])]
        assert drained.completions["first"].cached_tokens == 12
        assert len(hit_pages) == 3
        assert drained.tokens_of("first") == alone(engine_for, t_model, first, max_tokens=1)
        assert drained.tokens_of("second") == alone(engine_for, t_model, second, max_tokens=1)
        assert_idle(engine)

    def test_exact_fit_is_admitted(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model, pool_tokens=20)
        engine.submit(tokens(17), SamplingParams(max_tokens=4, **GREEDY), request_id="a")
        assert drain(engine).tokens_of("a") == alone(engine_for, t_model, tokens(17), max_tokens=4, **GREEDY)
        assert engine.stats().units_held_peak == 5
        assert_idle(engine)

    def test_admission_counts_idle_pages_once(self, t_model, engine_for, drain):
        # Five pages: four idle, of which three are hits. The fourth idle page is what the last token needs.
        engine = engine_for(t_model, pool_tokens=16)
        prompt = tokens(16)
        engine.generate([prompt], SamplingParams(max_tokens=1))
        assert pages(engine) == {"free": 0, "cached": 4, "held": 0}
        again = engine.generate([prompt], SamplingParams(max_tokens=1))[0]
        assert again.cached_tokens == 12 and engine.stats().evictions == 1

    def test_a_first_waiting_request_is_not_overtaken(self, t_model, engine_for, drain):
        engine = engine_for(t_model, pool_tokens=40)
        engine.submit(tokens(20), SamplingParams(max_tokens=6, **GREEDY), request_id="a")
        engine.step()
        engine.submit(tokens(30, 1), SamplingParams(max_tokens=2), request_id="large")
        engine.submit(tokens(3, 2), SamplingParams(max_tokens=1), request_id="small")
        plans = record_plans(engine)
        drain(engine)
        first_served = list(dict.fromkeys(request_id for scheduled, _ in plans for request_id, _ in scheduled))
        assert first_served == ["a", "large", "small"] and engine.stats().preemptions == 0


class TestReferences:
    def test_br01_window_and_samples(self, w_model, engine_for, drain, assert_idle):
        engine = engine_for(w_model)
        prompt = tokens(6)
        params = {"temperature": 0.9, "max_tokens": 40, **GREEDY}
        engine.submit(prompt, SamplingParams(n=3, seed=5, **params), request_id="a")
        samples = drain(engine).tokens_of("a")
        assert samples == [alone(engine_for, w_model, prompt, seed=5 + i, **params) for i in range(3)]
        assert engine.stats().copies == 2  # three writers of one partly filled page
        assert_idle(engine)

    def test_samples_share_pages_until_they_write(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model)
        engine.submit(tokens(10), SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=4, **GREEDY))
        engine.step()
        assert pages(engine)["held"] == 3 and engine.stats().running == 4
        tables = [sequence.table.pages().tolist() for sequence in engine._scheduler.running]
        assert tables == [[1, 2, 3]] * 4
        engine.step()
        tables = [sequence.table.pages().tolist() for sequence in engine._scheduler.running]
        assert [table[:2] for table in tables] == [[1, 2]] * 4
        assert len({table[2] for table in tables}) == 4 and pages(engine)["held"] == 6
        assert engine._pool.refs[[1, 2]].tolist() == [4, 4] and engine.stats().copies == 3
        drain(engine)
        assert_idle(engine)

    def test_br03_counters_do_not_drift(self, make_chain, engine_for, assert_idle):
        engine = engine_for(make_chain(64), pool_tokens=64)
        shared = tokens(12, 99, 0, 64)
        for number in range(160):
            prompt = tokens(20, number, 0, 64) if number < 80 else shared + tokens(8, number, 0, 64)
            engine.generate([prompt], SamplingParams(max_tokens=2, **GREEDY))
            stats = engine.stats()
            assert stats.pages_held == 0 and stats.pages_free + stats.pages_cached == 16
            if number % 40 == 0:
                assert_idle(engine)
        assert engine.stats().evictions > 80 and engine.stats().hit_tokens >= 79 * 12
        assert_idle(engine)

    def test_br05_shared_pages_are_counted_once(self, t_model, engine_for, assert_idle):
        engine = engine_for(t_model, page_tokens=16, pool_tokens=256)
        shared = tokens(24)
        a, b = shared + tokens(16, 1), shared + tokens(16, 2)
        expected = [(a, 0, 2), (b, 16, 3), (a, 32, 3)]
        for prompt, hits, cached in expected:
            completion = engine.generate([prompt], SamplingParams(max_tokens=1))[0]
            assert completion.cached_tokens == hits
            assert pages(engine) == {"free": 16 - cached, "cached": cached, "held": 0}
            assert_idle(engine)

    def test_br09_a_pool_of_just_the_maximum_length(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model, pool_tokens=32, max_model_tokens=32)
        engine.submit(tokens(20), SamplingParams(max_tokens=12, **GREEDY), request_id="a")
        assert drain(engine).tokens_of("a") == alone(engine_for, t_model, tokens(20), max_tokens=12, **GREEDY)
        assert engine.stats().units_held_peak == 8 == engine.stats().units_total
        assert_idle(engine)

    def test_br09_pages_of_others_are_not_written(self, t_model, engine_for):
        engine = engine_for(t_model, pool_tokens=64)
        for n in (1, 6, 11):
            engine.submit(tokens(n, n), SamplingParams(max_tokens=6, **GREEDY))
        kv = engine._runner.kv
        while engine.has_work():
            before = kv.clone()
            written = {}
            build = engine._runner._build

            def spy(chunks, build=build, written=written):
                step, rows = build(chunks)
                written["units"] = (step.slots // kv.shape[4]).unique()
                return step, rows

            engine._runner._build = spy
            engine.step()
            engine._runner._build = build
            untouched = torch.ones(len(kv), dtype=torch.bool)
            untouched[written["units"]] = False
            same = (kv == before) | (kv.isnan() & before.isnan())
            assert same[untouched].all() and not same[written["units"]].all()

    def test_leaves_past_128_pages(self, make_llama, engine_for, drain, assert_idle):
        model = make_llama(max_position_embeddings=1024)
        engine = engine_for(model, page_tokens=1, pool_tokens=600)
        prompt = tokens(200)
        engine.submit(prompt, SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=70, **GREEDY), request_id="a")
        samples = drain(engine).tokens_of("a")
        roomy = engine_for(model, page_tokens=16, pool_tokens=2000)
        again = roomy.generate([prompt], SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=70, **GREEDY))[0]
        assert samples == [sample.token_ids for sample in again.samples]
        assert_idle(engine)


class TestChunks:
    def test_budget_is_shared_in_order(self, t_model, engine_for, drain):
        engine = engine_for(t_model, step_tokens=10)
        for request_id, length in [("a", 7), ("b", 7), ("c", 3)]:
            engine.submit(
                tokens(length, ord(request_id)), SamplingParams(max_tokens=2, **GREEDY), request_id=request_id
            )
        plans = record_plans(engine)
        drain(engine)
        assert plans[0][0] == [("a", 7), ("b", 3)]
        assert sorted(plans[1][0]) == [("a", 1), ("b", 4), ("c", 3)]

    @pytest.mark.parametrize("step_tokens", [1, 2, 3])
    def test_everybody_advances_when_the_budget_is_below_max_seqs(self, t_model, engine_for, drain, step_tokens):
        engine = engine_for(t_model, step_tokens=step_tokens)
        prompts = {str(i): tokens(2, i) for i in range(4)}
        for request_id, prompt in prompts.items():
            engine.submit(prompt, SamplingParams(max_tokens=5, **GREEDY), request_id=request_id)
        plans = record_plans(engine)
        drained = drain(engine)
        assert all(sum(count for _, count in scheduled) <= step_tokens for scheduled, _ in plans)
        for request_id, prompt in prompts.items():
            assert drained.tokens_of(request_id) == alone(engine_for, t_model, prompt, max_tokens=5, **GREEDY)

    def test_br23_a_prompt_longer_than_the_step_is_served(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model, step_tokens=16, max_model_tokens=64)
        prompts = {"long": tokens(17), "short": tokens(5, 1)}
        for request_id, prompt in prompts.items():
            engine.submit(prompt, SamplingParams(max_tokens=4, **GREEDY), request_id=request_id)
        drained = drain(engine)
        for request_id, prompt in prompts.items():
            assert drained.tokens_of(request_id) == alone(engine_for, t_model, prompt, max_tokens=4, **GREEDY)
        assert_idle(engine)

    def test_twins_wait_for_the_pages_that_one_of_them_computes(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model, step_tokens=8)
        prompt = tokens(18)
        for request_id in "ab":
            engine.submit(prompt, SamplingParams(max_tokens=4, **GREEDY), request_id=request_id)
        drained = drain(engine)
        assert drained.completions["b"].cached_tokens == 16
        assert drained.tokens_of("a") == drained.tokens_of("b")
        assert drained.tokens_of("a") == alone(engine_for, t_model, prompt, max_tokens=4, **GREEDY)
        assert_idle(engine)

    def test_a_higher_priority_does_not_wait_for_the_pages_of_a_lower_one(self, t_model, engine_for, drain):
        engine = engine_for(t_model, step_tokens=4)
        for request_id, priority in [("low", 0), ("high", 1)]:
            engine.submit(tokens(30), SamplingParams(max_tokens=2, **GREEDY), request_id=request_id, priority=priority)
            engine.step()
        plans = record_plans(engine)
        assert drain(engine).order == ["high", "low"]
        assert plans[0][0] == [("high", 4)]

    def test_twins_run_side_by_side_without_a_prefix_cache(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model, prefix_cache=False)
        for request_id in "ab":
            engine.submit(tokens(18), SamplingParams(max_tokens=4, **GREEDY), request_id=request_id)
        engine.step()
        assert engine.stats().running == 2
        drained = drain(engine)
        assert engine.stats().hit_tokens == 0 and pages(engine)["cached"] == 0
        assert drained.tokens["a", 0] == drained.tokens["b", 0]
        assert_idle(engine)

    def test_a_step_that_computes_no_logits(self, t_model, engine_for):
        engine = engine_for(t_model, step_tokens=4)
        engine.submit(tokens(9), SamplingParams(max_tokens=1))
        assert engine.step() == [] and engine.step() == []
        assert len(engine.step()[0].new_token_ids) == 1


class TestIdsAndAborts:
    def test_br25_an_id_in_use_is_refused(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model)
        engine.submit(tokens(5), SamplingParams(max_tokens=4, **GREEDY), request_id="a")
        with pytest.raises(ValueError, match="'a' is in use"):
            engine.submit(tokens(5, 1), request_id="a")
        assert drain(engine).tokens_of("a") == alone(engine_for, t_model, tokens(5), max_tokens=4, **GREEDY)
        engine.submit(tokens(5, 1), SamplingParams(max_tokens=4, **GREEDY), request_id="a")
        assert drain(engine).tokens_of("a") == alone(engine_for, t_model, tokens(5, 1), max_tokens=4, **GREEDY)
        assert_idle(engine)

    @pytest.mark.parametrize("steps", [0, 1, 2])
    def test_br25_abort_and_reuse_before_the_next_step(self, t_model, engine_for, assert_idle, steps):
        engine = engine_for(t_model)
        engine.submit(tokens(5), SamplingParams(max_tokens=4, **GREEDY), request_id="a")
        for _ in range(steps):
            engine.step()
        engine.abort("a")
        engine.submit(tokens(5, 1), SamplingParams(max_tokens=4, **GREEDY), request_id="a")
        ended = []
        while engine.has_work():
            ended += [out.completion for out in engine.step() if out.completion]
            engine.check()
        assert [completion.samples[0].finish_reason for completion in ended] == ["abort", "length"]
        assert len(ended[0].samples[0].token_ids) == steps
        assert ended[1].samples[0].token_ids == alone(engine_for, t_model, tokens(5, 1), max_tokens=4, **GREEDY)
        assert_idle(engine)

    def test_br25_unknown_and_finished_ids_are_ignored(self, t_model, engine_for, assert_idle):
        engine = engine_for(t_model)
        engine.abort("nobody")
        engine.generate([tokens(5)], SamplingParams(max_tokens=1))
        engine.abort("request-0")
        assert not engine.has_work()
        assert_idle(engine)

    def test_own_ids_and_given_ids_do_not_clash(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model)
        given = engine.submit(tokens(5), SamplingParams(max_tokens=3, **GREEDY), request_id="request-1")
        own = engine.submit(tokens(6, 1), SamplingParams(max_tokens=3, **GREEDY))
        assert given != own
        drained = drain(engine)
        assert drained.tokens_of(given) == alone(engine_for, t_model, tokens(5), max_tokens=3, **GREEDY)
        assert drained.tokens_of(own) == alone(engine_for, t_model, tokens(6, 1), max_tokens=3, **GREEDY)
        assert_idle(engine)

    @pytest.mark.parametrize("after", range(8))
    def test_abort_at_any_moment_poisons_nothing(self, t_model, engine_for, drain, assert_idle, after):
        engine = engine_for(t_model, step_tokens=5, pool_tokens=80)
        prompt = tokens(18)
        engine.submit(prompt, SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=9, **GREEDY), request_id="a")
        engine.submit(tokens(11, 1), SamplingParams(max_tokens=9, **GREEDY), request_id="b")
        for _ in range(after):
            engine.step()
        engine.abort("a")
        engine.check()
        engine.submit(prompt, SamplingParams(max_tokens=6, **GREEDY), request_id="again")
        drained = drain(engine)
        assert drained.tokens_of("again") == alone(engine_for, t_model, prompt, max_tokens=6, **GREEDY)
        full = alone(engine_for, t_model, tokens(11, 1), max_tokens=9, **GREEDY)
        assert drained.completions["b"].samples[0].token_ids == full
        assert {sample.finish_reason for sample in drained.completions["a"].samples} == {"abort"}
        assert_idle(engine)

    def test_an_aborted_request_takes_no_further_step(self, t_model, engine_for):
        engine = engine_for(t_model)
        engine.submit(tokens(5), request_id="a")
        engine.step()
        engine.abort("a")
        assert engine.has_work()
        (news,) = engine.step()
        assert news.finish_reason == "abort" and news.completion.samples[0].finish_reason == "abort"
        assert engine.stats().steps == 1 and not engine.has_work()

    def test_news_survive_a_step_that_fails(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model)
        engine.submit(tokens(5), request_id="gone")
        engine.submit(tokens(6, 1), SamplingParams(max_tokens=3, **GREEDY), request_id="b")
        engine.step()
        engine.abort("gone")
        forward = engine._model.forward
        engine._model.forward = lambda *_: (_ for _ in ()).throw(MemoryError("no room"))
        with pytest.raises(MemoryError):
            engine.step()
        engine.check()
        engine._model.forward = forward
        drained = drain(engine)
        assert set(drained.completions) == {"gone", "b"}
        assert drained.completions["b"].samples[0].token_ids == alone(
            engine_for, t_model, tokens(6, 1), max_tokens=3, **GREEDY
        )
        assert_idle(engine)

    @pytest.mark.parametrize("after", [0, 1, 3])
    def test_a_failed_step_is_repeated_with_its_copies(self, t_model, engine_for, drain, assert_idle, after):
        engine = engine_for(t_model)
        params = {"n": 3, "temperature": 1.0, "seed": 4, "max_tokens": 6, **GREEDY}
        engine.submit(tokens(6), SamplingParams(**params), request_id="a")
        forward = engine._model.forward
        for _ in range(after):
            engine.step()
        engine._model.forward = lambda *_: (_ for _ in ()).throw(MemoryError("no room"))
        with pytest.raises(MemoryError):
            engine.step()
        engine._model.forward = forward
        engine.check()
        completion = drain(engine).completions["a"]
        assert [s.token_ids for s in completion.samples] == alone(engine_for, t_model, tokens(6), **params)
        assert_idle(engine)


class TestSamples:
    def test_br27_all_samples_come_back(self, t_model, engine_for, assert_idle):
        params = SamplingParams(n=4, seed=7, temperature=1.0, max_tokens=16)
        first = engine_for(t_model)
        got = first.generate([tokens(8)], params)[0]
        assert len(got.samples) == 4 and all(sample.finish_reason in ("stop", "length") for sample in got.samples)
        assert len({tuple(sample.token_ids) for sample in got.samples}) > 1
        again = first.generate([tokens(8)], params)[0]
        fresh = engine_for(t_model).generate([tokens(8)], params)[0]
        for other in (again, fresh):
            assert [sample.token_ids for sample in other.samples] == [sample.token_ids for sample in got.samples]
        assert_idle(first)

    def test_samples_that_find_no_place_wait(self, t_model, engine_for, drain, assert_idle):
        params = {"n": 3, "seed": 2, "temperature": 1.0, "max_tokens": 6, **GREEDY}
        engine = engine_for(t_model, max_seqs=3)
        engine.submit(tokens(5, 1), SamplingParams(max_tokens=12, **GREEDY), request_id="other")
        engine.submit(tokens(9), SamplingParams(**params), request_id="a")
        drained = drain(engine)
        assert drained.tokens_of("a") == alone(engine_for, t_model, tokens(9), **params)
        assert engine.stats().running_peak == 3
        assert_idle(engine)

    def test_more_samples_than_places_are_refused(self, t_model, engine_for, assert_idle):
        engine = engine_for(t_model, max_seqs=3)
        with pytest.raises(ValueError, match=r"n=4 .* max_seqs=3"):
            engine.submit(tokens(5), SamplingParams(n=4))
        assert_idle(engine)


class TestLimits:
    @pytest.mark.parametrize(
        "length, new, outcome",
        [(30, 2, 2), (31, 1, 1), (31, 2, 1), (32, 1, None), (33, 1, None)],
        ids=["30+2", "31+1", "31+2", "32+1", "33+1"],
    )
    def test_br28_length_limit(self, t_model, engine_for, assert_idle, length, new, outcome):
        engine = engine_for(t_model, max_model_tokens=32)
        if outcome is None:
            with pytest.raises(CapacityError) as refused:
                engine.submit(tokens(length), SamplingParams(max_tokens=new))
            assert str(length) in str(refused.value) and "32" in str(refused.value)
        else:
            sample = engine.generate([tokens(length)], SamplingParams(max_tokens=new))[0].samples[0]
            assert len(sample.token_ids) == outcome and sample.finish_reason == "length"
        assert_idle(engine)
        engine.generate([tokens(5)], SamplingParams(max_tokens=2))
        assert_idle(engine)

    def test_br28_no_new_tokens_are_refused(self):
        with pytest.raises(ValueError, match="max_tokens must be an integer of at least 1, got 0"):
            SamplingParams(max_tokens=0)

    def test_the_models_own_limit_is_the_default(self, t_model, engine_for):
        assert engine_for(t_model).max_model_tokens == 256
        with pytest.raises(ValueError, match=r"max_model_tokens=257 .* 256"):
            engine_for(t_model, max_model_tokens=257)

    @pytest.mark.parametrize("length, new", [(17, 1), (9, 9)])
    def test_what_can_never_fit_is_refused_with_both_numbers(self, t_model, engine_for, assert_idle, length, new):
        engine = engine_for(t_model, pool_tokens=16)
        with pytest.raises(CapacityError, match=r"need 5 pages of 4 tokens, and the pool has 4.*at least 20"):
            engine.submit(tokens(length), SamplingParams(max_tokens=new, ignore_eos=True))
        assert_idle(engine)

    def test_pool_is_rounded_up_to_whole_pages(self, t_model, engine_for):
        assert engine_for(t_model, pool_tokens=17).stats().pages_total == 5
