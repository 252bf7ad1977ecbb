"""The engine's side of sparse methods, with the smallest one there is: the first page and the open one."""

import random
from dataclasses import dataclass

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.execution.token_list import TokenList
from octavo.core.interfaces import PagesRead, Selection
from octavo.core.sequence import NEVER, SparseSpan
from octavo.core.sequence import Sequence as TokenSequence
from octavo.core.serving.requests import new_request
from octavo.core.step_plan import StepPlan

GREEDY = {"ignore_eos": True}


def tokens(n, seed=0):
    return random.Random(seed).choices(range(3, 128), k=n)


@dataclass
class Ends:
    """Reads the first page and the open one, or all of them."""

    name: str = "ends"
    all_pages: bool = False
    largest_page: int = 64
    digest = None
    draws = False

    @property
    def provenance(self):
        return self.name

    def validate(self, spec, page_tokens):
        if page_tokens > self.largest_page:
            raise ValueError(f"pages of {page_tokens} tokens are more than {self.largest_page}")

    def reads_all(self, tokens, spec, page_tokens):
        return False

    def select(self, q, pages):
        if self.all_pages:
            return None
        last = pages.n_pages - 1
        chosen = torch.stack([torch.zeros_like(last), last], 1)
        counts = pages.n_pages.clamp(max=2)
        return Selection(chosen[:, None].to(torch.int32), counts[:, None].to(torch.int32))

    def resolve(self, selection, pages):
        return pages.gather(selection)

    def predict(self, tokens, layer, spec, page_tokens):
        return PagesRead(2, 0)


def run(engine, prompt, method, **params):
    request_id = engine.submit(prompt, SamplingParams(**{**GREEDY, **params}), method=method)
    return engine.finish([request_id])[request_id]


def test_dense_and_sparse_side_by_side_equal_each_alone(t_model, engine_for, drain, assert_idle):
    methods = {"dense": None, "ends": Ends(), "all": Ends("all", all_pages=True)}
    engine, prompt = engine_for(t_model), tokens(13)
    for name, method in methods.items():
        engine.submit(prompt, SamplingParams(max_tokens=12, **GREEDY), method=method, request_id=name)
    drained = drain(engine)
    alone = {
        name: run(engine_for(t_model), prompt, method, max_tokens=12).samples[0].token_ids
        for name, method in methods.items()
    }
    assert {name: drained.tokens_of(name) for name in methods} == alone
    assert alone["dense"] == alone["all"] != alone["ends"]
    assert_idle(engine)


def test_a_method_that_cannot_serve_is_refused(t_model, engine_for, assert_idle):
    engine = engine_for(t_model)
    for call in (
        lambda: engine.submit([5], method=Ends(largest_page=2)),
        lambda: engine.score([5], [6], method=Ends(largest_page=2)),
        lambda: engine.session([5], method=Ends(largest_page=2)).generate(),
        lambda: engine_for(t_model, method=Ends(largest_page=2)),
    ):
        with pytest.raises(ValueError, match="pages of 4 tokens are more than 2"):
            call()
    assert_idle(engine)


def test_a_short_sequence_reads_all_it_has(t_model, engine_for):
    got = run(engine_for(t_model), tokens(3), Ends(), max_tokens=5).samples[0].token_ids
    assert got == run(engine_for(t_model), tokens(3), None, max_tokens=5).samples[0].token_ids


@pytest.mark.parametrize("pool_tokens", [56, 64])
def test_preemption_recomputes_what_decoding_gave(t_model, engine_for, drain, assert_idle, pool_tokens):
    method, prompts = Ends(), {"a": tokens(13, 1), "b": tokens(14, 2)}
    engine = engine_for(t_model, pool_tokens=pool_tokens, method=method)
    for request_id, prompt in prompts.items():
        engine.submit(prompt, SamplingParams(max_tokens=24, **GREEDY), request_id=request_id)
    drained = drain(engine)
    assert engine.stats().preemptions > 0
    for request_id, prompt in prompts.items():
        expected = run(engine_for(t_model), prompt, method, max_tokens=24)
        assert drained.tokens_of(request_id) == expected.samples[0].token_ids
    assert_idle(engine)


