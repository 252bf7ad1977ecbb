"""An encoder that works beside the engine: the same tokens, nobody waits for another's image, and whatever happens
while an image is being encoded, somebody gets on and nothing is left behind."""

from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import BatchError, EngineConfig, SamplingParams

from ..cells import covering
from ..pictures import A, B, C, FakeEncoder, Picture, ids, image_engine, text


class Beside(FakeEncoder):
    """Hands out futures; ``finish`` resolves some, and a step that must wait has the oldest resolved."""

    def __init__(self, bidirectional=False, bad=()):
        super().__init__(bidirectional)
        self.pending, self.asked, self.bad = [], [], set(bad)

    def encode(self, items):
        raise AssertionError("nobody encodes in the engine's thread")

    def submit(self, items):
        futures = [Future() for _ in items]
        self.asked += items
        self.pending += zip(items, futures, strict=True)
        return futures

    def finish(self, count=None):
        done, self.pending = self.pending[:count], self.pending[len(self.pending[:count]) :]
        for item, future in done:
            if future.set_running_or_notify_cancel():
                if item in self.bad:
                    future.set_exception(RuntimeError(f"no {item.seed}"))
                else:
                    future.set_result(self.rows(item))
        return len(done)


def params(tokens=6, **more):
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **more)


LONG = [text(5), A, text(3, 1), B]
PROMPTS = [LONG, [A, text(4, 2)], [text(17, 3), C], [C, C], [text(11, 4)], [text(9, 5), Picture(4, 6)]]


@pytest.fixture(params=["t_model", "g_model"])
def model(request):
    return request.getfixturevalue(request.param)


both_ways = pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "bidirectional"])


@pytest.fixture(scope="module")
def build(poison_pool):
    def build(model, encoder, **fields):
        return image_engine(model, poison_pool, encoder, **fields)

    return build


@pytest.fixture
def served(build, monkeypatch):
    """As ``build``; where the engine would wait for ever, the encoder gets on by one item."""

    def wait(busy, return_when):
        assert not any(future.done() for future in busy), "it waits for what is there"
        encoders = {engine._items._encoder for engine in engines}
        assert any(encoder.finish(1) for encoder in encoders if isinstance(encoder, Beside)), "it waits for nothing"

    engines = []
    monkeypatch.setattr("octavo.core.engine.wait", wait)
    return lambda *args, **fields: engines.append(build(*args, **fields)) or engines[-1]


@pytest.fixture(scope="module")
def wanted(build, drain):
    """``wanted(model, prompt, bidirectional, n)``: what an engine answers whose encoder works in its thread."""
    known = {}

    def answer(model, prompt, bidirectional=False, n=6):
        key = id(model), repr(prompt), bidirectional, n
        if key not in known:
            engine = build(model, FakeEncoder(bidirectional))
            known[key] = engine.generate([prompt], params(n))[0].samples[0].token_ids
        return known[key]

    return answer


@pytest.mark.parametrize(
    ("fields", "model", "bidirectional"),
    covering(
        [{}, {"step_tokens": 14}, {"encode_tokens": 1}, {"pool_tokens": 64}],
        ["t_model", "g_model"],
        [False, True],
        together=2,
    ),
    indirect=["model"],
)
def test_the_same_tokens(fields, bidirectional, model, served, wanted, drain, assert_nothing_held):
    engine = served(model, Beside(bidirectional), **fields)
    for _ in range(2):
        names = [engine.submit(prompt, params()) for prompt in PROMPTS]
        drained = drain(engine)
        for name, prompt in zip(names, PROMPTS, strict=True):
            assert drained.tokens_of(name) == wanted(model, prompt, bidirectional)
    assert not engine._items._held and not engine._items._encoder.pending
    assert_nothing_held(engine)


