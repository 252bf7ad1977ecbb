"""Preemption, page by page: who goes, what is kept, and that tokens stay the same. BR numbers are those of public bug
reports."""

import pytest

from octavo.core import SamplingParams

from .scheduler_cases import GREEDY, alone, record_plans, tokens


class TestPreemption:
    def test_br10_samples_survive_preemption(self, t_model, engine_for, drain, assert_idle):
        params = {"n": 4, "temperature": 0.9, "max_tokens": 24, **GREEDY}
        prompts = [tokens(16, 1), tokens(16, 2)]
        tight, roomy = engine_for(t_model, pool_tokens=144), engine_for(t_model)
        for engine in (tight, roomy):
            for number, prompt in enumerate(prompts):
                engine.submit(prompt, SamplingParams(seed=10 * number, **params), request_id=str(number))
        got, expected = drain(tight), drain(roomy)
        assert tight.stats().preemptions > 0 and roomy.stats().preemptions == 0
        for number in "01":
            assert got.tokens_of(number) == expected.tokens_of(number)
        assert_idle(tight)

    def test_one_group_alone_peaks_at_28_pages(self, t_model, engine_for):
        engine = engine_for(t_model, pool_tokens=28 * 4)
        engine.generate([tokens(16)], SamplingParams(n=4, temperature=0.9, seed=1, max_tokens=24, **GREEDY))
        assert engine.stats().units_held_peak == 28 and engine.stats().preemptions == 0

    def test_br22_no_id_is_scheduled_and_preempted_in_one_step(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model, pool_tokens=48, step_tokens=16)
        low = {str(i): tokens(8, i) for i in range(4)}
        for request_id, prompt in low.items():
            engine.submit(prompt, SamplingParams(max_tokens=8, **GREEDY), request_id=request_id)
        plans = record_plans(engine)
        for _ in range(4):
            assert not any(out.completion for out in engine.step())
        assert engine.stats().running == 4
        high = tokens(12, 9)
        engine.submit(high, SamplingParams(max_tokens=2, **GREEDY), request_id="high", priority=1)
        computed = {}

        def all_advance(_):
            scheduled, preempted = plans[-1]
            ids = [request_id for request_id, _ in scheduled]
            assert not set(ids) & set(preempted) and len(set(ids)) == len(ids)
            assert sum(count for _, count in scheduled) <= 16
            now = {s.request.request_id: s.computed for s in engine._scheduler.running}
            for request_id, before in computed.items():
                assert request_id in preempted or request_id not in now or now[request_id] > before
            computed.clear()
            computed.update(now)

        drained = drain(engine, all_advance)
        assert drained.order[0] == "high" and engine.stats().preemptions > 0
        assert drained.tokens_of("high") == alone(engine_for, t_model, high, max_tokens=2, **GREEDY)
        for request_id, prompt in low.items():
            assert drained.tokens_of(request_id) == alone(engine_for, t_model, prompt, max_tokens=8, **GREEDY)
        assert_idle(engine)

    def test_the_latest_of_the_lowest_priority_is_the_victim(self, t_model, engine_for, drain):
        engine = engine_for(t_model, pool_tokens=32)
        for request_id, priority in [("b", 0), ("a", 1), ("c", 0)]:
            engine.submit(tokens(8, ord(request_id)), SamplingParams(max_tokens=8, **GREEDY), request_id=request_id,
                          priority=priority)  # fmt: skip
        plans = record_plans(engine)
        drained = drain(engine)
        assert next(victim for _, preempted in plans for victim in preempted) == "c"
        assert drained.order == ["a", "b", "c"]

    def test_nobody_is_preempted_while_there_is_room(self, t_model, engine_for, drain):
        engine = engine_for(t_model)
        engine.submit(tokens(8), SamplingParams(max_tokens=8, **GREEDY), request_id="low")
        engine.step()
        engine.submit(tokens(8, 1), SamplingParams(max_tokens=2, **GREEDY), request_id="high", priority=5)
        drain(engine)
        assert engine.stats().preemptions == 0

    def test_priority_takes_a_place_among_max_seqs(self, t_model, engine_for, drain):
        engine = engine_for(t_model, max_seqs=2)
        for request_id in "ab":
            engine.submit(tokens(5, ord(request_id)), SamplingParams(max_tokens=8, **GREEDY), request_id=request_id)
        engine.step()
        engine.submit(tokens(5), SamplingParams(max_tokens=2, **GREEDY), request_id="high", priority=1)
        drained = drain(engine)
        assert drained.order == ["high", "a", "b"] and engine.stats().preemptions == 1
        assert engine.stats().running_peak == 2

    @pytest.mark.parametrize("step_tokens", [1, 2])
    def test_priority_comes_before_running_requests_in_a_small_step(self, t_model, engine_for, drain, step_tokens):
        engine = engine_for(t_model, step_tokens=step_tokens)
        for request_id in "ab":
            engine.submit(tokens(2, ord(request_id)), SamplingParams(max_tokens=30, **GREEDY), request_id=request_id)
        for _ in range(6):
            engine.step()
        engine.submit(tokens(2), SamplingParams(max_tokens=2, **GREEDY), request_id="high", priority=1)
        assert drain(engine).order[0] == "high"

    def test_a_preempted_request_finds_its_own_pages(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model, pool_tokens=64)
        a, b = tokens(21, 1), tokens(21, 2)
        for request_id, prompt in [("a", a), ("b", b)]:
            engine.submit(prompt, SamplingParams(max_tokens=20, **GREEDY), request_id=request_id)
        drained = drain(engine)
        assert engine.stats().preemptions > 0 and engine.stats().hit_tokens > 0
        assert drained.completions["b"].cached_tokens == 0  # of the first admission
        for request_id, prompt in [("a", a), ("b", b)]:
            assert drained.tokens_of(request_id) == alone(engine_for, t_model, prompt, max_tokens=20, **GREEDY)
        assert_idle(engine)

    def test_capacity_ends_the_last_one_standing(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model, pool_tokens=16)
        engine.submit(tokens(9), SamplingParams(max_tokens=50, min_tokens=1), request_id="a")
        completion = drain(engine).completions["a"]
        sample = completion.samples[0]
        assert sample.finish_reason == "capacity" and len(sample.token_ids) == 16 - 9 + 1
        expected = alone(engine_for, t_model, tokens(9), max_tokens=50, min_tokens=1)
        assert sample.token_ids == expected[: len(sample.token_ids)]
        assert_idle(engine)

    @pytest.mark.parametrize("page_tokens, length, pool_tokens", [(2, 1, 17), (2, 5, 21), (4, 3, 17), (4, 5, 25)])
    def test_a_victim_that_was_served_already_leaves_the_plan(
        self, t_model, engine_for, drain, assert_idle, page_tokens, length, pool_tokens
    ):
        # Two tokens a step among three samples: the youngest is at times served before the oldest needs its page.
        params = {"n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 12, **GREEDY}
        engine = engine_for(
            t_model, page_tokens=page_tokens, pool_tokens=pool_tokens, step_tokens=2, prefix_cache=False
        )
        engine.submit(tokens(length), SamplingParams(**params), request_id="a")
        late, preempt = [], engine._scheduler._preempt

        def spy(sequence, plan):
            late.append(any(chunk.sequence is sequence for chunk in plan.chunks))
            preempt(sequence, plan)
            assert not any(chunk.sequence is sequence for chunk in plan.chunks)

        engine._scheduler._preempt = spy
        assert drain(engine).tokens_of("a") == alone(engine_for, t_model, tokens(length), **params)
        assert any(late)
        assert_idle(engine)

    @pytest.mark.parametrize("pool_tokens", [8, 12, 16])
    def test_a_copy_on_write_counts_as_a_page(self, t_model, engine_for, drain, assert_idle, pool_tokens):
        params = {"n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 3, **GREEDY}
        engine = engine_for(t_model, pool_tokens=pool_tokens)
        engine.submit(tokens(6), SamplingParams(**params), request_id="a")
        assert drain(engine).tokens_of("a") == alone(engine_for, t_model, tokens(6), **params)
        assert (engine.stats().preemptions > 0) == (pool_tokens < 16)
        assert_idle(engine)

    def test_nobody_is_admitted_ahead_of_a_victim(self, t_model, engine_for, drain):
        engine = engine_for(t_model, pool_tokens=28)
        for request_id, length in [("a", 12), ("b", 15), ("c", 3)]:
            engine.submit(tokens(length, length), SamplingParams(max_tokens=6, **GREEDY), request_id=request_id)
        plans = record_plans(engine)
        drain(engine)
        at = next(number for number, (_, preempted) in enumerate(plans) if preempted)
        assert plans[at] == ([("a", 1)], ["b"])
        first_served = list(dict.fromkeys(request_id for scheduled, _ in plans for request_id, _ in scheduled))
        assert first_served == ["a", "b", "c"]
