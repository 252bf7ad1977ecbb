"""Images in prompts, on real engines, against plain transformers with ``inputs_embeds``."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import Engine, EngineConfig
from octavo.core.memory import prefix_cache
from octavo.core.serving.prompts import TokenSegment

from ..pictures import VOCAB, A, B, C, FakeEncoder, Picture, ids, preempt, text
from .image_cases import LONG, PROMPTS, answers, length, logits_of, params


@pytest.fixture(params=["t_model", "g_model"])
def model(request):
    return request.getfixturevalue(request.param)


both_ways = pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "bidirectional"])


@both_ways
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_answers_of_every_chunk_size(
    backend, bidirectional, model, t_model, served, expected, drain, assert_nothing_held
):
    """With what was computed before in the cache, and without."""
    wanted = expected(model, LONG, bidirectional)
    stride = 1 if backend == "cpu" and model is t_model and bidirectional else 7
    for step_tokens in range(B.tokens if bidirectional else 1, length(LONG) + 1, stride):
        engine = served(model, FakeEncoder(bidirectional), step_tokens=step_tokens, backend=backend)
        for _ in range(2):
            assert answers(engine, drain, [LONG]) == [wanted], step_tokens
        assert engine.stats().hit_tokens > 0
        assert_nothing_held(engine)


@both_ways
@pytest.mark.parametrize("step_tokens", [14, 8192])
def test_mixed_batches(step_tokens, bidirectional, model, served, expected, drain, assert_nothing_held):
    engine = served(model, FakeEncoder(bidirectional), step_tokens=step_tokens, max_seqs=3)
    wanted = [expected(model, prompt, bidirectional) for prompt in PROMPTS]
    for _ in range(2):
        assert answers(engine, drain, PROMPTS) == wanted
    assert_nothing_held(engine)


@both_ways
def test_preempted_at_every_step(bidirectional, model, served, expected, drain, assert_nothing_held):
    """And found again in the cache, or not; the encoder is asked again for an image that was under way."""
    prompt = [text(5), A, text(3, 1), B]
    wanted = expected(model, prompt, bidirectional)
    for prefix_cache_on in (True, False):
        step = steps = 0
        while step <= steps:
            engine = served(model, FakeEncoder(bidirectional), step_tokens=13, prefix_cache=prefix_cache_on)
            name = engine.submit(prompt, params())

            def interfere(drained, engine=engine, step=step):
                if drained.steps == step and engine._scheduler.running:
                    preempt(engine, engine._scheduler.running[0])

            drained = drain(engine, interfere)
            assert drained.tokens_of(name) == wanted, step
            assert engine.stats().preemptions == (0 < step < drained.steps)
            assert_nothing_held(engine)
            steps = drained.steps if step == 0 else steps
            step += 1
        assert steps == 8


def test_a_pool_that_is_too_small_for_all(model, t_model, served, expected, drain, assert_nothing_held):
    engine = served(model, FakeEncoder(True), pool_tokens=96 if model is t_model else 52, step_tokens=24)
    prompts = [[text(7, i), Picture(10 + i, 9), text(3, 20 + i)] for i in range(4)]
    wanted = [expected(model, prompt, True, 14) for prompt in prompts]
    assert answers(engine, drain, prompts, tokens=14) == wanted
    assert engine.stats().preemptions > 0
    assert_nothing_held(engine)


class TestHits:
    @both_ways
    def test_that_end_inside_an_image(self, bidirectional, t_model, served, expected, drain, assert_nothing_held):
        """Pages go from the tail. Text 5 on pages of 4, an image of 13 on pages of 6: pages begin at 4, 5, 11, 17."""
        prompt = [text(5), B, text(1, 1)]
        for gone, cached in enumerate([18, 5, 5, 5, 4, 0] if bidirectional else [18, 17, 11, 5, 4, 0]):
            encoder = FakeEncoder(bidirectional)
            engine = served(t_model, encoder)
            engine.generate([prompt], params(1))
            encoder.calls.clear()
            for _ in range(gone):
                tail = max(engine._pool.index._of_page, key=lambda page: engine._pool.index.node(page).end)
                pages = engine._pool.allocate(engine._pool.free_units + 1)
                assert tail not in engine._pool.index
                engine._pool.release(pages)
            name = engine.submit(prompt, params())
            drained = drain(engine)
            assert drained.completions[name].cached_tokens == cached
            assert drained.tokens_of(name) == expected(t_model, prompt, bidirectional)
            assert encoder.calls == ([] if cached == 18 else [[B]])
            assert_nothing_held(engine)

    @both_ways
    def test_the_last_token_is_computed_again(self, bidirectional, t_model, served, expected):
        """Its logits are wanted; where it is of an image that sees both ways, so is all of the image."""
        engine = served(t_model, FakeEncoder(bidirectional))
        prompt = [text(5), Picture(4, 12)]
        for cached in (0, 5 if bidirectional else 11):
            done = engine.generate([prompt], params())[0]
            assert done.cached_tokens == cached
            assert done.samples[0].token_ids == expected(t_model, prompt, bidirectional)

    @pytest.mark.parametrize(
        ("other", "cached"),
        [
            ([text(5), A, text(8, 1)], 14),
            ([text(5), A, text(8, 2)], 14),
            ([text(5), Picture(8), text(8, 1)], 5),
            ([text(4), A, text(8, 1)], 4),
            ([A, text(8, 1)], 0),
            ([text(5), A, A, text(8, 1)], 14),
            ([text(5), TokenSegment("image", ids(9)), text(8, 1)], 5),
        ],
    )
    def test_are_of_the_same_image_in_the_same_place(self, other, cached, t_model, served):
        engine = served(t_model, pool_tokens=800)
        engine.generate([[text(5), A, text(3, 1)]], params(1))
        done = engine.generate([other], params(4))[0]
        assert done.cached_tokens == cached
        assert done.samples == served(t_model, prefix_cache=False).generate([other], params(4))[0].samples

    def test_equal_placeholders_are_not_equal_images(self, t_model, served, expected, monkeypatch):
        """Keys of pages collide, and identities too, but for the witness."""
        encoder = FakeEncoder()
        encoder.identity = lambda item: bytes(32)
        encoder.witness = lambda item: bytes([item.seed])
        monkeypatch.setattr(prefix_cache, "digest256", lambda *parts: bytes(32))
        engine = served(t_model, encoder)
        for picture in (A, Picture(7), A):
            done = engine.generate([[text(5), picture, text(3)]], params())[0]
            assert done.samples[0].token_ids == expected(t_model, [text(5), picture, text(3)])
            engine.check()
        assert done.cached_tokens == 14

    def test_keys_do_not_depend_on_the_process(self, t_model, served):
        found = []
        for bidirectional in (False, True):
            engine = served(t_model, FakeEncoder(bidirectional))
            engine.submit([A, text(1)])
            (sequence,) = engine._scheduler.waiting
            found.append([key.hex()[:16] for key in sequence.keys(2)])
        assert found == KEYS

    def test_a_salt_keeps_images_apart(self, t_model, served):
        engine = served(t_model)
        for salt, cached in (("a", 0), ("b", 0), ("a", 9)):
            name = engine.submit([A, text(3)], params(1), salt=salt)
            assert engine.finish([name])[name].cached_tokens == cached


KEYS = [["10b0d229ffc72918", "66e7c7910796566e"], ["2e944fe907c739dc", "0751fb36ec813f8c"]]


class TestEncoder:
    def test_is_asked_once_a_step_for_equal_images(self, t_model, served, drain):
        encoder = FakeEncoder()
        engine = served(t_model, encoder)
        answers(engine, drain, [[A, text(2)], [text(3), A], [text(3, 7), Picture(5), C], [text(4)]])
        assert encoder.calls == [[C], [A, Picture(5)]]  # as many calls as there are lengths
        assert not engine._items._held

    def test_is_not_asked_by_a_step_of_text(self, t_model, served):
        engine = served(t_model, step_tokens=5)
        forward, embedded = engine._model.forward, []
        engine._model.forward = lambda *args: embedded.append(args[4]) or forward(*args)
        engine.generate([[text(5), Picture(5, 7), text(3)]], params(3))
        assert [rows is not None for rows in embedded] == [False, True, True, False, False]
        assert [len(at) for at, _ in embedded[1:3]] == [5, 2]

    def test_embeddings_are_kept_until_the_last_token(self, t_model, served, drain):
        encoder = FakeEncoder()
        engine = served(t_model, encoder, step_tokens=5)
        engine.submit([Picture(5, 12)], params(1))
        kept = []
        drain(engine, lambda drained: kept.append(len(engine._items._held)))
        assert kept == [1, 1, 0] and len(encoder.calls) == 1

    def test_reads_once(self, t_model, served, expected):
        """What ``read`` gave is what is encoded, whatever becomes of the item."""
        encoder = FakeEncoder()
        encoder.read = lambda box: Picture(*box)
        engine = served(t_model, encoder)
        box = [1, 9]
        name = engine.submit([text(5), box], params())
        box[0] = 2
        assert engine.finish([name])[name].samples[0].token_ids == expected(t_model, [text(5), A])
        assert encoder.calls == [[A]]

    def test_of_a_model_in_another_dtype(self, make_llama, served):
        model = make_llama(seed=3).to(torch.bfloat16)
        done = served(model).generate([LONG], params(4))[0]
        assert len(done.samples[0].token_ids) == 4


class TestRequests:
    @both_ways
    def test_samples(self, bidirectional, t_model, served, expected, drain, assert_nothing_held):
        engine = served(t_model, FakeEncoder(bidirectional), max_seqs=2)
        prompt = [text(5), A, text(3, 1), C]
        assert answers(engine, drain, [prompt], tokens=5) == [expected(t_model, prompt, bidirectional, 5)]
        alone = [answers(engine, drain, [prompt], temperature=0.9, seed=4 + i)[0] for i in range(2)]
        name = engine.submit(prompt, params(temperature=0.9, seed=4, n=2))
        assert drain(engine).tokens_of(name) == alone
        assert_nothing_held(engine)

    def test_aborted_at_every_step(self, model, served, assert_nothing_held):
        for steps in range(9):
            engine = served(model, FakeEncoder(), step_tokens=5)
            name = engine.submit(LONG, params())
            for _ in range(steps):
                engine.step()
                engine.check()
            engine.abort(name)
            engine.check()
            assert not engine._items._held
            assert engine.step()[-1].completion.samples[0].finish_reason == "abort"
            assert_nothing_held(engine)

    @both_ways
    def test_scores(self, bidirectional, model, served, assert_nothing_held):
        engine = served(model, FakeEncoder(bidirectional), step_tokens=13)
        target = ids(4, 9)
        for prompt in ([text(5), A], [text(5), A, text(2)], [text(5), A]):
            logprobs = logits_of(model, prompt, bidirectional, target).log_softmax(1)
            wanted = [float(logprobs[length(prompt) - 1 + i, token]) for i, token in enumerate(target)]
            assert engine.score(prompt, target) == pytest.approx(wanted, abs=2e-4)
            engine.check()
        assert_nothing_held(engine)

    @both_ways
    def test_prompt_logprobs(self, bidirectional, model, served, monkeypatch):
        """None at an image's positions; the text behind it is scored from the image's last."""
        monkeypatch.setattr("octavo.core.sequence.KNOWN_LOGPROB_ROWS", 3)  # less than an image has
        engine = served(model, FakeEncoder(bidirectional))
        prompt = [text(5), A, text(3, 1), C]
        done = engine.generate([prompt], params(1, prompt_logprobs=0))[0]
        logprobs = logits_of(model, prompt, bidirectional).log_softmax(1)
        assert len(done.prompt_logprobs) == length(prompt)
        for at, (token, entry) in enumerate(zip(done.prompt_token_ids, done.prompt_logprobs, strict=True)):
            if at == 0 or token >= VOCAB:
                assert entry is None
            else:
                assert entry == {token: pytest.approx(float(logprobs[at - 1, token]), abs=2e-4)}

    def test_prompt_token_ids(self, t_model, served):
        done = served(t_model).generate([[text(2), A, C, A]], params(1))[0].prompt_token_ids
        a, c = done[2], done[11]
        assert done == [*ids(2), *[a] * 9, *[c] * 4, *[a] * 9]
        assert a != c and min(a, c) >= VOCAB and max(a, c) < 2**31

    def test_a_repetition_penalty_knows_no_images(self, t_model, served, engine_for):
        done = served(t_model).generate([[A]], params(repetition_penalty=1e9))[0]
        assert len(set(done.samples[0].token_ids)) == 6

    def test_an_image_waits_for_room_in_a_step_but_not_for_ever(self, t_model, served, expected, drain):
        """Two decode while an image comes that takes a whole step."""
        engine = served(t_model, FakeEncoder(True), step_tokens=B.tokens)
        beside = [engine.submit([text(4, i)], params(20)) for i in range(2)]
        engine.step()
        name = engine.submit([text(4, 1), B], params())
        order = []
        drained = drain(engine, lambda drained: order.append([key[0] for key in drained.tokens]))
        assert drained.tokens_of(name) == expected(t_model, [text(4, 1), B], True)
        assert drained.completions[name].cached_tokens == 4
        assert drained.order.index(name) < drained.order.index(beside[0])
        assert [len(drained.tokens[other, 0]) for other in beside] == [19, 19]


class TestSessions:
    @both_ways
    @pytest.mark.parametrize("lost", [False, True])
    def test_that_append_images_and_fork(
        self, lost, bidirectional, model, served, expected, give_everything_up, assert_nothing_held
    ):
        engine = served(model, FakeEncoder(bidirectional), step_tokens=14, pool_tokens=600)
        history = [text(5), A]
        session = engine.session(history)
        twin = None
        for turn, added in enumerate(([text(3, 2)], [B, text(2, 3)], [C], [C, A])):
            session.append(added)
            history = [*history, *added]
            got = session.generate(params(4)).samples[0].token_ids
            assert got == expected(model, history, bidirectional, 4)
            history = [*history, TokenSegment("text", got)]
            engine.check()
            if turn == 1:
                twin, branch = session.fork(), history
            if lost:
                give_everything_up(engine)
        twin.append([A])
        done = twin.generate(params(4))
        assert done.samples[0].token_ids == expected(model, [*branch, A], bidirectional, 4)
        session.close()
        twin.close()
        assert_nothing_held(engine)

    @both_ways
    def test_a_turn_that_is_repeated_at_an_image(self, bidirectional, t_model, served, expected):
        """The turn is aborted behind its prompt, so the session's pages hold all of the image."""
        engine = served(t_model, FakeEncoder(bidirectional))
        session = engine.session([text(5), B])
        name = session.submit(params(9))
        engine.step()
        engine.abort(name)
        engine.step()
        session.tokens = session.tokens[: 5 + B.tokens]
        engine.check()
        got = session.generate(params())
        assert got.samples[0].token_ids == expected(t_model, [text(5), B], bidirectional)
        assert got.cached_tokens == (5 if bidirectional else 17)


