"""Decode steps as one program: the same tokens as eager steps, a step later, whatever happens in between."""

import cProfile
import pstats

import numpy as np
import pytest
import torch

from octavo.core import Engine, EngineConfig, SamplingParams
from octavo.core.execution.decode_program import Variant, buckets, spread_groups
from octavo.kernels.reference.shared import check_groups

from .mixed_requests import GREEDY, MIXED, found, run, tokens


def watched(engine):
    """The rows of every step that an engine launches from now on."""
    program, launches = engine._runner._program, []
    step = program.step
    program.step = lambda rows, runs: launches.append(list(rows)) or step(rows, runs)
    return launches


FIELDS = [
    {},
    {"pool_tokens": 72, "max_seqs": 4},
    {"step_tokens": 3},
    {"max_seqs": 1},
    {"max_seqs": 5, "eviction": "fifo"},
    {"shared_decode_bytes": 0},
    {"prefix_cache": False},
    {"host_tokens": 64, "pool_tokens": 96},
]
SERVED = [
    pytest.param(model, fields, id=f"{model}-{' '.join(map(str, fields)) or 'roomy'}",
                 marks=() if model == "t_model" or "pool_tokens" in fields else pytest.mark.slow)
    for model in ("t_model", "w_model", "g_model")
    for fields in FIELDS
]  # fmt: skip
"""Layers with windows give pages up as they go, which matters where there is little room."""


class TestSameTokens:
    @pytest.mark.parametrize(("model", "fields"), SERVED)
    def test_of_mixed_requests(self, model, fields, request):
        model = request.getfixturevalue(model)
        config = {"page_tokens": 4, "pool_tokens": 800, "max_seqs": 6, "step_tokens": 16, **fields}
        requests = [(p, q) for p, q in MIXED if q.n <= config["max_seqs"]]
        eager, program = (
            Engine(model, None, EngineConfig(**config, execution=execution)) for execution in ("eager", "graph")
        )
        launches, counted = watched(program), "pool_tokens" not in fields  # ahead of tokens others are preempted
        assert found(run(program, requests), counted) == found(run(eager, requests), counted)
        assert program.stats().units_held == 0 and launches

    def test_of_samples_that_share_their_prompt(self, t_model):
        params = SamplingParams(n=5, max_tokens=10, temperature=0.9, seed=2, ignore_eos=True)
        spared = []
        for execution in ("eager", "graph"):
            engine = Engine(
                t_model, None, EngineConfig(page_tokens=4, pool_tokens=200, shared_decode_bytes=0, execution=execution)
            )
            spared.append((found(run(engine, [(tokens(21), params)])), engine._runner.accounts.bytes_spared))
        assert spared[0] == spared[1] and spared[0][1] > 0

    def test_of_a_session_over_turns(self, t_model):
        said = []
        for execution in ("eager", "graph"):
            engine = Engine(t_model, None, EngineConfig(page_tokens=4, pool_tokens=200, execution=execution))
            session = engine.session(tokens(9))
            turns = []
            for turn in range(3):
                turns.append(session.generate(SamplingParams(max_tokens=7)).samples[0].token_ids)
                session.append(tokens(3, turn))
                engine.check()
            twin = session.fork()
            turns += [s.generate(GREEDY).samples[0].token_ids for s in (session, twin)]
            said.append(turns)
        assert said[0] == said[1]

    @pytest.mark.slow
    def test_compiled(self, t_model):
        config = {"page_tokens": 4, "pool_tokens": 800, "max_seqs": 6, "step_tokens": 16}
        eager, compiled = (
            Engine(t_model, None, EngineConfig(**config, execution=execution)) for execution in ("eager", "compiled")
        )
        expected = run(eager, MIXED)
        got = run(compiled, MIXED)
        assert [[s.token_ids for s in c.samples] for c in got] == [[s.token_ids for s in c.samples] for c in expected]


