"""Memory that grows under a real engine: before anything is evicted, as far as it can be had, with the same tokens."""

import logging
from typing import ClassVar

import pytest

from octavo.core import SamplingParams
from octavo.core.memory.virtual_memory import DriverError

from .memory_traffic import GREEDY, alone, serve_traffic, step, tokens


@pytest.fixture(params=["t_model", "g_model"])
def model(request):
    return request.getfixturevalue(request.param)


class TestElastic:
    FIELDS: ClassVar = {"pool_tokens": 96, "base_share": 0.25, "growth_tokens": 20, "max_seqs": 4}

    def test_it_grows_before_anything_is_evicted(self, model, host_tier_for, engine_for, drain, assert_nothing_held):
        engine = host_tier_for(model, **self.FIELDS)
        assert engine.stats().units_total == engine._memory.base_units < engine._memory.max_units
        for seed in range(3):
            prompt = tokens(12, seed)
            request_id = engine.submit(prompt, SamplingParams(max_tokens=6, **GREEDY))
            assert drain(engine).tokens_of(request_id) == alone(engine_for, model, prompt, max_tokens=6)
            assert engine.stats().evictions == 0 and engine.stats().units_total == engine._memory.units
        assert engine.stats().units_total > engine._memory.base_units
        engine.generate([tokens(90, 9), tokens(90, 10)], SamplingParams(max_tokens=2))
        assert engine.stats().units_total == engine._memory.max_units and engine.stats().evictions > 0
        assert_nothing_held(engine)

    @pytest.mark.parametrize("failing_from", [1, 2])
    def test_a_growth_that_fails_falls_back_to_eviction(
        self,
        failing_from,
        model,
        host_tier_for,
        engine_for,
        drain,
        traffic_of,
        monkeypatch,
        caplog,
        assert_nothing_held,
    ):
        engine = host_tier_for(model, **{**self.FIELDS, "pool_tokens": 400, "max_seqs": 3})
        grow, calls = engine._memory.grow, []

        def exhausted(units):
            calls.append(units)
            if len(calls) >= failing_from:
                raise DriverError("out of memory", "CUDA_ERROR_OUT_OF_MEMORY")
            return grow(units)

        monkeypatch.setattr(engine._memory, "grow", exhausted)
        with caplog.at_level(logging.WARNING):
            assert serve_traffic(engine, drain) == traffic_of(model, engine_for)
        assert "cannot grow beyond" in caplog.text and "out of memory" in caplog.text
        assert len(calls) == failing_from, "it asks again for what it did not get"
        assert engine.stats().evictions > 0 and engine._pool.growable == 0
        assert_nothing_held(engine)

    def test_an_admission_that_counted_on_growth_is_refused(
        self, t_model, host_tier_for, engine_for, drain, monkeypatch, assert_nothing_held
    ):
        """16 pages, 4 of them there. The first request holds 3 when the second one asks for 4."""
        engine = host_tier_for(t_model, pool_tokens=64, base_share=0.25, growth_tokens=16)

        def exhausted(units):
            raise DriverError("out of memory", "CUDA_ERROR_OUT_OF_MEMORY")

        monkeypatch.setattr(engine._memory, "grow", exhausted)
        prompts = [tokens(9), tokens(13, 1)]
        ids = [engine.submit(prompts[0], SamplingParams(max_tokens=3, **GREEDY))]
        step(engine)
        ids.append(engine.submit(prompts[1], SamplingParams(max_tokens=3, **GREEDY)))
        drained = drain(engine)
        for request_id, prompt in zip(ids, prompts, strict=True):
            wanted = alone(engine_for, t_model, prompt, max_tokens=3)
            assert drained.completions[request_id].samples[0].token_ids == wanted
        assert engine.stats().preemptions == 0
        assert_nothing_held(engine)

    def test_it_shrinks_to_its_base_and_grows_again(self, model, host_tier_for, engine_for, give_everything_up):
        """A base of 6 pages, chunks of 5 and a last one of 3: 6, 11, 16, 21, 24 pages."""
        engine = host_tier_for(model, **self.FIELDS)
        memory, prompt = engine._memory, tokens(90)
        expected = alone(engine_for, model, prompt, max_tokens=3)
        for _ in range(2):
            assert engine.stats().units_total == memory.base_units
            got = engine.generate([prompt], SamplingParams(max_tokens=3, **GREEDY))[0].samples[0].token_ids
            assert got == expected and engine.stats().units_total == memory.max_units
            assert engine.shrink() == 0, "idle pages were given up"
            give_everything_up(engine)
            assert engine.shrink() >= 0
            assert engine.stats().units_total == memory.units == memory.base_units
            assert engine._pool.growable == memory.max_units - memory.base_units
            engine.check()

    @pytest.mark.parametrize("held", range(6, 25))
    def test_pool_and_memory_agree_on_what_is_left(self, held, t_model, host_tier_for):
        engine = host_tier_for(t_model, **self.FIELDS, allocator="linear")
        pool, memory = engine._pool, engine._memory
        pool.prepare(24)
        pages = pool.allocate(24)
        pool.release(pages[held:])
        engine.shrink()
        left = next(units for units in (6, 11, 16, 21, 24) if units >= held)
        assert (pool.total_units, memory.units, pool.growable) == (left, left, 24 - left)
        pool.release(pages[:held])
        pool.prepare(24)
        assert (pool.total_units, memory.units, pool.growable, pool.free_units) == (24, 24, 0, 24)
        pool.check()