class TestProvenance:
    def test_a_dense_request_never_hits_shaped_pages(self, t_model, engine_for):
        engine, prompt = engine_for(t_model), tokens(9)
        first = run(engine, prompt, Ends(), max_tokens=12)
        longer = prompt + first.samples[0].token_ids
        assert run(engine, longer, None, max_tokens=4).cached_tokens == 8
        again = run(engine, longer, None, max_tokens=4)
        assert again.cached_tokens == 20
        expected = run(engine_for(t_model), longer, None, max_tokens=4)
        assert again.samples[0].token_ids == expected.samples[0].token_ids

    def test_exact_pages_of_a_dense_request_serve_a_sparse_prompt(self, t_model, engine_for):
        engine, prompt = engine_for(t_model), tokens(13)
        run(engine, prompt, None, max_tokens=4)
        got = run(engine, prompt, Ends(), max_tokens=9)
        assert got.cached_tokens == 12
        expected = run(engine_for(t_model), prompt, Ends(), max_tokens=9)
        assert got.samples[0].token_ids == expected.samples[0].token_ids

    @pytest.mark.parametrize(
        "first, second, same",
        [
            ([(8, NEVER)], [(8, NEVER)], [True, True, True, True, True]),
            ([(8, NEVER)], [(9, NEVER)], [True, True, False, False, False]),
            ([(8, NEVER)], [(8, 12), (16, NEVER)], [True, True, True, False, False]),
            ([(8, NEVER)], [(8, 14), (16, NEVER)], [True, True, True, False, False]),
            ([(5, 7), (9, NEVER)], [(5, 7), (9, NEVER)], [True, True, True, True, True]),
            ([(20, NEVER)], [(99, NEVER)], [True] * 5),
        ],
    )
    def test_pages_are_the_same_if_the_same_tokens_were_shaped(self, t_model, engine_for, first, second, same):
        engine = engine_for(t_model, method=Ends())
        keys = []
        for spans in (first, second):
            request = new_request(engine, tokens(20), None, None, None, 0, None)
            sequence = TokenSequence(request, 0, TokenList(tokens(20)), engine._pool, engine._plan)
            sequence.sparse_spans = [SparseSpan(*span) for span in spans]
            keys.append(sequence.keys(5))
        assert [one == other for one, other in zip(*keys, strict=True)] == same

    def test_what_a_session_computed_densely_is_not_taken_for_decoded(self, t_model, engine_for, drain, assert_idle):
        # The session appends the very tokens that the request draws, so their pages differ in nothing but how their
        # KV came to be. The request is preempted and must not come back on them.
        method, prompt = Ends(), tokens(10)
        expected = run(engine_for(t_model), prompt, method, max_tokens=24).samples[0].token_ids
        engine = engine_for(t_model, method=method, pool_tokens=96)
        session = engine.session(prompt)
        session.generate(SamplingParams(max_tokens=3, **GREEDY))
        assert session.tokens == prompt + expected[:3]
        session.append(expected[3:16])
        session.generate(SamplingParams(max_tokens=1, **GREEDY))
        session.close()
        engine.submit(prompt, SamplingParams(max_tokens=24, **GREEDY), request_id="it")
        for _ in range(14):
            engine.step()
        engine._scheduler._preempt(engine._scheduler.running[0], StepPlan())
        assert drain(engine).tokens_of("it") == expected
        assert_idle(engine)


class TestSessions:
    def test_a_turn_does_not_depend_on_whether_its_pages_survived(self, t_model, engine_for, assert_idle):
        outputs = []
        for reclaimed in (False, True):
            engine = engine_for(t_model, method=Ends(), pool_tokens=60)
            session = engine.session(tokens(9))
            session.generate(SamplingParams(max_tokens=9, **GREEDY))
            if reclaimed:
                engine.generate([tokens(57, 1)], SamplingParams(max_tokens=2, **GREEDY))
                assert session._parked not in engine._scheduler.parked
            session.append(tokens(5, 2))
            outputs.append(session.generate(SamplingParams(max_tokens=9, **GREEDY)).samples[0].token_ids)
            session.close()
            assert_idle(engine)
        assert outputs[0] == outputs[1]


class TestCounts:
    def test_bytes_that_decoding_read(self, t_model, engine_for):
        engine = engine_for(t_model)
        unit_bytes = 2 * 4 * 16 * 4  # K and V, tokens of a unit, head_dim, fp32
        dense = run(engine, tokens(9), None, max_tokens=6).samples[0]
        sparse = run(engine, tokens(9), Ends(), max_tokens=6).samples[0]
        lengths = [10, 11, 12, 13, 14]  # with the token that is being computed
        layers_and_heads = 2 * 2
        assert dense.decode_steps == sparse.decode_steps == 5
        assert dense.kv_bytes_read == sum(-(-n // 4) for n in lengths) * layers_and_heads * unit_bytes
        assert sparse.kv_bytes_read == 5 * 2 * layers_and_heads * unit_bytes
        assert dense.digest_bytes_read == sparse.digest_bytes_read == 0

    def test_pages_behind_the_window_are_not_read(self, w_model, engine_for):
        sample = run(engine_for(w_model), tokens(21), None, max_tokens=3).samples[0]
        # At 22 and 23 tokens a window of 8 begins at position 14 and 15: pages 3 to 5 of 0 to 5.
        assert sample.kv_bytes_read == 2 * 3 * 4 * 2 * 4 * 16 * 4

    def test_a_score_under_a_method_decodes_its_target(self, t_model, engine_for):
        engine, prompt, target = engine_for(t_model), tokens(13), tokens(9, 1)
        dense, sparse = engine.score(prompt, target), engine.score(prompt, target, method=Ends())
        assert engine.score(prompt, target, method=Ends("all", all_pages=True)) == pytest.approx(dense, abs=1e-4)
        assert sparse[0] == pytest.approx(dense[0], abs=1e-4)  # the prompt is dense
        assert max(abs(a - b) for a, b in zip(sparse, dense, strict=True)) > 1e-2