class TestText:
    def test_special_tokens_begin_the_prompt(self, make_llama, served, byte_tokenizer):
        engine = served(make_llama(vocab=258), tokenizer=byte_tokenizer)
        for prompt, begin in (
            ([A, "ab"], [256, *[None] * 9, 97, 98]),
            (["a", "b", A, "", "c"], [256, 97, 98, *[None] * 9, 99]),
            ([A], [256, *[None] * 9]),
            (["", A], [256, *[None] * 9]),
        ):
            tokens = engine.generate([prompt], params(1))[0].prompt_token_ids
            assert [token if token < 258 else None for token in tokens] == begin

    def test_pages_of_images_are_half_as_large_again(self, t_model):
        for page, image in ((16, 24), (8, 12), (5, 10)):
            engine = Engine(t_model, None, EngineConfig(page_tokens=page), encoders={"image": FakeEncoder()})
            assert engine.config.policies["image"].page_tokens(576) == image
            assert engine.config.policies["text"].page_tokens(None) == page
        assert "image" not in Engine(t_model, None, EngineConfig()).config.policies


@settings(max_examples=25)
@given(data=st.data())
def test_any_traffic(data, t_model, served, expected, drain, assert_nothing_held):
    """Requests of any texts and images, on any steps and pools, with preemptions and aborts in between."""
    parts = st.one_of(
        st.builds(Picture, st.integers(1, 3), st.integers(1, 8)), st.builds(text, st.integers(1, 6), st.integers(0, 2))
    )
    bidirectional = data.draw(st.booleans())
    engine = served(t_model, FakeEncoder(bidirectional), step_tokens=data.draw(st.integers(8, 20)), pool_tokens=120)
    prompts, done = {}, {}
    for prompt in data.draw(st.lists(st.lists(parts, min_size=1, max_size=4), min_size=1, max_size=4)):
        prompts[engine.submit(prompt, params(3))] = prompt
        for _ in range(data.draw(st.integers(0, 2))):
            done |= {out.request_id: out.completion for out in engine.step() if out.completion}
            engine.check()
            running = engine._scheduler.running
            what = data.draw(st.sampled_from(["nothing", "preempt", "abort"])) if running else "nothing"
            if what == "preempt":
                preempt(engine, data.draw(st.sampled_from(running)))
            elif what == "abort":
                engine.abort(data.draw(st.sampled_from(running)).request.request_id)
            engine.check()
    done |= drain(engine).completions
    for name, prompt in prompts.items():
        (sample,) = done[name].samples
        wanted = expected(t_model, prompt, bidirectional, 3)
        assert sample.token_ids == (wanted if sample.finish_reason == "length" else wanted[: len(sample.token_ids)])
        assert sample.finish_reason in ("length", "abort")
    assert_nothing_held(engine)
