"""Images whose KV serves requests that hold them elsewhere, on real engines, against plain transformers with a mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import BatchError, CapacityError
from octavo.core.serving.prompts import TokenSegment
from octavo.multimodal import EncodeWorker
from octavo.multimodal.reuse import BlendReuse, EncoderOnlyReuse, PrefixReuse, RepairReuse, ZeroCopyReuse
from octavo.sparse.budgets import Uniform
from octavo.sparse.lossless import Lossless
from octavo.sparse.method import Method
from octavo.sparse.scorers import Random

from ..pictures import BROKEN, A, B, FakeEncoder, Picture, ids, preempt, text
from .reuse_cases import COPY, LONG, MODES, PROMPTS, answers, logits_of, modes, params


@modes
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_answers_of_every_chunk_size(mode, backend, t_model, served, expected, drain, assert_nothing_held):
    """With what was computed before in the cache, and without."""
    wanted = expected(LONG, mode)
    for step_tokens in (*range(1, 14, 2 if backend == "reference" else 6), 20, 8192):
        engine = served(t_model, mode, step_tokens=step_tokens, backend=backend)
        for _ in range(2):
            assert answers(engine, drain, [LONG]) == [wanted], step_tokens
        assert_nothing_held(engine)


@modes
@pytest.mark.parametrize("step_tokens", [7, 8192])
def test_mixed_batches(mode, step_tokens, t_model, served, expected, drain, assert_nothing_held):
    """Of requests that reuse images and requests that do not: each as if it were alone."""
    engine = served(t_model, step_tokens=step_tokens, max_seqs=3)
    both = [(prompt, reuse) for prompt in PROMPTS for reuse in (mode, None)]
    for _ in range(2):
        names = [engine.submit(prompt, params(), reuse=reuse) for prompt, reuse in both]
        drained = drain(engine)
        assert [drained.tokens_of(each) for each in names] == [expected(*one) for one in both]
    assert_nothing_held(engine)


@modes
def test_preempted_at_every_step(mode, t_model, served, expected, drain, assert_nothing_held):
    """And found again in the cache, or computed again because everything idle was given up."""
    prompt = [text(5), A, text(3, 1), B, text(2)]
    wanted = expected(prompt, mode)
    for gives_up in (False, True):
        step = steps = 0
        while step <= steps:
            engine = served(t_model, mode, step_tokens=6)
            request = engine.submit(prompt, params())

            def interfere(drained, engine=engine, step=step, gives_up=gives_up):
                if drained.steps == step:
                    for sequence in list(engine._scheduler.running):
                        preempt(engine, sequence)
                    while gives_up and engine._scheduler.parked:
                        engine._scheduler._reclaim()
                    if gives_up:
                        engine._pool.release(engine._pool.allocate(engine._pool.available))
                    engine.check()

            drained = drain(engine, interfere)
            assert drained.tokens_of(request) == wanted, step
            assert_nothing_held(engine)
            steps = drained.steps if step == 0 else steps
            step += 1
        assert steps >= 9


@modes
def test_any_pages_evicted(mode, t_model, served, expected, drain, assert_nothing_held):
    """Between two equal requests pages go one by one, whichever the policy finds next."""
    prompt = [text(5), A, text(6, 1), B, text(5)]
    wanted = expected(prompt, mode)
    gone = 0
    while True:
        engine = served(t_model, mode)
        assert answers(engine, drain, [prompt]) == [wanted]
        if gone > len(engine._pool.index):
            break
        for _ in range(gone):
            engine._pool.release(engine._pool.allocate(engine._pool.free_units + 1))
        engine.check()
        assert answers(engine, drain, [prompt]) == [wanted], gone
        assert_nothing_held(engine)
        gone += 2
    assert gone > 10


@modes
@pytest.mark.parametrize("eviction", ["lru", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lfu", "fifo"))])
def test_a_pool_that_is_too_small_for_all(mode, eviction, t_model, served, expected, drain, assert_nothing_held):
    prompts = [[text(7, i), Picture(10 + i % 3, 9), text(3, 20 + i), Picture(10 + i, 7), text(2)] for i in range(5)]
    engine = served(t_model, mode, pool_tokens=96 if mode.copies else 64, step_tokens=9, eviction=eviction)
    wanted = [expected(prompt, mode, 9) for prompt in prompts]
    for _ in range(2):
        assert answers(engine, drain, prompts, tokens=9) == wanted
    assert_nothing_held(engine)


class TestZeroCopy:
    def test_one_image_for_many(self, t_model, served, drain, assert_nothing_held):
        """32 requests that hold one image at different positions share its units; keys that were copied and turned say
        the same."""
        prompts = [[text(1 + i, i), A, text(3, 40 + i)] for i in range(32)]
        logprobs = {}
        for mode in (ZeroCopyReuse(), COPY):
            engine = served(t_model, mode, max_seqs=32, pool_tokens=4000)
            names = [engine.submit(prompt, params(logprobs=8)) for prompt in prompts]
            seen = []

            def look(drained, engine=engine, seen=seen):
                running = [s for s in engine._scheduler.running if s.serves is None]
                pages = [
                    s.table.pages()[[s.layout.kind(p) == "image" for p in range(s.table.n_pages)]] for s in running
                ]
                if len(running) == 32:
                    seen.append({page for each in pages for page in each.tolist()})

            drained = drain(engine, look)
            image_pages = 2 if mode.name == "zero_copy" else 2 * 32
            assert seen and all(len(pages) == image_pages for pages in seen)
            assert sum(engine._pool.size[page] for page in seen[0]) == 3 * image_pages  # units of 2 tokens
            logprobs[mode.name] = [drained.completions[each].samples[0] for each in names]
            assert_nothing_held(engine)
        for one, other in zip(*logprobs.values(), strict=True):
            assert one.token_ids == other.token_ids
            for here, there in zip(one.logprobs, other.logprobs, strict=True):
                assert here.keys() == there.keys()
                assert max(abs(here[token] - there[token]) for token in here) <= 1e-3

    def test_an_image_that_is_there_takes_one_step(self, t_model, served):
        """However many there are: what is between them is computed in one pass."""
        encoder = FakeEncoder()
        engine = served(t_model, ZeroCopyReuse(), encoder)
        prompts = [[text(4, i), A, text(3, i + 1), B, text(2, i), A, text(2)] for i in range(2)]
        engine.generate([prompts[0]], params(1))
        encoder.calls.clear()
        before = engine.stats()
        done = engine.generate([prompts[1]], params(1))[0]
        assert engine.stats().steps - before.steps == 1
        assert done.cached_tokens == 9 + 13 + 9 and encoder.calls == []

    def test_what_stands_behind_is_found_too(self, t_model, served, expected):
        engine = served(t_model, ZeroCopyReuse())
        prompt = [text(5), A, text(9, 1), A, text(6)]
        for cached in (18, 36):
            done = engine.generate([prompt], params())[0]
            assert done.samples[0].token_ids == expected(prompt, ZeroCopyReuse())
            engine.check()
            assert done.cached_tokens == cached
        # of the second, all but the last 2 tokens; one page of text was decoded on

    def test_the_context(self, t_model, served, drain):
        """Images lean on the head of the prompt; copies say the same, and another head is another image."""
        prompts = [[text(6), A, text(3, 1)], [TokenSegment("text", ids(6)[:2] + ids(9, 5)), B, A, text(2)]]
        zero_copy, copies = ZeroCopyReuse(context_tokens=2), RepairReuse(tokens=0, context_tokens=2)
        engine = served(t_model, zero_copy)
        assert answers(engine, drain, prompts) == answers(served(t_model, copies), drain, prompts)
        assert answers(engine, drain, prompts) != answers(engine, drain, prompts, reuse=ZeroCopyReuse())
        found = [engine.generate([[text(6, seed), A, text(3)]], params(1))[0].cached_tokens for seed in (9, 9)]
        assert found == [9, 6 + 9]
        engine.check()

    @pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "bidirectional"])
    def test_layers_with_windows_that_keep_all(self, bidirectional, g_model, served, drain, assert_nothing_held):
        """Two kinds of rotary embedding, and a window of 8 over lent pages; against copies."""
        prompts = [[text(5 + i, i), A, text(3, 1), B, text(4, 2)] for i in range(3)]
        found = []
        for mode in (ZeroCopyReuse(), COPY):
            engine = served(g_model, mode, FakeEncoder(bidirectional), layer_groups=False, step_tokens=14)
            found += [answers(engine, drain, prompts) for _ in range(2)]
            assert_nothing_held(engine)
        assert found[0] == found[1] == found[2] == found[3]

    def test_a_host_tier(self, t_model, served, expected, drain, assert_nothing_held, monkeypatch):
        from octavo.core.memory import transfer_costs

        monkeypatch.setattr(transfer_costs, "measure_bytes_per_s", lambda *_: 1e9)
        for mode in MODES:
            engine = served(t_model, mode, pool_tokens=96 if mode.copies else 68, host_tokens=400)
            engine.costs.restore_is_cheaper = lambda *_: True
            for prompt in [*PROMPTS[:4], *PROMPTS[:4]]:
                assert answers(engine, drain, [prompt]) == [expected(prompt, mode)]
            assert engine._host.restored > 0
            assert_nothing_held(engine)


def test_engines_that_replay(t_model, served, expected, drain, assert_nothing_held):
    """Steps with images are launched one by one beside replayed steps of text; the tokens are the same."""
    for mode in MODES[:3]:
        engine = served(t_model, mode, execution="graph")
        names = [engine.submit(prompt, params()) for prompt in PROMPTS]
        drained = drain(engine)
        assert [drained.tokens_of(each) for each in names] == [expected(prompt, mode) for prompt in PROMPTS]
        assert_nothing_held(engine)


@modes
@pytest.mark.parametrize("execution", [pytest.param("eager", marks=pytest.mark.slow), "graph"])
def test_beside_drafts(mode, execution, t_model, served, expected, drain, assert_nothing_held):
    """Texts that a method drafts, in the same steps and a pool that is too small for all."""
    drafting = Lossless(Method("random", Random(), Uniform(8)), 3)
    texts = [[text(30, 7)], [text(26, 8)]]
    engine = served(t_model, mode, execution=execution, pool_tokens=128, step_tokens=16)
    for _ in range(2):
        names = [engine.submit(prompt, params(9), method=drafting) for prompt in texts]
        names += [engine.submit(prompt, params(9)) for prompt in PROMPTS]
        drained = drain(engine)
        wanted = [expected(prompt, mode, 9) for prompt in [*texts, *PROMPTS]]
        assert [drained.tokens_of(each) for each in names] == wanted
        counts = [drained.completions[each].samples[0].drafts for each in names[:2]]
        assert all(count.drafted > 0 for count in counts)
        assert_nothing_held(engine)


@pytest.mark.gpu
@modes
@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_gpu(mode, execution, make_llama, served):
    """The compiled kernels beside the reference: fp32, images of three pages, chunks that end inside of them."""
    model = make_llama(head_dim=64, num_hidden_layers=3).cuda()
    prompts = [[text(20 + i, i), Picture(1, 70), text(9, 1), Picture(2, 40), text(7, 2)] for i in range(4)]
    found = []
    for backend in ("reference", "triton"):
        fields = {"page_policies": {"text": 16, "image": 24}, "pool_tokens": 4000, "step_tokens": 50}
        how = execution if backend == "triton" else "eager"
        engine = served(model, mode, backend=backend, execution=how, **fields)
        found += [[done.samples[0].token_ids for done in engine.generate(prompts, params(8))] for _ in range(2)]
        engine.check()
    assert found[0] == found[1] == found[2] == found[3]


class TestRepair:
    def test_all_of_it_is_exact(self, t_model, served, expected, drain):
        engine = served(t_model, RepairReuse(tokens=13))
        assert answers(engine, drain, [LONG]) == [expected(LONG, None)]
        assert engine.generate([LONG], params(1))[0].cached_tokens == served_exactly(t_model, served)

    def test_heads(self):
        assert [RepairReuse(tokens=4).head(9, 6), RepairReuse(tokens=0, pages=1).head(9, 6)] == [4, 6]
        assert [RepairReuse(tokens=40).head(9, 6), RepairReuse(share=0.5, tokens=0).head(9, 6)] == [9, 5]
        assert RepairReuse(tokens=2, pages=1, share=0.9).head(9, 6) == 9

    def test_pages_that_are_computed_anew_are_not_copied(self, t_model, served):
        engine = served(t_model, RepairReuse(tokens=0, pages=1))
        engine.generate([LONG], params(1))
        copied = []
        queue = engine._runner.copies.queue
        engine._runner.copies.queue = lambda copies: copied.extend(copies) or queue(copies)
        engine.generate([[text(2, 7), B, text(2)]], params(1))
        assert [pairs[:, 2].tolist() for pairs in copied] == [[2] * 6]  # 2 of 3 pages, 3 units each


def served_exactly(t_model, served):
    engine = served(t_model)
    return [engine.generate([LONG], params(1))[0].cached_tokens for _ in range(2)][1]


@modes
def test_an_exact_request_never_hits(mode, t_model, served, expected, drain, assert_nothing_held):
    engine = served(t_model, mode)
    prompt = [text(5), A, text(9, 1)]
    for reuse, cached in ((None, None), (PrefixReuse(), 5), (PrefixReuse(), 22), (mode, 22)):
        done_name = engine.submit(prompt, params(), reuse=reuse)
        done = engine.finish([done_name])[done_name]
        assert done.samples[0].token_ids == expected(prompt, reuse or mode)
        assert cached in (None, done.cached_tokens)
        engine.check()
    assert_nothing_held(engine)


@pytest.mark.parametrize("mode", [*MODES[:3], BlendReuse(share=0.3)], ids=lambda mode: mode.provenance[:16])
def test_an_encoder_beside_the_engine(mode, make_llama, served, drain, assert_nothing_held):
    """Images that are found are not asked for; those that are not are waited for, and others go on meanwhile."""
    model, encoder = make_llama(num_hidden_layers=4), FakeEncoder()
    wanted = answers(served(model, mode), drain, PROMPTS)
    with EncodeWorker(encoder) as worker:
        engine = served(model, mode, worker, step_tokens=9)
        for _ in range(2):
            assert answers(engine, drain, PROMPTS) == wanted
        asked = len(encoder.calls)
        if mode.name == "zero_copy":
            assert answers(engine, drain, [[text(9, 9), A, text(1)]]) and len(encoder.calls) == asked
        assert_nothing_held(engine)


def test_encoder_only_finds_text_alone(t_model, served, expected, drain, assert_nothing_held):
    encoder = FakeEncoder()
    engine = served(t_model, EncoderOnlyReuse(), encoder)
    prompt = [text(5), A, text(9, 1)]
    for cached in (0, 5, 5):
        done = engine.generate([prompt], params())[0]
        assert done.samples[0].token_ids == expected(prompt, None) and done.cached_tokens == cached
    assert len(encoder.calls) == 3
    assert_nothing_held(engine)


class TestRequests:
    @modes
    def test_samples(self, mode, t_model, served, expected, drain, assert_nothing_held):
        engine = served(t_model, mode, max_seqs=2)
        prompt = [text(5), A, text(3, 1), A, text(2)]
        alone = [answers(engine, drain, [prompt], temperature=0.9, seed=4 + i)[0] for i in range(2)]
        request = engine.submit(prompt, params(temperature=0.9, seed=4, n=2))
        assert drain(engine).tokens_of(request) == alone
        assert_nothing_held(engine)

    @modes
    @pytest.mark.parametrize("lost", [False, True])
    def test_sessions(self, mode, lost, t_model, served, expected, assert_nothing_held):
        """Turns that bring images, with the pages of the last turn or without; and a fork that goes on otherwise."""
        engine = served(t_model, mode)
        session = engine.session([text(5), A, text(2)])
        history, turns = [text(5), A, text(2)], [[], [B, text(3, 1)], [text(1), A, A, text(2, 2)]]
        for turn in turns:
            if turn:
                session.append(turn)
            fork = session.fork()
            history = [*history, *turn]
            new = expected(history, mode, 3)
            assert session.generate(params(3)).samples[0].token_ids == new
            engine.check()
            fork.append([B, text(2, 9)])
            assert fork.generate(params(3)).samples[0].token_ids == expected([*history, B, text(2, 9)], mode, 3)
            fork.close()
            engine.check()
            history = [*history, TokenSegment("text", new)]
            while lost and engine._scheduler.parked:
                engine._scheduler._reclaim()
            if lost:
                engine._pool.release(engine._pool.allocate(engine._pool.available))
            engine.check()
        session.close()
        assert_nothing_held(engine)

    @modes
    def test_aborted_at_every_step(self, mode, t_model, served, expected, drain, assert_nothing_held):
        for steps in range(12):
            engine = served(t_model, mode, step_tokens=5)
            request = engine.submit(LONG, params())
            other = engine.submit([text(2), B, text(2)], params())
            for _ in range(steps):
                engine.step()
                engine.check()
            engine.abort(request)
            engine.check()
            done = drain(engine)
            assert (
                done.completions.get(other) is None
                or done.tokens_of(other) == expected([text(2), B, text(2)], mode)[-len(done.tokens_of(other)) :]
            )
            assert_nothing_held(engine)

    @modes
    def test_an_image_that_cannot_be_encoded(self, mode, t_model, served, expected, assert_nothing_held):
        engine = served(t_model, mode)
        bad, good = [text(3), BROKEN, text(2)], [text(5), A, text(2)]
        with pytest.raises(BatchError, match="no such picture") as caught:
            engine.generate([bad, good, [text(1), BROKEN, text(1)]], params())
        assert [done and done.samples[0].token_ids for done in caught.value.completions] == [
            None, expected(good, mode), None,
        ]  # fmt: skip
        assert_nothing_held(engine)

    @modes
    def test_scores(self, mode, t_model, served, assert_nothing_held):
        """And log-probabilities of prompts: what a token that is not computed would say is not known."""
        engine = served(t_model, mode)
        target = ids(4, 8)
        logits, positions, rows = logits_of(t_model, [*LONG, TokenSegment("text", target)], mode)
        known = dict(zip(positions, torch.log_softmax(logits[rows].float(), -1), strict=True))
        start = sum(part.tokens if isinstance(part, Picture) else len(part.token_ids) for part in LONG)
        wanted = [float(known[start + i - 1][token]) for i, token in enumerate(target)]
        assert engine.score(LONG, target) == pytest.approx(wanted, abs=1e-4)
        name = engine.submit(LONG, params(1, prompt_logprobs=0))
        done = engine.finish([name])[name]
        computed_end = mode.head(9, 6) >= 9
        assert (done.prompt_logprobs[14] is None) == (not computed_end)  # behind the first image
        for at in (1, 4, 15, 16):
            token = done.prompt_token_ids[at]
            assert done.prompt_logprobs[at][token] == pytest.approx(float(known[at - 1][token]), abs=1e-4)
        assert_nothing_held(engine)


class TestRefusals:
    def test_of_prompts(self, t_model, served):
        engine = served(t_model, ZeroCopyReuse())
        with pytest.raises(ValueError, match=r"ends with an image.*'zero_copy'.*let text follow"):
            engine.submit([text(3), A])
        with pytest.raises(ValueError, match="see one another"):
            served(t_model, RepairReuse(tokens=3), FakeEncoder(True)).submit([A, text(2)])
        engine = served(t_model, RepairReuse(tokens=0), pool_tokens=24)
        with pytest.raises(CapacityError, match=r"of \d+ units|units"):
            engine.submit([text(3), A, text(2)], params(1))
        engine.check()
        assert served(t_model, ZeroCopyReuse(), pool_tokens=24).generate([[text(3), A, text(2)]], params(1))

    def test_of_engines(self, t_model, w_model, g_model, served):
        with pytest.raises(ValueError, match="'zero_copy' finds images in the prefix cache"):
            served(t_model, ZeroCopyReuse(), prefix_cache=False)
        for model in (w_model, g_model):
            with pytest.raises(ValueError, match="layer_groups=False"):
                served(model, COPY)
        with pytest.raises(ValueError, match="is no SegmentReuse"):
            served(t_model, "zero_copy")
        with pytest.raises(ValueError, match="is no SegmentReuse"):
            served(t_model).submit([text(3), A, text(1)], reuse=3)

    @pytest.mark.parametrize("fields", [{"tokens": -1}, {"pages": 1.5}, {"share": 1.5}, {"share": True}])
    def test_of_policies(self, fields):
        with pytest.raises(ValueError, match=f"{next(iter(fields))} must be"):
            RepairReuse(**fields)


@settings(max_examples=15)
@given(data=st.data())
def test_any_traffic(data, t_model, served, expected, drain, assert_nothing_held):
    """Requests of any texts and images and modes, on any steps and pools, with preemptions and aborts in between."""
    parts = st.one_of(
        st.builds(Picture, st.integers(1, 3), st.integers(1, 8)), st.builds(text, st.integers(1, 6), st.integers(0, 2))
    )
    engine = served(t_model, step_tokens=data.draw(st.integers(1, 20)), pool_tokens=180)
    prompts, done = {}, {}
    for prompt in data.draw(st.lists(st.lists(parts, min_size=1, max_size=5), min_size=1, max_size=4)):
        mode, prompt = data.draw(st.sampled_from([None, *MODES])), [*prompt, text(1)]
        prompts[engine.submit(prompt, params(3), reuse=mode)] = prompt, mode
        for _ in range(data.draw(st.integers(0, 3))):
            done |= {out.request_id: out.completion for out in engine.step() if out.completion}
            engine.check()
            live = engine._scheduler.running
            what = data.draw(st.sampled_from(["nothing", "preempt", "abort"])) if live else "nothing"
            if what == "preempt":
                preempt(engine, data.draw(st.sampled_from(live)))
            elif what == "abort":
                sequence = data.draw(st.sampled_from(live))
                engine.abort((sequence.serves or sequence).request.request_id)
            engine.check()
    done |= drain(engine).completions
    for name, (prompt, mode) in prompts.items():
        (sample,) = done[name].samples
        wanted = expected(prompt, mode, 3)
        assert sample.token_ids == (wanted if sample.finish_reason == "length" else wanted[: len(sample.token_ids)])
        assert sample.finish_reason in ("length", "abort")
    assert_nothing_held(engine)