class TestNobodyWaitsForAnothersImage:
    def test_text_is_decoded_meanwhile(self, t_model, served, wanted):
        """One token a step, though an image is never done; and a text that comes later is served, too."""
        encoder = Beside()
        engine = served(t_model, encoder)
        first = engine.submit([text(4)], params(8))
        blocked = engine.submit([text(2), A], params())
        engine.step()
        later = engine.submit([text(7, 1)], params(4))
        news = [engine.step() for _ in range(7)]
        got = {name: [t for outs in news for o in outs if o.request_id == name for t in o.new_token_ids]
               for name in (first, later)}  # fmt: skip
        assert got[later] == wanted(t_model, [text(7, 1)], n=4) and got[first] == wanted(t_model, [text(4)], n=8)[1:]
        assert encoder.asked == [A] and engine.stats().waiting == 1
        encoder.finish()
        assert engine.finish([blocked])[blocked].samples[0].token_ids == wanted(t_model, [text(2), A])

    def test_decode_steps_are_still_replayed(self, t_model, served):
        engine = served(t_model, Beside(), execution="graph")
        engine.submit([text(4)], params(9))
        engine.submit([text(2), A], params())
        engine.step()
        launched, launch = [], engine._runner.launch
        engine._runner.launch = lambda plan, *args, **how: (
            launched.append(len(plan.batch)) or launch(plan, *args, **how)
        )
        for _ in range(4):
            engine.step()
        assert launched == [1] * 4

    def test_a_running_sequence_in_front_of_an_image(self, t_model, served, wanted, drain):
        """It holds its pages, has computed all but the token in front of its second image, which its next step holds as
        well, and steps go to the other."""
        encoder = Beside()
        engine = served(t_model, encoder, step_tokens=9, encode_tokens=1)
        name = engine.submit([A, text(9, 3), Picture(9, 4)], params())
        other = engine.submit([text(3)], params(12))
        engine.step()
        encoder.finish()
        for _ in range(4):
            engine.step()
            engine.check()
        running = {s.request.request_id: s.computed for s in engine._scheduler.running}
        assert running[name] == 17 and encoder.asked == [A, Picture(9, 4)]
        drained = drain(engine)
        assert len(drained.tokens[other, 0]) == 8  # four came while the image was being encoded
        assert drained.completions[name].samples[0].token_ids == wanted(t_model, [A, text(9, 3), Picture(9, 4)])

    def test_a_step_that_has_nothing_else_to_do_waits(self, t_model, build, wanted):
        """With a real thread behind the encoder."""
        import threading
        import time

        encoder = Beside()
        engine = build(t_model, encoder)
        name = engine.submit([text(2), A], params())

        def work():
            while not encoder.pending:
                time.sleep(0.001)
            time.sleep(0.02)
            encoder.finish()

        thread = threading.Thread(target=work)
        thread.start()
        assert engine.finish([name])[name].samples[0].token_ids == wanted(t_model, [text(2), A])
        thread.join()

    def test_an_image_that_is_done_just_when_nobody_else_has_work(self, t_model, served, wanted):
        """Between the look at the image and the look at who else is at work."""
        encoder = Beside()
        engine = served(t_model, encoder)
        name = engine.submit([text(2), A], params())
        schedule = engine._scheduler.schedule

        def late():
            plan = schedule()
            encoder.finish()
            return plan

        engine._scheduler.schedule = late
        assert engine.finish([name])[name].samples[0].token_ids == wanted(t_model, [text(2), A])


class TestBudget:
    def test_images_of_waiting_requests_are_encoded_ahead(self, t_model, served, drain):
        """Three images of 9 tokens fit into 30; the fourth is asked for when the first is computed."""
        encoder = Beside()
        engine = served(t_model, encoder, encode_tokens=30, max_seqs=1)
        pictures = [Picture(40 + i) for i in range(5)]
        for picture in pictures:
            engine.submit([picture, text(2)], params(3))
        encoder_asked = []
        drained = drain(engine, lambda drained: encoder_asked.append(len(encoder.asked)))
        assert encoder.asked == pictures and encoder_asked[0] in (3, 4) and len(drained.completions) == 5
        assert encoder_asked == sorted(encoder_asked)

    def test_a_budget_bounds_what_is_held(self, t_model, served, drain):
        engine = served(t_model, Beside(), encode_tokens=30, max_seqs=3)
        for i in range(9):
            engine.submit([text(2), Picture(60 + i), Picture(70 + i), text(1)], params(2))
        held = []
        drain(engine, lambda drained: held.append(engine._items.held_tokens))
        assert max(held) <= 30

    @pytest.mark.parametrize("beside", [False, True])
    def test_an_image_larger_than_the_budget(self, beside, t_model, served, wanted):
        engine = served(t_model, Beside() if beside else FakeEncoder(), encode_tokens=1)
        prompts = [[A, B, C], [text(3), B]]
        done = engine.generate(prompts, params())
        assert [d.samples[0].token_ids for d in done] == [wanted(t_model, prompt) for prompt in prompts]

    def test_of_a_plain_encoder_is_per_step(self, t_model, served, drain, wanted):
        """Images of 9 tokens, 20 a step: two, and of the third request only the text in front."""
        encoder = FakeEncoder()
        engine = served(t_model, encoder, encode_tokens=20)
        prompts = [[text(2, i), Picture(50 + i)] for i in range(5)]
        names = [engine.submit(prompt, params(3)) for prompt in prompts]
        drained = drain(engine)
        assert [len(call) for call in encoder.calls] == [2, 2, 1]
        for name, prompt in zip(names, prompts, strict=True):
            assert drained.tokens_of(name) == wanted(t_model, prompt, n=3)

    def test_what_is_in_the_cache_is_not_asked_for(self, t_model, served, drain):
        encoder = Beside()
        engine = served(t_model, encoder, max_seqs=1)
        for _ in range(3):
            engine.submit([A, text(6)], params(3))
        drain(engine)
        assert encoder.asked == [A]

    @pytest.mark.parametrize("value", [0, -1, True, 2.5])
    def test_nonsense(self, value):
        with pytest.raises(ValueError, match="encode_tokens"):
            EngineConfig(encode_tokens=value)


