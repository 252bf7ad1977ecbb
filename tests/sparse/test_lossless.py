"""Drafts of any method, verified by the full cache: the tokens of dense decoding, whatever happens in between."""

import random
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.step_plan import StepPlan
from octavo.scripts.build import method
from octavo.scripts.refusal import ConfigError
from octavo.sparse.host_placement import Host
from octavo.sparse.lossless import Lossless

from ..cells import covering
from .method_cases import NAMES, PROMPT, make


def tokens(count, seed=0):
    return random.Random(seed).choices(range(3, 128), k=count)


def lossless(name="random", drafts=3, budget=12, **parts):
    """The smallest budget, so that many drafts are wrong."""
    return Lossless(make(name, budget, **parts), drafts)


def serve(engine, drain, requests, chosen, after_step=None):
    """Samples by request: token ids, reason, and the entries of their log-probabilities."""
    ids = [engine.submit(prompt, params, method=chosen) for prompt, params in requests]
    done = drain(engine, after_step).completions
    return [done[request_id].samples for request_id in ids]


def said(samples):
    return [[(s.token_ids, s.finish_reason, s.text) for s in each] for each in samples]


LONG = SamplingParams(max_tokens=26, ignore_eos=True)
MIXED = [
    (PROMPT, LONG),
    (PROMPT, SamplingParams(max_tokens=17, temperature=0.9, top_p=0.9, seed=3, n=3, ignore_eos=True)),
    (tokens(33, 2), SamplingParams(max_tokens=20, temperature=1.2, top_k=20, min_p=0.01, seed=1)),
    (tokens(18, 4), SamplingParams(max_tokens=15, logprobs=2, ignore_eos=True)),
    (tokens(26, 5), SamplingParams(max_tokens=19, repetition_penalty=1.4, ignore_eos=True)),
    (tokens(29, 6), SamplingParams(max_tokens=22, min_tokens=9, stop_token_ids=tuple(range(3, 60)))),
    (tokens(7, 7), SamplingParams(max_tokens=24, temperature=0.7, prompt_logprobs=1, seed=5, ignore_eos=True)),
    (tokens(40, 8), SamplingParams(max_tokens=2)),
    (tokens(21, 9), SamplingParams(max_tokens=1)),
]


FIELDS = {
    " ".join(f"{key}={value}" for key, value in fields.items()) or "roomy": fields
    for fields in (
        {},
        {"max_seqs": 3},
        {"pool_tokens": 84},
        {"step_tokens": 1},
        {"step_tokens": 2},
        {"step_tokens": 7},
        {"prefix_cache": False},
        {"shared_decode_bytes": 0},
        {"page_tokens": 5},
        {"backend": "cpu"},
    )
}


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


@pytest.fixture(scope="module")
def dense(model, engine_for, drain):
    """``dense(requests)``: what an engine without a method answers."""
    known = {}

    def samples(requests):
        key = repr(requests)
        if key not in known:
            known[key] = serve(engine_for(model), drain, requests, None)
        return known[key]

    return samples


