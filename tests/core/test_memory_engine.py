"""The memory system under a real engine: whatever is evicted, demoted, restored or pinned, tokens stay the same.

Device and host pools begin full of NaN, and the engine checks itself after every step. BR numbers are those of public
bug reports.
"""

import logging

import pytest
import torch

from octavo.core import CapacityError, SamplingParams
from octavo.core.memory import host_tier
from octavo.core.policies import ALLOCATORS, EVICTIONS
from octavo.core.policies.lru_k import LruK
from octavo.kernels import ops
from octavo.scripts.build import method

from ..cells import covering
from .memory_traffic import GREEDY, TRAFFIC, alone, serve_traffic, step, tokens


@pytest.fixture(params=["t_model", "g_model"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(("allocator", "host_tokens", "eviction"), covering(ALLOCATORS, [600, 0], EVICTIONS))
def test_every_policy(
    allocator, host_tokens, eviction, request, host_tier_for, engine_for, drain, traffic_of, assert_nothing_held
):
    model = request.getfixturevalue("g_model" if (len(allocator) + len(eviction)) % 2 else "t_model")
    engine = host_tier_for(
        model, allocator=allocator, eviction=eviction, host_tokens=host_tokens, pool_tokens=100, max_seqs=3
    )
    assert serve_traffic(engine, drain) == traffic_of(model, engine_for)
    assert_nothing_held(engine)
    stats = engine.stats()
    assert stats.evictions > 20 and stats.hit_tokens > 50
    if host_tokens:
        assert engine._host.stored > 20 and engine._host.restored > 5 and stats.host_units_held > 20


FIELDS = {
    "tiny_host": {"host_tokens": 12},
    "small_host_3_unit_pages": {"host_tokens": 40, "page_tokens": 12},
    "roomy_host_small_steps": {"host_tokens": 2000, "page_tokens": 12, "step_tokens": 16},
    "elastic": {"host_tokens": 300, "base_share": 0.5, "growth_tokens": 12, "pool_tokens": 80},
    "eviction_object": {"host_tokens": 300, "eviction": LruK(k=3)},
}


@pytest.mark.parametrize(
    ("fields", "model", "backend"),
    covering(FIELDS, ["t_model", "g_model"], ["reference", "cpu"], together=2),
    indirect=["model"],
)
def test_traffic(model, backend, fields, host_tier_for, engine_for, drain, traffic_of, assert_nothing_held):
    fields = FIELDS[fields]
    engine = host_tier_for(model, **{"pool_tokens": 110, "max_seqs": 4, "backend": backend, **fields})
    host, both = engine._host, 0
    before = host.stored, host.restored

    def count(_):
        nonlocal both, before
        now = host.stored, host.restored
        both += now[0] > before[0] and now[1] > before[1]
        before = now

    assert serve_traffic(engine, drain, after_step=count) == traffic_of(model, engine_for)
    assert_nothing_held(engine)
    if fields["host_tokens"] > 200:
        assert both, "no step restored pages into the room of others that it gave up"
    else:
        assert host.evicted > 5


class Recorder:
    """Tokens computed by an engine, and how far each sequence was when it was preempted."""

    def __init__(self, engine):
        self.computed, self.preempted = 0, []
        run, preempt = engine._runner.run, engine._scheduler.preempt

        def recorded_run(plan, scheduler):
            self.computed += plan.tokens
            return run(plan, scheduler)

        def recorded_preempt(sequence):
            self.preempted.append(sequence.computed)
            preempt(sequence)

        engine._runner.run, engine._scheduler.preempt = recorded_run, recorded_preempt


class TestPreemption:
    @pytest.mark.parametrize("restored", [True, False], ids=["swap", "recompute"])
    def test_what_is_brought_back_is_not_computed_again(
        self, restored, t_model, host_tier_for, engine_for, drain, assert_nothing_held
    ):
        """Two requests of 9 + 14 tokens, 6 pages each, on 8 pages. When both have 4 pages, the later one is preempted;
        the earlier one takes two more of its pages, tail first, so that two are left on the device. Then the later one
        takes three of the five full pages that the earlier one leaves."""
        prompts = {"a": tokens(9), "b": tokens(9, 1)}
        engine = host_tier_for(t_model, restored=restored, pool_tokens=32, host_tokens=64)
        recorder = Recorder(engine)
        for name, prompt in prompts.items():
            engine.submit(prompt, SamplingParams(max_tokens=14, **GREEDY), request_id=name)
        drained = drain(engine)
        for name, prompt in prompts.items():
            assert drained.tokens_of(name) == alone(engine_for, t_model, prompt, max_tokens=14)
        assert recorder.preempted == [16] and engine.stats().preemptions == 1
        assert (engine._host.stored, engine._host.restored) == ((5, 2) if restored else (0, 0))
        assert engine.stats().hit_tokens == (16 if restored else 8)
        assert recorder.computed == 2 * 22 + 16 - engine.stats().hit_tokens
        assert_nothing_held(engine)

    def test_the_head_of_a_chain_is_kept_for_what_stands_behind_it(
        self, model, host_tier_for, engine_for, give_everything_up, assert_nothing_held
    ):
        """Pages at position 8 and later are worth keeping, and could not be reached if the two before them were gone;
        a chain of which nothing is worth keeping is not kept."""
        engine = host_tier_for(model, host_tokens=400)
        engine.costs.restore_is_cheaper = lambda nbytes, tokens, position: position >= 8
        prompt = tokens(25)
        engine.generate([prompt, tokens(8, 1)], SamplingParams(max_tokens=1))
        give_everything_up(engine)
        assert len(engine._host) == (6 if len(engine._plan.groups) == 1 else 6 + 4)
        completion = engine.generate([prompt], SamplingParams(max_tokens=5, **GREEDY))[0]
        assert completion.cached_tokens == 24
        assert completion.samples[0].token_ids == alone(engine_for, model, prompt, max_tokens=5)
        assert_nothing_held(engine)

    @pytest.mark.parametrize("pages", [5, 6])
    def test_br07_what_must_fit_counts_the_pending_token(
        self, pages, t_model, host_tier_for, engine_for, drain, give_everything_up, assert_nothing_held
    ):
        """A sequence with 8 stored tokens and 1 pending is in the host tier; a request holds 3 pages for 4 steps."""
        prompt = tokens(8)
        engine = host_tier_for(t_model, pool_tokens=4 * pages, host_tokens=64, max_seqs=2)
        engine.submit(prompt, SamplingParams(max_tokens=6, **GREEDY), request_id="s")
        engine.step()
        (sequence,) = engine._scheduler.running
        assert (sequence.computed, len(sequence.tokens)) == (8, 9)
        engine._scheduler.preempt(sequence)
        give_everything_up(engine)
        assert engine._host.stored == 2 and not any(node for node in engine._pool.index._of_page)
        engine.submit(tokens(9, 1), SamplingParams(max_tokens=4, **GREEDY), request_id="long", priority=1)
        step(engine)
        for _ in range(3):
            assert engine._pool.available == (2 if pages == 5 else 0)
            assert sequence.computed == (0 if pages == 5 else sequence.computed) and "long" in engine._requests
            assert (sequence in engine._scheduler.waiting) == (pages == 5)
            assert engine._host.restored == (0 if pages == 5 else 2)
            step(engine)
        drained = drain(engine)
        assert engine._host.restored == 2 and engine.stats().hit_tokens == 8
        assert drained.completions["s"].samples[0].token_ids == alone(engine_for, t_model, prompt, max_tokens=6)
        assert_nothing_held(engine)

    def test_one_whose_copy_on_write_was_planned(self, t_model, host_tier_for, engine_for, drain, give_everything_up):
        """Of two samples that share their last page, one is preempted after its copy was planned; a request that had
        waited longer is admitted, and what it brings back from the host comes into the page that was to be written."""
        shared, back = tokens(6, 1), tokens(9, 2)
        engine = host_tier_for(t_model, host_tokens=64)
        engine.generate([back], SamplingParams(max_tokens=1))
        give_everything_up(engine)
        hot = {"n": 2, "max_tokens": 4, "temperature": 0.9, "seed": 3}
        engine.submit(shared, SamplingParams(**hot, **GREEDY), request_id="shared")
        step(engine)
        scheduler, targets = engine._scheduler, []
        place = scheduler._place

        def place_and_preempt(sequence, count, plan):
            place(sequence, count, plan)
            if plan.copies and not targets:
                targets.append(int(plan.copies[0][0, 1]))
                scheduler._preempt(sequence, plan)

        scheduler._place = place_and_preempt
        engine.submit(back, SamplingParams(max_tokens=4, **GREEDY), request_id="back")
        engine._requests["back"].arrival = -1
        step(engine)
        assert targets[0] in engine._requests["back"].sequences[0].table.pages(0, 2) and engine._host.restored == 2
        drained = drain(engine)
        samples = drained.completions["shared"].samples
        assert [sample.token_ids for sample in samples] == alone(engine_for, t_model, shared, **hot)
        tokens_of_back = drained.completions["back"].samples[0].token_ids
        assert tokens_of_back == alone(engine_for, t_model, back, max_tokens=4)


class TestLongRows:
    @pytest.mark.parametrize("count", [1, 5])
    def test_br55_positions_are_logical_after_pages_have_gone(self, count, g_model, host_tier_for, engine_for):
        """The window of 8 has passed pages of 32 tokens; then one token, or five at once, see what they should."""
        history, more = tokens(32), tokens(count, 1)
        entries = {}
        for grouped in (True, False):
            build = host_tier_for if grouped else engine_for
            engine = build(g_model, layer_groups=grouped, max_model_tokens=48, host_tokens=64 if grouped else 0)
            session = engine.session(history)
            session.generate(SamplingParams(max_tokens=2, **GREEDY))
            session.append(more)
            if grouped:
                (sequence,) = engine._scheduler.parked
                assert sequence.tables[1].first_page == 6 and len(session.tokens) == 34 + count
                with pytest.raises(CapacityError, match=f"{34 + count} tokens and 20 new ones"):
                    session.submit(SamplingParams(max_tokens=20, **GREEDY))
            entries[grouped] = session.generate(SamplingParams(max_tokens=3, logprobs=128, **GREEDY)).samples[0]
            engine.check()
        assert entries[True].token_ids == entries[False].token_ids
        for one, other in zip(entries[True].logprobs, entries[False].logprobs, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def page_contents(engine, sequence, pages):
    """KV of the first pages of a sequence in every group of layers, as bits; holes are left out."""
    contents = []
    for table in sequence.tables:
        units = table.entries(table.first_page, pages, sequence.layout).ravel()
        contents.append(engine._runner.kv[torch.from_numpy(units.astype("int64"))].view(torch.int32))
    return contents


class TestSessions:
    def test_an_idle_session_comes_back_bit_by_bit(self, model, host_tier_for, give_everything_up):
        contents, answers, hits = [], [], []
        for disturbed in (False, True):
            engine = host_tier_for(model, pool_tokens=80, host_tokens=400)
            session = engine.session(tokens(22))
            session.generate(SamplingParams(max_tokens=5, **GREEDY))
            if disturbed:
                engine.generate([tokens(38, 1), tokens(36, 2)], SamplingParams(max_tokens=3, **GREEDY))
                assert session._parked not in engine._scheduler.parked and engine._host.stored > 0
                give_everything_up(engine)
            session.append(tokens(3, 3))
            turn = session.submit(SamplingParams(max_tokens=4, **GREEDY))
            step(engine)
            (sequence,) = engine._scheduler.running
            contents.append(page_contents(engine, sequence, 6))
            answers.append(engine.finish([turn])[turn].samples[0].token_ids)
            hits.append(engine._host.restored)
            engine.check()
        assert hits[0] == 0 and hits[1] >= 6
        assert answers[0] == answers[1]
        for one, other in zip(*contents, strict=True):
            common = min(len(one), len(other))
            assert common and torch.equal(one[len(one) - common :], other[len(other) - common :])

    def test_forks_and_samples_of_restored_pages(
        self, model, host_tier_for, engine_for, give_everything_up, assert_nothing_held
    ):
        prompt, hot = tokens(19), {"n": 3, "max_tokens": 6, "temperature": 0.9, "seed": 5}
        engine = host_tier_for(model, pool_tokens=100, host_tokens=400)
        session = engine.session(prompt)
        first = session.generate(SamplingParams(max_tokens=4, **GREEDY))
        engine.generate([tokens(60, 1), tokens(70, 2)], SamplingParams(max_tokens=3, **GREEDY))
        give_everything_up(engine)
        completion = engine.generate([prompt], SamplingParams(**hot, **GREEDY))[0]
        assert completion.cached_tokens == 16 and engine._host.restored >= 4
        assert [sample.token_ids for sample in completion.samples] == alone(engine_for, model, prompt, **hot)
        give_everything_up(engine)
        twin = session.fork()
        for each, more in ((session, tokens(2, 7)), (twin, tokens(3, 4))):
            each.append(more)
            history = each.tokens.copy()
            assert history == prompt + first.samples[0].token_ids + more
            done = each.generate(SamplingParams(max_tokens=5, **GREEDY))
            assert done.cached_tokens == 20
            assert done.samples[0].token_ids == alone(engine_for, model, history, max_tokens=5)
            engine.check()
        session.close()
        twin.close()
        assert_nothing_held(engine)

    def test_sparse_pages_come_back_for_their_own_kind_only(
        self, t_model, host_tier_for, engine_for, give_everything_up
    ):
        sparse = method("quest", budget_tokens=12, keep={"sink_tokens": 4, "recent_tokens": 0}, dense_layers=[])
        prompt, more, params = tokens(18), tokens(3, 1), SamplingParams(max_tokens=7, **GREEDY)
        answers = []
        for disturbed in (False, True):
            engine = host_tier_for(t_model, pool_tokens=64, host_tokens=400)
            session = engine.session(prompt, method=sparse)
            session.generate(params)
            if disturbed:
                engine.generate([tokens(60, 2)], SamplingParams(max_tokens=3, **GREEDY))
                give_everything_up(engine)
            history = session.tokens.copy()
            session.append(more)
            turn = session.generate(params)
            answers.append(turn.samples[0].token_ids)
            if disturbed:
                assert turn.cached_tokens == 24 and engine._host.restored == 6
                give_everything_up(engine)
                dense = engine.generate([history + more], params)[0]
                assert dense.cached_tokens == 16
                assert dense.samples[0].token_ids == alone(engine_for, t_model, history + more, max_tokens=7)
            engine.check()
        assert answers[0] == answers[1]


class FailingBus:
    """Transfers one way ("out", "in"), of which the ``number``-th (from 1) raises, once."""

    def __init__(self, engine, way, number, monkeypatch):
        self.left, self.failed = number, False
        transfer = ops.transfer

        def fragile(source, target, pairs, backend):
            if way == ("out" if target is engine._host.kv else "in"):
                self.left -= 1
                if self.left == 0:
                    self.failed = True
                    raise RuntimeError("the bus is gone")
            transfer(source, target, pairs, backend)

        monkeypatch.setattr(host_tier.ops, "transfer", fragile)


@pytest.mark.parametrize(
    ("way", "number", "model"),
    covering(["out", "in"], [1, 2], ["t_model", "g_model"], together=2),
    indirect=["model"],
)
class TestFailingTransfer:
    def test_the_engine_goes_on(
        self, way, number, model, host_tier_for, engine_for, traffic_of, monkeypatch, assert_nothing_held
    ):
        engine = host_tier_for(model, pool_tokens=100, max_seqs=3, host_tokens=300)
        bus = FailingBus(engine, way, number, monkeypatch)
        ids = [engine.submit(prompt, SamplingParams(max_tokens=7, **GREEDY)) for prompt in TRAFFIC]
        got, errors = {}, 0
        while engine.has_work():
            try:
                news = step(engine)
            except RuntimeError:
                engine.check()
                errors += 1
                continue
            got |= {out.request_id: out.completion.samples[0].token_ids for out in news if out.completion}
        assert bus.failed and errors == 1
        assert [got[request_id] for request_id in ids] == traffic_of(model, engine_for)
        assert_nothing_held(engine)

    def test_requests_are_aborted_before_their_pages_came(
        self, way, number, model, host_tier_for, engine_for, traffic_of, monkeypatch, assert_nothing_held
    ):
        """Whoever computes after the failure loses its request; the others, and the same prompts later, go on."""
        engine = host_tier_for(model, pool_tokens=100, max_seqs=3, host_tokens=300)
        bus = FailingBus(engine, way, number, monkeypatch)
        ids = [engine.submit(prompt, SamplingParams(max_tokens=7, **GREEDY)) for prompt in TRAFFIC]
        got, aborted = {}, []
        while engine.has_work():
            try:
                news = step(engine)
            except RuntimeError:
                aborted = [s.request.request_id for s in engine._scheduler.running]
                for request_id in aborted[::2]:
                    engine.abort(request_id)
                    engine.check()
                aborted = aborted[::2]
                continue
            got |= {out.request_id: out.completion.samples[0].token_ids for out in news if out.completion}
        assert bus.failed and aborted
        expected = traffic_of(model, engine_for)
        for request_id, wanted in zip(ids, expected, strict=True):
            assert got[request_id] == (wanted[: len(got[request_id])] if request_id in aborted else wanted)
        assert_nothing_held(engine)
        again = engine.generate(TRAFFIC, SamplingParams(max_tokens=7, **GREEDY))
        assert [completion.samples[0].token_ids for completion in again] == expected
        assert_nothing_held(engine)


class TestPinned:
    """Pages of requests of priority 100 stay for ever under eviction="priority"."""

    def pinned(self, engine, prompt):
        request_id = engine.submit(prompt, SamplingParams(max_tokens=1), priority=100)
        engine.finish([request_id])
        engine.check()

    def test_others_run_in_what_is_left(self, t_model, host_tier_for, engine_for, drain, assert_nothing_held):
        engine = host_tier_for(t_model, eviction="priority", pool_tokens=40)
        self.pinned(engine, tokens(20))
        assert engine._pool.available == 5
        prompts = [tokens(9, seed) for seed in (1, 2, 3)]
        ids = [engine.submit(prompt, SamplingParams(max_tokens=6, **GREEDY)) for prompt in prompts]
        drained = drain(engine)
        for request_id, prompt in zip(ids, prompts, strict=True):
            assert drained.tokens_of(request_id) == alone(engine_for, t_model, prompt, max_tokens=6)
        assert engine.generate([tokens(20)], SamplingParams(max_tokens=1))[0].cached_tokens == 16
        assert_nothing_held(engine)

    @pytest.mark.parametrize(("prompt_tokens", "available"), [(9, 0), (21, 5)], ids=["prompt_fits", "prompt_does_not"])
    def test_one_that_cannot_have_enough_ends(
        self, prompt_tokens, available, t_model, host_tier_for, drain, caplog, assert_nothing_held
    ):
        engine = host_tier_for(t_model, eviction="priority", pool_tokens=40)
        self.pinned(engine, tokens(20))
        with caplog.at_level(logging.WARNING):
            request_id = engine.submit(tokens(prompt_tokens, 1), SamplingParams(max_tokens=19, **GREEDY))
            drained = drain(engine, limit=60)
        assert drained.completions[request_id].samples[0].finish_reason == "capacity"
        assert (
            f"request {request_id!r}, sample 0, ends" in caplog.text and f"{available} of 10 can be had" in caplog.text
        )
        assert "cached 5 (5 of them pinned)" in caplog.text
        assert_nothing_held(engine)

    def test_all_samples_of_one_that_cannot_have_enough_end(self, t_model, host_tier_for, drain, assert_nothing_held):
        engine = host_tier_for(t_model, eviction="priority", pool_tokens=40)
        self.pinned(engine, tokens(20))
        request_id = engine.submit(tokens(21, 1), SamplingParams(n=3, max_tokens=2, **GREEDY))
        drained = drain(engine, limit=60)
        assert [s.finish_reason for s in drained.completions[request_id].samples] == ["capacity"]
        assert_nothing_held(engine)

    def test_a_score_that_cannot_have_enough_says_so(self, t_model, host_tier_for, assert_nothing_held):
        engine = host_tier_for(t_model, eviction="priority", pool_tokens=40)
        self.pinned(engine, tokens(20))
        with pytest.raises(CapacityError, match="could not be scored: the pool has 10 units, and 5 of them are pinned"):
            engine.score(tokens(21, 1), [5, 6])
        assert_nothing_held(engine)

    def test_a_prefix_that_is_pinned_is_there_to_be_hit(self, t_model, host_tier_for, engine_for, assert_nothing_held):
        """8 of 10 pages are pinned, and the request needs them and the other two."""
        engine = host_tier_for(t_model, eviction="priority", pool_tokens=40)
        self.pinned(engine, tokens(32))
        prompt = tokens(32) + tokens(3, 1)
        completion = engine.generate([prompt], SamplingParams(max_tokens=5, **GREEDY))[0]
        assert completion.cached_tokens == 32
        assert completion.samples[0].token_ids == alone(engine_for, t_model, prompt, max_tokens=5)
        assert_nothing_held(engine)

    @pytest.mark.parametrize("host_tokens", [0, 40])
    def test_pages_of_those_to_be_preempted_may_be_pinned(
        self, host_tokens, t_model, host_tier_for, engine_for, drain, assert_nothing_held
    ):
        """A request of priority 101 would have to take pages that stay when their request of priority 100 goes."""
        engine = host_tier_for(t_model, eviction="priority", pool_tokens=40, host_tokens=host_tokens)
        engine.submit(tokens(24), SamplingParams(max_tokens=5, **GREEDY), priority=100, request_id="pinned")
        step(engine)
        engine.submit(tokens(20, 1), SamplingParams(max_tokens=5, **GREEDY), priority=101, request_id="refused")
        drained = drain(engine, limit=60)
        assert drained.completions["refused"].samples[0].finish_reason == "capacity"
        wanted = alone(engine_for, t_model, tokens(24), max_tokens=5)
        assert drained.completions["pinned"].samples[0].token_ids == wanted
        assert engine.stats().preemptions == 0
        assert_nothing_held(engine)

    def test_an_idle_session_is_pinned_too(self, t_model, host_tier_for, drain, assert_nothing_held):
        engine = host_tier_for(t_model, eviction="priority", pool_tokens=40)
        session = engine.session(tokens(24))
        turn = session.submit(SamplingParams(max_tokens=1), priority=100)
        engine.finish([turn])
        engine.submit(tokens(20, 1), SamplingParams(max_tokens=2, **GREEDY), request_id="refused")
        drained = drain(engine, limit=60)
        assert drained.completions["refused"].samples[0].finish_reason == "capacity"
        assert session._parked in engine._scheduler.parked
        session.close()
        assert_nothing_held(engine)