INTERFERENCE = covering(["preempt", "abort", "evict"], [0, 1, 3], [False, True], ["t_model", "g_model"], together=2)


class TestInterference:
    @pytest.mark.parametrize(("what", "lag", "bidirectional", "model"), INTERFERENCE, indirect=["model"])
    def test_at_every_step(
        self, lag, what, bidirectional, model, served, wanted, drain, give_everything_up, assert_nothing_held
    ):
        """An image is done ``lag`` steps after it was asked for, or when nobody has anything else to do."""
        prompt, step, ended = [text(5), A, text(3, 1), B], 0, False
        while not ended:
            encoder = Beside(bidirectional)
            engine = served(model, encoder, step_tokens=14, encode_tokens=10)
            names = [engine.submit(prompt, params(4)), engine.submit([text(3, 2)], params(4))]

            def interfere(drained, engine=engine, encoder=encoder, names=names, step=step):
                if drained.steps % (lag + 1) == 0:
                    encoder.finish(1)
                if drained.steps != step:
                    return
                queue = [*engine._scheduler.running, *engine._scheduler.waiting]
                mine = [sequence for sequence in queue if sequence.request.request_id == names[0]]
                if what == "evict":
                    pages = engine._pool.allocate(engine._pool.available)
                    engine._pool.release(pages)
                elif what == "abort":
                    engine.abort(names[0])
                elif mine and mine[0] in engine._scheduler.running:
                    engine._scheduler.preempt(mine[0])
                engine._items.keep()
                engine.check()

            drained = drain(engine, interfere)
            want = wanted(model, prompt, bidirectional, 4)
            got = drained.completions[names[0]].samples[0]
            assert got.token_ids == want[: len(got.token_ids)] and got.finish_reason in ("length", "abort")
            assert what == "abort" or got.finish_reason == "length"
            assert drained.completions[names[1]].samples[0].token_ids == wanted(model, [text(3, 2)], n=4)
            assert not engine._items._held
            assert_nothing_held(engine)
            ended, step = step > drained.steps, step + 1

    def test_a_preempted_sequence_finds_its_image_again(self, t_model, served, drain):
        encoder = Beside()
        engine = served(t_model, encoder, step_tokens=6, prefix_cache=False)
        engine.submit([text(3), B, text(2)], params())

        def interfere(drained):
            if drained.steps == 2:
                engine._scheduler.preempt(engine._scheduler.running[0])

        drain(engine, interfere)
        assert encoder.asked == [B] and engine.stats().preemptions == 1

    def test_an_aborted_request_takes_its_images_back(self, t_model, served):
        encoder = Beside()
        engine = served(t_model, encoder)
        names = [engine.submit([text(2), picture], params()) for picture in (A, A, B)]
        beside = engine.submit([text(2)], params(9))
        engine.step()
        (of_a, of_b) = [future for _, future in encoder.pending]
        engine.abort(names[0])
        assert not of_a.cancelled()  # somebody else wants it
        engine.abort(names[1])
        engine.abort(names[2])
        assert of_a.cancelled() and of_b.cancelled()
        engine.check()
        assert engine.finish([beside])

    def test_the_same_image_is_encoded_once_for_all(self, t_model, served, drain):
        encoder = Beside()
        engine = served(t_model, encoder, prefix_cache=False)
        for seed in range(3):
            engine.submit([text(2, seed), A, text(2), A], params(3))
        drain(engine)
        assert encoder.asked == [A]


