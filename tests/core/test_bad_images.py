"""Images and encoders that are no good: refused where they are given, or failing the requests that hold them alone."""

import pytest
import torch

from octavo.core import BatchError, CapacityError, Engine, EngineConfig
from octavo.core.serving.prompts import TokenSegment

from ..pictures import A, B, FakeEncoder, Picture, text
from .image_cases import params


@pytest.fixture(params=["t_model", "g_model"])
def model(request):
    return request.getfixturevalue(request.param)


class Broken(FakeEncoder):
    """Fails where ``fails`` says, as ``how`` says."""

    def __init__(self, fails, how, bidirectional=False):
        super().__init__(bidirectional)
        self.how = how
        if fails != "encode":
            setattr(self, fails, lambda item: self.act(item, getattr(FakeEncoder, fails, None)))
        else:
            self.encode = self.act_all

    def act(self, item, whole):
        if item.seed < 100:
            return whole(self, item)
        if isinstance(self.how, Exception):
            raise self.how
        return self.how

    def act_all(self, items):
        if all(item.seed < 100 for item in items):
            return FakeEncoder.encode(self, items)
        if isinstance(self.how, Exception):
            raise self.how
        return self.how(FakeEncoder.encode(self, items))


BAD = Picture(100)


class TestBadInput:
    @pytest.mark.parametrize(
        ("fails", "how", "message"),
        [
            ("n_tokens", ValueError("too dark"), "^too dark$"),
            ("n_tokens", OSError("disk"), r"image encoder cannot read an item of type Picture: OSError\('disk'\)"),
            ("n_tokens", 0, "Picture 0 tokens; the least is 1"),
            ("n_tokens", -3, "Picture -3 tokens"),
            ("n_tokens", 2.0, "Picture 2.0 tokens"),
            ("n_tokens", True, "Picture True tokens"),
            ("n_tokens", 300, "302 tokens and 1 new ones are 303 tokens, and a sequence may have 256"),
            ("identity", KeyError("x"), "cannot read an item"),
            ("identity", b"short", "is 5 bytes, not 32 bytes"),
            ("identity", "0" * 32, "is str, not 32 bytes"),
        ],
    )
    def test_is_refused_at_the_door(self, fails, how, message, t_model, served, drain, expected):
        engine = served(t_model, Broken(fails, how))
        bad, good = [text(2), BAD], [text(5), A]
        session = engine.session([text(5), A])
        before = engine.stats()
        for call in (engine.submit, lambda prompt: engine.score(prompt, [5])):
            with pytest.raises(ValueError, match=message):
                call(bad, *([] if call is not engine.submit else [params(1)]))
        if how != 300:  # a session may be of any length until it is to answer
            with pytest.raises(ValueError, match=message):
                session.append(bad)
        assert engine.stats() == before and not engine.has_work()
        with pytest.raises(BatchError) as caught:
            engine.generate([good, bad, good], params(1))
        wanted = expected(t_model, good)[:1]
        assert [one and one.samples[0].token_ids for one in caught.value.completions] == [wanted, None, wanted]
        ((number, error),) = caught.value.errors.items()
        with pytest.raises(ValueError, match=message):
            raise error
        assert number == 1

    @pytest.mark.parametrize(
        ("how", "message"),
        [
            (ValueError("no light"), "^no light$"),
            (RuntimeError("boom"), r"the image encoder failed: RuntimeError\('boom'\)"),
            (lambda rows: rows[:, 1:], r"embeddings of \(1, 8, 64\), and \(1, 9, 64\) were due"),
            (lambda rows: rows[..., 1:], r"embeddings of \(1, 9, 63\)"),
            (lambda rows: torch.cat([rows, rows]), r"embeddings of \(2, 9, 64\)"),
            (lambda rows: list(rows), "embeddings of list"),
            (lambda rows: None, "embeddings of NoneType"),
        ],
    )
    def test_fails_its_own_request_when_encoded(self, how, message, t_model, served, expected, assert_nothing_held):
        engine = served(t_model, Broken("encode", how), step_tokens=24)
        good, bad = [text(5), A], [text(7, 3), BAD]
        with pytest.raises(BatchError) as caught:
            engine.generate([good, bad, good, [BAD]], params())
        wanted = expected(t_model, good)
        assert [one and one.samples[0].token_ids for one in caught.value.completions] == [wanted, None, wanted, None]
        assert list(caught.value.errors) == [1, 3]
        for error in caught.value.errors.values():
            with pytest.raises(ValueError, match=message):
                raise error
        assert_nothing_held(engine)
        name = engine.submit(bad, params(3, n=3))
        completion = engine.finish([name])[name]
        assert completion.error is not None and completion.samples[0].finish_reason == "abort"
        for call in (lambda: engine.score(bad, [5]), engine.session(bad).generate):
            with pytest.raises(ValueError, match=message):
                call()
            engine.check()
        while engine._scheduler.parked:
            engine._scheduler._reclaim()
        assert_nothing_held(engine)

    def test_a_failure_loses_no_copy(self, t_model, served, expected, drain, assert_nothing_held):
        """A session forks within a page; the step that copies it also meets an image that cannot be encoded."""
        engine = served(t_model, Broken("encode", RuntimeError("boom")))
        session = engine.session([A, text(6)])
        first = session.generate(params(2)).samples[0].token_ids
        twin = session.fork()
        turns = [one.submit(params(4)) for one in (session, twin)]
        bad = engine.submit([BAD], params())
        drained = drain(engine)
        wanted = expected(t_model, [A, text(6), TokenSegment("text", first)], n=4)
        assert [drained.tokens_of(turn) for turn in turns] == [wanted, wanted] and engine.stats().copies > 0
        assert drained.completions[bad].error is not None
        session.close()
        twin.close()
        assert_nothing_held(engine)

    def test_an_image_larger_than_a_step(self, t_model, served, expected):
        engine = served(t_model, FakeEncoder(True), step_tokens=12)
        with pytest.raises(ValueError, match=r"the 13 tokens of an item .*step_tokens=12; raise .* to at least 13"):
            engine.submit([text(3), B])
        done = served(t_model, step_tokens=12).generate([[text(3), B]], params())[0]
        assert done.samples[0].token_ids == expected(t_model, [text(3), B])

    def test_an_image_larger_than_the_pool(self, g_model, served):
        """What a window sees would fit, but one step writes all of the image."""
        prompt = [Picture(5, 60), text(1)]
        with pytest.raises(CapacityError, match="raise pool_tokens"):
            served(g_model, FakeEncoder(True), pool_tokens=40).submit(prompt, params(1))

    def test_what_fits_is_served_and_the_rest_refused(self, model, served, expected):
        """Windows pass much of the text, so a pool may hold either image when its turn comes, and not both at once."""
        prompt, tokens = [text(20), B, A, text(1)], 4
        served_from = []
        for pool_tokens in range(24, 80, 4):
            engine = served(model, FakeEncoder(True), pool_tokens=pool_tokens)
            try:
                done = engine.generate([prompt], params(tokens))[0]
            except BatchError as refused:
                assert isinstance(refused.errors[0], CapacityError)
                continue
            served_from.append(pool_tokens)
            assert done.samples[0].token_ids == expected(model, prompt, True, tokens)
        assert served_from == list(range(served_from[0], 80, 4)) and served_from[0] > 24

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            (["x", A], "needs a tokenizer"),
            ([A, 7], r"type int among texts and segments: 7; give token ids as TokenSegment"),
            ([A, None], "type NoneType"),
            (A, "a prompt is a string or a list of token ids, got Picture"),
            ([], "is empty"),
        ],
    )
    def test_prompts(self, prompt, message, t_model, served):
        with pytest.raises(ValueError, match=message):
            served(t_model).submit(prompt)

    def test_no_encoder(self, t_model, engine_for):
        for prompt in ([text(3), A], [A], [A, "text"]):
            with pytest.raises(ValueError, match=r"Picture needs an encoder.*encoders=\{"):
                engine_for(t_model).submit(prompt)

    @pytest.mark.parametrize(
        ("encoders", "message"),
        [
            ({"imgae": FakeEncoder()}, "did you mean 'image'"),
            ({"image": object()}, "is no SegmentEncoder: it has no identity, n_tokens, encode, bidirectional"),
        ],
    )
    def test_encoders(self, encoders, message, t_model):
        with pytest.raises(ValueError, match=message):
            Engine(t_model, None, EngineConfig(), encoders=encoders)