class TestLookingAhead:
    @pytest.fixture
    def counting(self, make_chain):
        """After token t comes t + 1; 60 ends."""
        model = make_chain(64, eos=60)
        return Engine(model, None, EngineConfig(page_tokens=4, pool_tokens=128, max_seqs=4, execution="graph"))

    def news(self, engine):
        out = [(o.request_id, o.new_token_ids, o.finish_reason) for o in engine.step()]
        engine.check()
        return out

    def test_tokens_of_a_replayed_step_come_with_the_next_one(self, counting):
        counting.submit([5], SamplingParams(max_tokens=4), request_id="a")
        launched = watched(counting)
        assert self.news(counting) == [] and launched == [[0]]
        assert self.news(counting) == [("a", [6], None)] and launched == [[0]] * 2
        assert self.news(counting) == [("a", [7], None)] and launched == [[0]] * 3
        # Three tokens are under way or known; the fourth is the last, so nothing is launched behind it.
        assert self.news(counting) == [("a", [8], None)] and launched == [[0]] * 4
        assert self.news(counting) == [("a", [9], "length")] and launched == [[0]] * 4
        assert not counting.has_work()

    def test_a_sequence_that_has_ended_is_computed_once_too_often_and_nobody_sees_it(self, counting):
        counting.submit([57], SamplingParams(max_tokens=20), request_id="ends")
        counting.submit([5], SamplingParams(max_tokens=8), request_id="goes on")
        seen = {}
        while counting.has_work():
            for request_id, ids, _ in self.news(counting):
                seen.setdefault(request_id, []).extend(ids)
        assert seen == {"ends": [58, 59, 60], "goes on": list(range(6, 14))}
        assert counting.stats().units_held == 0

    def test_a_page_is_findable_once_its_tokens_are_known_and_the_step_that_fills_it_is_under_way(self, counting):
        for number, length in enumerate((1, 3, 6)):
            params = SamplingParams(max_tokens=18, ignore_eos=True)
            counting.submit([20 * number] * length, params, request_id=str(number))
        counts = set()
        while counting.has_work():
            told = {name for name, *_ in self.news(counting)}
            for sequence in (s for s in counting._scheduler.running if s.request.request_id in told):
                full = sequence.layout.full_pages(sequence.computed)
                assert len(sequence.nodes) == full
                assert all(sequence.table.page(number) in counting._pool.index for number in range(full))
                counts.add(full)
        assert counts == set(range(6))

    def test_an_abort_while_tokens_are_under_way(self, counting):
        counting.submit([5], SamplingParams(max_tokens=20), request_id="a")
        counting.submit([20], SamplingParams(max_tokens=6), request_id="b")
        self.news(counting)
        self.news(counting)
        counting.abort("a")
        counting.check()
        seen = []
        while counting.has_work():
            seen += self.news(counting)
        assert ("a", [], "abort") in seen
        assert [ids for name, ids, _ in seen if name == "b"][-1] == [26]
        assert counting.stats().units_held == 0

    def test_the_last_request_is_aborted(self, counting):
        counting.submit([5], SamplingParams(max_tokens=20), request_id="a")
        self.news(counting)
        counting.abort("a")
        assert self.news(counting) == [("a", [], "abort")]
        assert not counting.has_work() and counting.stats().units_held == 0
        assert counting.generate([[30]], SamplingParams(max_tokens=2))[0].samples[0].token_ids == [31, 32]

    def test_who_arrives_is_admitted_with_the_next_step(self, counting):
        counting.submit([5], SamplingParams(max_tokens=9), request_id="a")
        self.news(counting)
        self.news(counting)
        counting.submit([40, 41, 42], SamplingParams(max_tokens=3), request_id="b")
        seen = {}
        while counting.has_work():
            for request_id, ids, _ in self.news(counting):
                seen.setdefault(request_id, []).extend(ids)
        assert seen == {"a": list(range(7, 15)), "b": [43, 44, 45]}

    @pytest.mark.parametrize("failing", [1, 2, 3, 5])
    def test_a_step_that_fails_loses_nothing(self, counting, failing):
        forward, calls = counting._model.forward, []

        def sometimes(*args, **named):
            calls.append(1)
            if len(calls) == failing:
                raise MemoryError("once")
            return forward(*args, **named)

        counting._model.forward = sometimes
        counting.submit([5], SamplingParams(max_tokens=7), request_id="a")
        counting.submit([30, 31], SamplingParams(max_tokens=5), request_id="b")
        seen, failures = {}, 0
        while counting.has_work():
            try:
                for request_id, ids, _ in self.news(counting):
                    seen.setdefault(request_id, []).extend(ids)
            except MemoryError:
                failures += 1
                counting.check()
        assert failures == 1 and seen == {"a": list(range(6, 13)), "b": list(range(32, 37))}

    def test_a_recorder_sees_every_token_so_nothing_runs_ahead_of_it(self, counting):
        from octavo.core.inspection.trace_recorder import TraceRecorder

        counting.recorder = TraceRecorder()
        counting.submit([5], SamplingParams(max_tokens=4), request_id="a")
        seen = []
        while counting.has_work():
            seen += [token for _, ids, _ in self.news(counting) for token in ids]
            assert all(-1 not in s.tokens for s in counting._scheduler.running)
        assert seen == [6, 7, 8, 9]