class TestTokensAreDense:
    @pytest.mark.parametrize("name, execution", covering(NAMES, ["graph", "eager"]))
    def test_of_every_method(self, name, execution, model, engine_for, drain, dense):
        requests = [(PROMPT, LONG), (PROMPT[:30], LONG)]
        expected = dense(requests)
        got = serve(engine_for(model, execution=execution), drain, requests, Lossless(make(name), 4))
        assert said(got) == said(expected)
        assert [each[0].decode_steps for each in got] == [each[0].decode_steps for each in expected] == [25, 25]
        counts = [each[0].drafts for each in got]
        assert all(c.drafted >= c.accepted + c.rejected and c.verifications for c in counts)
        assert all(c.accepted + c.verifications <= 25 for c in counts)

    @pytest.mark.parametrize("fields, execution", covering(FIELDS, ["graph", "eager"]), ids=str)
    def test_of_mixed_requests(self, fields, execution, model, engine_for, drain, assert_idle, dense):
        fields = FIELDS[fields]
        chosen = Lossless(make("random", 15 if "page_tokens" in fields else 12), 5)
        expected = dense(MIXED)
        engine = engine_for(model, **fields, execution=execution)
        got = serve(engine, drain, MIXED, chosen)
        assert said(got) == said(expected)
        for one, other in zip(got[3][0].logprobs, expected[3][0].logprobs, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
        if "pool_tokens" in fields:
            assert engine.stats().preemptions > 0
        if fields.get("step_tokens") != 1:
            assert got[0][0].drafts.accepted > 0 and got[0][0].drafts.rejected > 0
        else:  # nothing could be verified in one step
            assert got[0][0].drafts.drafted == 0
        assert_idle(engine)

    @pytest.mark.parametrize("drafts", [1, 2, 9, 40])
    def test_of_any_number_of_drafts(self, drafts, model, engine_for, drain, dense):
        expected = dense([(PROMPT, LONG)])
        got = serve(engine_for(model), drain, [(PROMPT, LONG)], lossless("quest", drafts))
        assert said(got) == said(expected)

    @pytest.mark.parametrize("execution", ["eager", "graph"])
    @pytest.mark.parametrize("name", ["g_model", "w_model"])
    def test_beside_windows(self, name, execution, request, engine_for, drain):
        """On layer groups pages behind a window go back while drafts are ahead."""
        model = request.getfixturevalue(name)
        chosen = Lossless(make("random", 12, dense_layers=[]), 6)
        requests = [(PROMPT, LONG), (tokens(30, 1), LONG)]
        expected = serve(engine_for(model), drain, requests, None)
        got = serve(engine_for(model, execution=execution), drain, requests, chosen)
        assert said(got) == said(expected)

    def test_beside_other_methods(self, model, engine_for, drain):
        methods = {"dense": None, "quest": make("quest", 12), "drafts": lossless("quest"), "random": lossless()}
        alone = {
            name: serve(engine_for(model), drain, [(PROMPT, LONG)], one)[0][0].token_ids
            for name, one in methods.items()
        }
        engine = engine_for(model, step_tokens=24)
        for name, one in methods.items():
            engine.submit(PROMPT, LONG, method=one, request_id=name)
        drained = drain(engine)
        assert {name: drained.tokens_of(name) for name in methods} == alone
        assert alone["dense"] == alone["drafts"] == alone["random"] != alone["quest"]

    @pytest.mark.parametrize("execution", ["eager", "graph"])
    def test_text_ends_at_a_stop_string_in_the_middle_of_a_round(self, execution, make_chain, engine_for, drain,
                                                                 piece_tokenizer):  # fmt: skip
        letters = piece_tokenizer([chr(97 + i % 26) for i in range(60)])
        model = make_chain(60)
        requests = [([5] * 25, SamplingParams(max_tokens=30, stop=["no"])), ([9] * 22, SamplingParams(max_tokens=9))]
        chosen = Lossless(make("streaming", 8, keep={"sink_tokens": 4, "recent_tokens": 0}, dense_layers=[]), 5)
        expected = serve(engine_for(model, letters), drain, requests, None)
        got = serve(engine_for(model, letters, execution=execution), drain, requests, chosen)
        assert said(got) == said(expected)
        assert got[0][0].text == "ghijklm" and got[0][0].drafts.accepted > 3

    def test_frequencies_follow_the_softmax(self, make_llama, engine_for, drain):
        """Pairs of tokens on a vocabulary of 4, of which the second is a verified draft."""
        model = make_llama(4, initializer_range=0.3)
        prompt = random.Random(0).choices(range(4), k=30)
        requests = [
            (prompt, SamplingParams(max_tokens=4, temperature=1.0, seed=seed, ignore_eos=True)) for seed in range(800)
        ]
        chosen = Lossless(make("random", 12, dense_layers=[]), 2)
        engine = engine_for(model, max_seqs=64, pool_tokens=6000, shared_decode=False)
        got = [each[0] for each in serve(engine, drain, requests, chosen)]
        counts = torch.zeros(4, 4)
        for sample in got:
            counts[sample.token_ids[1], sample.token_ids[2]] += 1
        expected = torch.zeros(4, 4)
        with torch.inference_mode():
            for first in range(4):
                p = model(torch.tensor([prompt])).logits[0, -1].softmax(0)[first]
                q = model(torch.tensor([[*prompt, first]])).logits[0, -1].softmax(0)
                for second in range(4):
                    r = model(torch.tensor([[*prompt, first, second]])).logits[0, -1].softmax(0)
                    expected[second] += p * q[second] * r
        chi = ((counts - 800 * expected) ** 2 / (800 * expected)).sum().item()
        assert chi < 37.7  # 15 degrees of freedom, p = 0.001
        drafts = [sample.drafts for sample in got]
        assert sum(c.accepted for c in drafts) > 300 and sum(c.rejected for c in drafts) > 50


class TestWhateverHappens:
    @pytest.mark.parametrize("execution", ["eager", "graph"])
    @pytest.mark.parametrize("at", range(1, 14))
    def test_preempted_after_any_step(self, at, execution, model, engine_for, drain, dense):
        expected = dense([(PROMPT, LONG)])[0][0].token_ids
        engine = engine_for(model, execution=execution)
        engine.submit(PROMPT, LONG, method=lossless(), request_id="a")
        streamed = [token for _ in range(at) for out in engine.step() for token in out.new_token_ids]
        engine._land_pending()
        (sequence,) = engine._scheduler.running
        engine._scheduler._preempt(sequence, StepPlan())
        engine.check()
        assert not sequence.drafts.tokens
        assert drain(engine).tokens_of("a") == expected
        assert streamed == expected[: len(streamed)]

    @pytest.mark.parametrize("execution", ["eager", "graph"])
    @pytest.mark.parametrize("at", range(1, 10))
    def test_aborted_after_any_step(self, at, execution, model, engine_for, drain, assert_idle, dense):
        expected = dense([(PROMPT, LONG)])[0][0].token_ids
        engine = engine_for(model, execution=execution)
        engine.submit(PROMPT, LONG, method=lossless(), request_id="a")
        other = engine.submit(PROMPT[:30], LONG, method=lossless())
        for _ in range(at):
            engine.step()
        engine.abort("a")
        drained = drain(engine)
        got = drained.completions["a"].samples[0].token_ids
        assert got == expected[: len(got)]
        alone = dense([(PROMPT[:30], LONG)])[0][0].token_ids
        assert drained.tokens_of(other) == alone
        assert_idle(engine)

    @pytest.mark.parametrize("execution", ["eager", "graph"])
    @pytest.mark.parametrize("failing", range(1, 12))
    def test_a_step_that_fails_loses_nothing(self, failing, execution, model, engine_for, assert_idle, dense):
        engine = engine_for(model, execution=execution)
        forward, calls = engine._model.forward, []

        def sometimes(*args, **named):
            calls.append(1)
            if len(calls) == failing:
                raise MemoryError("once")
            return forward(*args, **named)

        expected = dense([(PROMPT, LONG)])[0][0].token_ids
        engine._model.forward = sometimes
        engine.submit(PROMPT, LONG, method=lossless())
        seen, failures = [], 0
        while engine.has_work():
            try:
                seen += [token for out in engine.step() for token in out.new_token_ids]
            except MemoryError:
                failures += 1
            engine.check()
        assert failures == 1 and seen == expected
        assert_idle(engine)

    @pytest.mark.parametrize("execution", ["eager", "graph"])
    def test_a_failure_among_verified_tokens_loses_nothing(self, execution, model, engine_for, piece_tokenizer):
        """News of the first tokens of a round are out when the next one fails. With text every token is looked at."""
        letters = piece_tokenizer([chr(97 + i % 26) for i in range(128)])
        engine = engine_for(model, letters, execution=execution)
        take, calls = engine._take, []

        def sometimes(*args):
            calls.append(1)
            if len(calls) == 5:
                raise MemoryError("once")
            return take(*args)

        expected = engine_for(model).generate([PROMPT], LONG)[0].samples[0].token_ids
        engine._take = sometimes
        engine.submit(PROMPT, LONG, method=lossless("oracle", 6, 20))
        got = []
        while engine.has_work():
            with suppress(MemoryError):
                got += [out.completion for out in engine.step() if out.completion]
            engine.check()
        assert len(calls) > 5 and got[0].samples[0].token_ids == expected

    @pytest.mark.parametrize("execution", ["eager", "graph"])
    def test_a_session_over_turns(self, execution, model, engine_for, assert_idle):
        said = []
        for chosen in (None, lossless()):
            engine = engine_for(model, method=chosen, execution=execution)
            session = engine.session(tokens(30))
            turns = []
            for turn in range(3):
                completion = session.generate(SamplingParams(max_tokens=7, ignore_eos=True))
                turns.append(completion.samples[0].token_ids)
                if turn:
                    assert completion.cached_tokens > 30
                session.append(tokens(3, turn))
                engine.check()
            twin = session.fork()
            turns += [s.generate(LONG).samples[0].token_ids for s in (session, twin)]
            session.close()
            twin.close()
            assert_idle(engine)
            said.append(turns)
        assert said[0] == said[1]

    @pytest.mark.parametrize("execution", ["eager", "graph"])
    def test_a_pool_of_just_one_sequence_ends_where_dense_ends(self, execution, model, engine_for, drain):
        """Drafts find no room, and the last pages go to known tokens."""
        endless = SamplingParams(max_tokens=60, ignore_eos=False)
        samples = [
            serve(engine_for(model, pool_tokens=64, execution=execution), drain, [(PROMPT, endless)], chosen)[0][0]
            for chosen in (None, lossless(drafts=7))
        ]
        assert samples[0].finish_reason == samples[1].finish_reason == "capacity"
        assert samples[0].token_ids == samples[1].token_ids


class TestPagesAreExact:
    @pytest.mark.parametrize("execution", ["eager", "graph"])
    def test_digests_and_findable_pages_are_those_of_dense_decoding(self, execution, model, engine_for, drain):
        """After every step: what a digest store has for good is of exact KV, and so is every page that can be found."""
        engine, dense = engine_for(model, execution=execution), engine_for(model)
        serve(dense, drain, [(PROMPT, LONG)], None)
        exact = {
            node.tokens.tobytes(): dense._runner.kv[page].clone()
            for page, node in ((page, dense._pool.index.node(page)) for page in dense._pool.index._of_page)
        }
        looked_at = set()

        def look(_):
            for page in engine._pool.index._of_page:
                node = engine._pool.index.node(page)
                torch.testing.assert_close(engine._runner.kv[page], exact[node.tokens.tobytes()], atol=1e-4, rtol=1e-3)
            for store in engine._runner._digests.values():
                made = [p for p in range(1, 101) if store._made[p] == engine._pool.generation[p]]
                k, v = engine._runner.kv[made].unbind(2)
                for part, values in store._digest.compute(k, v, range(3)).items():
                    torch.testing.assert_close(store.parts[part][made], values, atol=1e-6, rtol=1e-6)
                looked_at.update(made)

        serve(engine, drain, [(PROMPT, LONG)], lossless("quest", 6), look)
        assert len(looked_at) >= 15

    def test_a_dense_request_finds_what_was_verified(self, model, engine_for, drain):
        engine = engine_for(model)
        first = serve(engine, drain, [(PROMPT, LONG)], lossless())[0][0]
        longer = PROMPT + first.token_ids
        request_id = engine.submit(longer, LONG)
        again = drain(engine).completions[request_id]
        assert again.cached_tokens == 68  # of 71 tokens, the last of which was never computed
        assert again.samples[0].token_ids == serve(engine_for(model), drain, [(longer, LONG)], None)[0][0].token_ids


class TestRounds:
    @pytest.mark.parametrize("execution", ["eager", "graph"])
    def test_drafts_that_are_all_right(self, execution, make_chain, engine_for, drain):
        """On a model whose attention adds nothing: 1 token of the prompt, then 4 a round of 3 drafts, and 3 at last."""
        engine = engine_for(make_chain(60), execution=execution)
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        (sample,) = serve(engine, drain, [([5] * 20, params)], lossless(dense_layers=[]))[0]
        assert sample.token_ids == list(range(6, 22))
        counts = sample.drafts
        assert (counts.drafted, counts.accepted, counts.rejected, counts.verifications) == (11, 11, 0, 4)
        assert sample.decode_steps == 15

    def test_a_sequence_that_is_read_whole_is_decoded_without_drafts(self, model, engine_for, drain, dense):
        whole = dense([(PROMPT, LONG)])[0][0]
        full = serve(engine_for(model), drain, [(PROMPT, LONG)], lossless(budget=2000))[0][0]
        assert full.drafts.drafted == 0
        assert (full.kv_bytes_read, full.decode_steps) == (whole.kv_bytes_read, whole.decode_steps)

    def test_drafts_begin_where_the_method_begins_to_choose(self, model, engine_for, drain):
        """At a budget of 5 pages of 4 tokens, with the 21st token: 11 tokens are decoded without drafts."""
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        for execution in ("eager", "graph"):
            engine = engine_for(model, execution=execution)
            (sample,) = serve(engine, drain, [(PROMPT[:9], params)], lossless("quest", 3, 20))[0]
            counts = sample.drafts
            assert counts.drafted and 7 <= counts.accepted + counts.verifications <= 8  # the last may be alone

    def test_bytes_are_those_of_drafts_and_of_one_dense_read_a_round(self, make_chain, engine_for, drain):
        engine = engine_for(make_chain(60))
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        chosen = Lossless(make("streaming", 8, keep={"sink_tokens": 4, "recent_tokens": 0}, dense_layers=[]), 3)
        (sample,) = serve(engine, drain, [([5] * 20, params)], chosen)[0]
        unit = 2 * 4 * 4 * 4  # K and V, tokens, head_dim, fp32; one layer and one head
        assert sample.drafts.drafted == 6 and sample.drafts.verifications == 2
        assert sample.kv_bytes_read == (6 * 2 + (6 + 7)) * unit  # drafts read 2 units each; tokens 24 and 28 end rounds

    def test_those_that_arrive_later_come_into_step(self, model, engine_for):
        """Rounds of two sequences end together, so that not every step verifies."""
        engine = engine_for(model)
        engine.submit(PROMPT, LONG, method=lossless(drafts=4))
        for _ in range(4):
            engine.step()
        engine.submit(PROMPT[:40], LONG, method=lossless(drafts=4))
        rounds = []
        for _ in range(14):
            engine.step()
            rounds.append([len(s.drafts.tokens) for s in engine._scheduler.running])
        assert all(len(set(drafts)) == 1 for drafts in rounds[5:]), rounds
        assert any(later != first for first, later in pairwise(rounds[5:]))

    @pytest.mark.parametrize("forced, accepted, rejected", [(1.0, 15, 0), (0.0, 0, 15)])
    def test_forced_acceptance(self, forced, accepted, rejected, model, engine_for, drain):
        chosen = Lossless(make("random", 12), 3, forced)
        params = SamplingParams(max_tokens=21 if forced else 17, ignore_eos=True)
        (sample,) = serve(engine_for(model), drain, [(PROMPT, params)], chosen)[0]
        assert (sample.drafts.accepted, sample.drafts.rejected) == (accepted, rejected)
        dense = serve(engine_for(model), drain, [(PROMPT, params)], None)[0][0]
        assert (sample.token_ids == dense.token_ids) is (forced == 0.0)

    def test_a_forced_rate_is_met_and_repeats(self, model, engine_for, drain):
        chosen = Lossless(make("random", 12), 4, 0.8)
        requests = [(tokens(30, seed), SamplingParams(max_tokens=60, ignore_eos=True)) for seed in range(4)]
        counts = [each[0].drafts for each in serve(engine_for(model, pool_tokens=800), drain, requests, chosen)]
        accepted, rejected = (sum(getattr(c, name) for c in counts) for name in ("accepted", "rejected"))
        assert 0.7 < accepted / (accepted + rejected) < 0.9
        again = [each[0].drafts for each in serve(engine_for(model, pool_tokens=800), drain, requests, chosen)]
        assert again == counts


class TestRefused:
    @pytest.mark.parametrize(
        "parts, message",
        [
            ({"drafts": 0}, "drafts must be an integer of at least 1, got 0"),
            ({"draft": "lossless"}, "draft: a method that drafts itself"),
            ({"draft": "dense"}, "draft=dense"),
            ({"draft": "snapkv"}, "draft='snapkv' drops tokens"),
            ({"draft": "xattention_quest"}, "draft='xattention_quest' computes prompts by a pattern"),
            ({"draft": "qest"}, "did you mean 'quest'"),
            ({"forced_acceptance": 1.5}, "forced_acceptance must be a probability, 0 to 1, or null, got 1.5"),
        ],
    )
    def test_what_cannot_draft(self, parts, message):
        with pytest.raises(ConfigError, match=message):
            method("lossless", **parts)

    def test_a_drafting_method_that_cannot_serve(self, model, engine_for):
        with pytest.raises(ValueError, match=r"dense_layers \[9\] are not among the 3 layers"):
            engine_for(model).submit(PROMPT, method=Lossless(make("quest", dense_layers=[9])))

    def test_a_draft_whose_pages_lie_in_host_memory(self, model, engine_for):
        chosen = Lossless(replace(make("quest"), placement=Host(8)))
        engine = engine_for(model, host_tokens=400)
        with pytest.raises(ValueError, match="draft='quest' keeps its pages in host memory, and what verifies reads"):
            engine.submit(PROMPT, method=chosen)
        assert not engine.has_work()

    def test_what_is_known_of_tokens_beforehand(self, model, engine_for):
        with pytest.raises(ValueError, match="token_prior goes with a method that has a prior, and lossless has none"):
            engine_for(model).submit(PROMPT, method=lossless(), token_prior=[0.5] * len(PROMPT))

    def test_the_draft_is_named_and_has_the_budget(self):
        chosen = method("lossless", draft="tidal", drafts=2, budget_tokens=96)
        assert (chosen.draft.name, chosen.draft.budget.tokens, chosen.drafts) == ("tidal", 96, 2)
        quest = method("lossless", draft={"keep": {"sink_tokens": 3}}, budget_tokens=96)
        assert (quest.draft.name, quest.draft.keep.sink_tokens, quest.draft.budget.tokens) == ("quest", 3, 96)
