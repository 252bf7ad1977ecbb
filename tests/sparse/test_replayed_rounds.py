"""Rounds of drafts that the device replays: steps that decode drafts and the one that verifies them."""

import cProfile
import pstats
from dataclasses import replace

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.execution.decode_program import Variant
from octavo.core.inspection.trace_recorder import TraceRecorder
from octavo.kernels import ops
from octavo.sparse.lossless import Lossless

from .method_cases import PROMPT, make

LONG = SamplingParams(max_tokens=26, ignore_eos=True)
DRAWN = replace(LONG, temperature=0.9, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


def lossless(name="random", drafts=3, budget=12, forced=None, **parts):
    return Lossless(make(name, budget, **parts), drafts, forced)


def watched(engine):
    """What each step of an engine is from now on: a batch that decodes, one that verifies, or launched by the host,
    with the tokens of its chunks."""
    steps, program, runner = [], engine._runner._program, engine._runner
    replay, run = program._replay, runner.run
    program._replay = lambda variant: steps.append("verify" if variant.places else "decode") or replay(variant)
    runner.run = lambda plan, scheduler: steps.append([chunk.count for chunk in plan.chunks]) or run(plan, scheduler)
    return steps


def serve(engine, drain, requests, after_step=None):
    ids = [engine.submit(prompt, params, method=method) for prompt, params, method in requests]
    completions = drain(engine, after_step).completions
    return [completions[request_id].samples for request_id in ids]


def dense(requests):
    return [(prompt, params, None) for prompt, params, _ in requests]


def said(samples):
    return [[(s.token_ids, s.finish_reason, s.text) for s in each] for each in samples]


class TestRounds:
    @pytest.mark.parametrize("name", ["model", "g_model"])
    @pytest.mark.parametrize("fields", [{}, {"backend": "cpu"}, {"page_tokens": 6}, {"host_tokens": 80}], ids=str)
    def test_nothing_but_prompts_is_launched_by_the_host(self, fields, name, request, engine_for, drain, assert_idle):
        """And all that is counted is counted as it is where the host launches every step."""
        model = request.getfixturevalue(name)
        chosen = lossless(
            "quest", 4, 24 if "page_tokens" in fields else 12, dense_layers=[0] if name == "model" else []
        )
        requests = [(PROMPT, LONG, chosen), (PROMPT[:31], DRAWN, chosen), (PROMPT[:38], LONG, chosen)]
        replayed = engine_for(model, execution="graph", **fields)
        steps = watched(replayed)
        got = serve(replayed, drain, requests)
        assert got == serve(engine_for(model, **fields), drain, requests)
        assert said(got) == said(serve(engine_for(model), drain, dense(requests)))
        first = steps.index("verify")
        assert all(isinstance(step, str) for step in steps[first:]), str(steps)
        assert steps[first : first + 6] == ["verify", *["decode"] * 4, "verify"]
        assert got[0][0].drafts.accepted > 0 and got[0][0].drafts.rejected > 0
        assert_idle(replayed)

    @pytest.mark.parametrize("drafts", [1, 2, 9, 40])
    def test_of_any_length(self, drafts, model, engine_for, drain):
        requests = [(PROMPT, LONG, lossless("quest", drafts)), (PROMPT[:30], DRAWN, lossless("quest", drafts))]
        replayed = engine_for(model, execution="graph", step_tokens=100)
        steps = watched(replayed)
        assert said(serve(replayed, drain, requests)) == said(serve(engine_for(model), drain, dense(requests)))
        assert "verify" in steps

    def test_samples_share_their_prompt_and_run_short_of_room(self, model, engine_for, drain, assert_idle):
        requests = [
            (PROMPT, replace(DRAWN, n=3, ignore_eos=True), lossless(drafts=5)),
            (PROMPT[:40], replace(LONG, max_tokens=31), lossless(drafts=5)),
        ]
        for fields in ({}, {"pool_tokens": 132, "max_seqs": 4}, {"max_seqs": 3}):
            replayed = engine_for(model, execution="graph", **fields)
            steps = watched(replayed)
            assert said(serve(replayed, drain, requests)) == said(serve(engine_for(model), drain, dense(requests)))
            assert "verify" in steps
            assert ("pool_tokens" in fields) == (replayed.stats().preemptions > 0)
            assert_idle(replayed)

    def test_somebody_waits_all_the_while(self, model, engine_for, drain, assert_idle):
        """The scheduler plans each step, and rounds are replayed all the same."""
        requests = [(PROMPT[: 45 - 4 * i], DRAWN if i % 2 else LONG, lossless(drafts=4)) for i in range(5)]
        replayed = engine_for(model, execution="graph", max_seqs=2)
        steps = watched(replayed)
        assert said(serve(replayed, drain, requests)) == said(serve(engine_for(model), drain, dense(requests)))
        assert steps.count("verify") > 20
        assert not [step for step in steps if isinstance(step, list) and min(step) > 1 and max(step) <= 5]
        assert_idle(replayed)

    def test_dense_sequences_take_part(self, model, engine_for, drain):
        """One that ends in between, too; a token of each in a step that verifies."""
        requests = [
            (PROMPT, LONG, lossless()),
            (PROMPT[:30], replace(DRAWN, max_tokens=12), None),
            (PROMPT[:37], LONG, lossless()),
            (PROMPT[:20], replace(LONG, max_tokens=40), None),
        ]
        replayed = engine_for(model, execution="graph")
        steps = watched(replayed)
        got = serve(replayed, drain, requests)
        assert said(got) == said(serve(engine_for(model), drain, dense(requests)))
        assert all(isinstance(step, str) for step in steps[steps.index("verify") :])
        alone = serve(engine_for(model), drain, [requests[3]])
        assert (got[3][0].decode_steps, got[3][0].kv_bytes_read) == (39, alone[0][0].kv_bytes_read)

    @pytest.mark.parametrize("stop", range(6, 22, 3))
    def test_one_ends_in_the_middle_of_a_round(self, stop, make_chain, engine_for, drain, assert_idle):
        """All drafts are right on this model; those behind the end have never been."""
        model = make_chain(60)
        chosen = lossless("streaming", 5, 8, keep={"sink_tokens": 4, "recent_tokens": 0}, dense_layers=[])
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        requests = [([5] * 20, replace(params, stop_token_ids=(stop,)), chosen), ([9] * 22, params, chosen)]
        found = []
        for execution in ("eager", "graph"):
            engine = engine_for(model, execution=execution)
            found.append(serve(engine, drain, requests))
            assert_idle(engine)
        assert found[0] == found[1]
        assert found[1][0][0].token_ids == list(range(6, stop + 1))
        assert found[1][0][0].drafts.rejected == 0

    @pytest.mark.parametrize("forced", [0.0, 0.7, 1.0])
    def test_forced_acceptance_draws_the_same(self, forced, model, engine_for, drain):
        chosen = lossless(drafts=4, forced=forced)
        requests = [(PROMPT[:length], replace(DRAWN, max_tokens=40), chosen) for length in (45, 33, 25)]
        found = [serve(engine_for(model, execution=e), drain, requests) for e in ("eager", "graph")]
        assert found[0] == found[1]

    def test_news_of_a_round_come_together(self, make_chain, engine_for):
        engine = engine_for(make_chain(60), execution="graph")
        chosen = lossless("streaming", 3, 8, keep={"sink_tokens": 4, "recent_tokens": 0}, dense_layers=[])
        engine.submit([5] * 20, SamplingParams(max_tokens=20, ignore_eos=True), method=chosen)
        news = []
        while engine.has_work():
            news.append([token for output in engine.step() for token in output.new_token_ids])
        assert [len(step) for step in news if step] == [1, 4, 4, 4, 4, 3]
        assert [token for step in news for token in step] == list(range(6, 26))


class TestOtherwise:
    """Rounds that are verified as chunks of a mixed step."""

    @pytest.mark.parametrize(
        "beside",
        [
            (PROMPT[:30], LONG, make("quest", 12)),
            (PROMPT[:30], LONG, lossless(drafts=5)),
            (PROMPT[:30], replace(LONG, logprobs=1), lossless()),
        ],
        ids=["another method", "other rounds", "log-probabilities"],
    )
    def test_what_one_program_cannot_do(self, beside, model, engine_for, drain):
        requests = [(PROMPT, LONG, lossless()), beside]
        replayed = engine_for(model, execution="graph")
        steps, both = watched(replayed), []

        def look(_):
            if steps and steps[-1] == "verify":
                both.append(len(replayed._scheduler.running) == 2)

        got = serve(replayed, drain, requests, look)
        assert not any(both)
        alone = [serve(engine_for(model), drain, [request])[0] for request in requests]
        assert [[s.token_ids for s in each] for each in got] == [[s.token_ids for s in each] for each in alone]

    def test_traces_are_taken_of_planned_steps(self, model, engine_for, drain):
        found = []
        for execution in ("eager", "graph"):
            engine = engine_for(model, execution=execution)
            engine.recorder = TraceRecorder()
            found.append(said(serve(engine, drain, [(PROMPT, LONG, lossless())])))
        assert found[0] == found[1]

    def test_somebody_who_arrives_while_drafts_are_verified(self, model, engine_for, drain):
        for at in range(4, 13):
            engine = engine_for(model, execution="graph")
            first = engine.submit(PROMPT, LONG, method=lossless(drafts=4))
            for _ in range(at):
                engine.step()
            second = engine.submit(PROMPT[:33], LONG, method=lossless(drafts=4))
            done = drain(engine).completions
            got = [done[name].samples[0].token_ids for name in (first, second)]
            expected = serve(engine_for(model), drain, [(PROMPT, LONG, None), (PROMPT[:33], LONG, None)])
            assert got == [each[0].token_ids for each in expected]


class TestProgram:
    def test_a_pass_in_which_nobody_decodes_changes_nothing(self, model, engine_for):
        engine = engine_for(model, execution="graph")
        engine.submit(PROMPT, LONG, method=lossless(drafts=3))
        while engine._flight is None or engine._flight.verification is None:
            engine.step()
        program = engine._runner._program
        program.state.rows.fill_(-1)
        before = {name: field.clone() for name, field in program.state.fields.items()}
        kv = engine._runner.kv[1:].clone()
        with torch.inference_mode():
            news = program._run(Variant(4, places=4))
        assert news.shape == (8, 4) and not news[4:].any()
        assert all(torch.equal(field, before[name]) for name, field in program.state.fields.items())
        assert torch.equal(engine._runner.kv[1:].nan_to_num(), kv.nan_to_num())

    def test_a_step_by_other_means_leaves_nothing_known(self, model, engine_for):
        """Whoever was not in it may come back with other pages, at the position where it was."""
        engine = engine_for(model, execution="graph", step_tokens=6)
        engine.submit(PROMPT, LONG, method=lossless(drafts=3))
        while engine._flight is None:
            engine.step()
        state = engine._runner._program.state
        assert len(state._known) == 1
        engine.submit(PROMPT[5:], LONG)
        engine.step()
        assert engine._flight is None and not state._known

    def test_what_it_is_told_stays_where_it_is(self, model, engine_for, drain):
        """A captured program reads it there."""
        engine, places = engine_for(model, execution="graph"), set()
        verify = engine._runner._program._verify

        def look(_):
            places.update((size, told.data_ptr()) for size, told in verify._told.items())

        serve(engine, drain, [(PROMPT, LONG, lossless()), (PROMPT[:25], DRAWN, lossless())], look)
        assert len(places) == 1

    @pytest.mark.parametrize("sequences", [1, 2])
    def test_ops_are_given_what_lies_side_by_side(self, sequences, model, engine_for, drain, monkeypatch):
        """Filters of one row too, which must be in memory as often as there are places: kernels ask for no strides."""
        engine, seen = engine_for(model, execution="graph", max_seqs=sequences), []
        forward, sample = engine._model.forward, ops.sample

        def looked(ids, positions, rows, step, *rest):
            for group in step.prefills:
                seen.extend([ids, positions, step.slots, group.slots, group.cu_q, group.q_pos])
            return forward(ids, positions, rows, step, *rest)

        engine._model.forward = looked
        monkeypatch.setattr(ops, "sample", lambda *args: seen.extend(args[:-1]) or sample(*args))
        serve(engine, drain, [(PROMPT[: 45 - 9 * i], DRAWN, lossless()) for i in range(sequences)])
        assert all(tensor.is_contiguous() for tensor in seen)

    def test_the_hosts_part_of_a_round_is_small(self, model):
        """Four drafts and what stands of them: some twenty calls a token, in Python and C."""
        from octavo.core import Engine, EngineConfig

        def calls(sequences):
            engine = Engine(
                model, None,
                EngineConfig(max_seqs=sequences, pool_tokens=128 * sequences, execution="graph", prefix_cache=False),
            )  # fmt: skip
            news = torch.full((10, sequences), 7)
            engine._runner._program._run = lambda variant: news[: 2 * variant.places or 3, : variant.rows]
            chosen = lossless("streaming", 4, 48, keep={"sink_tokens": 16, "recent_tokens": 0}, dense_layers=[])
            for seed in range(sequences):
                engine.submit([5] * (50 + seed % 4), replace(LONG, max_tokens=60), method=chosen)
            while engine._flight is None or engine._flight.verification is None:
                engine.step()
            profile = cProfile.Profile()
            with profile:
                news_of_rounds = [engine.step() for _ in range(20)]
            assert sum(len(output.new_token_ids) for step in news_of_rounds for output in step) == 20 * sequences
            return pstats.Stats(profile).total_calls / 4

        few, many = calls(8), calls(24)
        assert (many - few) / 16 < 110