class TestErrors:
    def test_fail_their_own_requests(self, t_model, served, wanted, assert_nothing_held):
        bad = Picture(99)
        engine = served(t_model, Beside(bad=[bad]))
        good = [text(5), A]
        with pytest.raises(BatchError) as caught:
            engine.generate([good, [text(7, 3), bad], good, [bad]], params())
        want = wanted(t_model, good)
        assert [one and one.samples[0].token_ids for one in caught.value.completions] == [want, None, want, None]
        for error in caught.value.errors.values():
            with pytest.raises(ValueError, match=r"the image encoder failed: RuntimeError\('no 99'\)"):
                raise error
        assert_nothing_held(engine)

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (lambda rows: rows[1:], r"embeddings of \(8, 64\), and \(9, 64\) were due"),
            (lambda rows: rows[:, 1:], r"embeddings of \(9, 63\)"),
            (lambda rows: None, "embeddings of NoneType"),
        ],
    )
    def test_of_shape(self, rows, message, t_model, served):
        encoder = Beside()
        whole = encoder.rows
        encoder.rows = lambda item: rows(whole(item))
        with pytest.raises(BatchError, match=message):
            served(t_model, encoder).generate([[A]], params())

    def test_a_worker_that_takes_nothing(self, t_model, served):
        encoder = Beside()

        def submit(items):
            raise RuntimeError("the encode worker is closed")

        encoder.submit = submit
        engine = served(t_model, encoder)
        with pytest.raises(BatchError, match="closed"):
            engine.generate([[A], ids(3)], params(2))
        assert not engine.has_work()


@settings(max_examples=15)
@given(data=st.data())
def test_any_traffic(data, t_model, build, wanted, drain, assert_nothing_held):
    """Requests of any texts and images, on any budgets, with preemptions, aborts and evictions while images are under
    way; every step gives somebody a token to compute, or waits for an image."""
    parts = st.one_of(
        st.builds(Picture, st.integers(1, 3), st.integers(1, 8)), st.builds(text, st.integers(1, 6), st.integers(0, 2))
    )
    encoder = Beside(data.draw(st.booleans()))
    engine = build(
        t_model, encoder, step_tokens=data.draw(st.integers(8, 20)), pool_tokens=data.draw(st.sampled_from([60, 120])),
        encode_tokens=data.draw(st.integers(1, 20)), max_seqs=data.draw(st.integers(1, 4)),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.core.engine.wait", lambda busy, return_when: encoder.finish(1))
        prompts, done = {}, {}

        def step():
            before = engine._steps
            news = engine.step()
            done.update({out.request_id: out.completion for out in news if out.completion})
            assert engine._steps > before or news
            engine.check()

        for prompt in data.draw(st.lists(st.lists(parts, min_size=1, max_size=4), min_size=1, max_size=4)):
            prompts[engine.submit(prompt, params(3), priority=data.draw(st.integers(0, 1)))] = prompt
            for _ in range(data.draw(st.integers(0, 2))):
                if engine.has_work():
                    step()
                queue = [*engine._scheduler.running, *engine._scheduler.waiting]
                what = data.draw(st.sampled_from(["nothing", "preempt", "abort", "finish", "evict"]))
                if what == "preempt" and engine._scheduler.running:
                    engine._scheduler.preempt(data.draw(st.sampled_from(engine._scheduler.running)))
                elif what == "abort" and queue:
                    engine.abort(data.draw(st.sampled_from(queue)).request.request_id)
                elif what == "finish":
                    encoder.finish(1)
                elif what == "evict":
                    engine._pool.release(engine._pool.allocate(engine._pool.available))
                engine._items.keep()
                engine.check()
        while engine.has_work():
            step()
    for name, prompt in prompts.items():
        (sample,) = done[name].samples
        want = wanted(t_model, prompt, encoder.bidirectional, 3)
        assert sample.token_ids == (want if sample.finish_reason == "length" else want[: len(sample.token_ids)])
        assert sample.finish_reason in ("length", "abort")
    assert not engine._items._held
    assert_nothing_held(engine)