class TestHostsPart:
    """Of steps that are planned ahead, with the device's part left out."""

    def calls(self, model, sequences, **params):
        """Calls of 16 steps, in which each sequence fills a page."""
        config = EngineConfig(max_seqs=sequences, pool_tokens=96 * sequences, execution="graph", prefix_cache=False)
        engine = Engine(model, None, config)
        engine._runner._program._run = lambda variant: torch.full((1, variant.rows), 7)
        for seed in range(sequences):
            engine.submit(tokens(20 + seed % 16, seed), SamplingParams(max_tokens=40, ignore_eos=True, **params))
        for _ in range(3):  # prompts, a step that is launched, one that is planned ahead
            engine.step()
        profile = cProfile.Profile()
        with profile:
            news = [engine.step() for _ in range(16)]
        assert all(len(step) == sequences for step in news)
        engine.check()
        return pstats.Stats(profile).total_calls

    def test_a_token_costs_few_calls(self, t_model):
        few, many = self.calls(t_model, 16), self.calls(t_model, 48)
        assert (many - few) / 16 / 32 < 6  # a sequence and step: its token, its news, and a sixteenth of a page

    def test_what_may_end_a_sequence_costs_none(self, t_model):
        plain = self.calls(t_model, 24)
        assert abs(self.calls(t_model, 24, stop_token_ids=(3, 9), temperature=0.5, top_k=4) - plain) < 16 * 24


class TestProgram:
    def test_buckets(self):
        assert buckets(1) == [1] and buckets(3) == [1, 2, 3] and buckets(9) == [1, 2, 4, 8, 9]
        assert buckets(256) == [1, 2, 4, 8, *range(16, 64, 8), *range(64, 257, 16)]
        assert buckets(600)[-10:] == [256, 288, 320, 352, 384, 416, 448, 480, 512, 576, 600][-10:]

    @pytest.mark.parametrize("rows", range(1, 600, 7))
    def test_a_batch_is_padded_by_less_than_half(self, rows):
        for size in range(1, rows + 1):
            bucket = next(b for b in buckets(rows) if b >= size)
            assert bucket - size < max(8, size / 2)

    def test_groups_of_a_batch_are_told_in_rows_of_the_state(self):
        groups = np.array([[1, 0, 2, 0], [0, 2, 2, 2], [8, 0, 0, 0], [8, 8, 0, 0]], np.int32)
        spread = spread_groups(groups, [4, 1, 2], 6)
        assert spread.tolist() == [
            [1, 4, 2, 0, 3, 5, 0],
            [0, 2, 2, 2, 2, 2, 2],
            [8, 0, 0, 0, 0, 0, 0],
            [0, 8, 0, 0, 8, 0, 0],
        ]
        table = torch.arange(1, 61).view(1, 6, 1, 10) * 128 + 4
        table[:, 4, :, :2] = table[:, 1, :, :2]
        pool = torch.empty(1, 1, 2, 1, 4, 1)
        check_groups(pool, table.int(), torch.full((1, 6, 1), 40), torch.full((6,), 39), torch.from_numpy(spread))

    def test_a_pass_in_which_nobody_decodes_changes_nothing(self, t_model):
        engine = Engine(t_model, None, EngineConfig(page_tokens=4, pool_tokens=64, max_seqs=4, execution="graph"))
        engine.submit(tokens(5), GREEDY)
        engine.step(), engine.step()
        program = engine._runner._program
        program.state.rows.fill_(-1)
        before = {name: field.clone() for name, field in program.state.fields.items()}
        kv = engine._runner.kv[1:].clone()
        with torch.inference_mode():
            program._run(Variant(4))
        assert all(torch.equal(field, before[name]) for name, field in program.state.fields.items())
        assert torch.equal(engine._runner.kv[1:].nan_to_num(), kv.nan_to_num())

    def test_rows_close_up_when_the_batch_shrinks(self, make_chain):
        engine = Engine(
            make_chain(64), None, EngineConfig(page_tokens=4, pool_tokens=512, max_seqs=16, execution="graph")
        )
        for i in range(12):
            engine.submit([i], SamplingParams(max_tokens=30 if i in (7, 11) else 3), request_id=str(i))
        rows_of = watched(engine)
        done = {}
        while engine.has_work():
            for output in engine.step():
                if output.completion:
                    done[output.request_id] = output.completion.samples[0].token_ids
            engine.check()
        assert rows_of[0] == list(range(12)) and sorted(rows_of[-1]) == [0, 1]
        assert done["7"] == list(range(8, 38)) and done["11"] == list(range(12, 42))


def test_graphs_need_kernels_that_can_be_captured(t_model):
    from octavo.core import sizing

    config = EngineConfig(execution="graph")
    with pytest.raises(ValueError, match=r"execution='graph' captures CUDA graphs.*backend='reference'"):
        sizing.execution(config, "reference", torch.device("cuda"))
    assert sizing.execution(config, "reference", torch.device("cpu")) == "graph"
    auto = EngineConfig()
    found = [sizing.execution(auto, backend, torch.device(device)) for backend, device in
             (("cpu", "cpu"), ("triton", "cuda"), ("reference", "cuda"), ("triton", "cpu"))]  # fmt: skip
    assert found == ["eager", "graph", "eager", "eager"]
