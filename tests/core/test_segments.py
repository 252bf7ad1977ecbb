"""Prompts whose segments have pages of their own, on a real engine: KV lies elsewhere, and nothing else changes."""

import random

import pytest

from octavo.core import CapacityError, SamplingParams
from octavo.core.memory.page_layout import Segment, predicted_waste
from octavo.core.policies import FixedPages
from octavo.core.policies.page_divisors import DivisorPages, RowPages, WholePages
from octavo.core.policies.page_size import RatioPages
from octavo.core.serving.prompts import TokenSegment

from ..cells import covering

GREEDY = {"ignore_eos": True}
POLICIES = {
    "fixed": {"text": 8, "image": 12},
    "ratio": {"text": 8, "image": RatioPages(1.5, of=8, grain=4)},
    "divisor": {"text": 8, "image": DivisorPages(cap=32, grain=8)},
    "whole": {"text": 8, "image": WholePages(grain=4)},
    "rows": {"text": 4, "image": RowPages(columns=5, grain=4)},
    "same": {"text": 8, "image": 8},
}


def tokens(n, seed=0):
    return random.Random(seed).choices(range(3, 128), k=n)


def text(n, seed=0):
    return TokenSegment("text", tokens(n, seed))


def image(n, seed=0):
    return TokenSegment("image", tokens(n, seed))


def plain(prompt):
    """The tokens of a prompt of segments."""
    return [token for segment in prompt for token in segment.token_ids]


@pytest.fixture(params=["t_model", "g_model"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def paged(host_tier_for):
    """An engine with pages of 8 for text and 12 for images, and a host pool whose pages come back."""

    def build(model, **fields):
        return host_tier_for(model, **{"page_policies": POLICIES["fixed"], "page_tokens": 16, **fields})

    return build


@pytest.fixture(scope="module")
def unsegmented(engine_for):
    """``unsegmented(model, tokens, **params)``: what a roomy engine without segments answers; a list for n > 1."""
    known = {}

    def answer(model, prompt, **params):
        key = id(model), tuple(prompt), repr(params)
        if key not in known:
            known[key] = generate(model, prompt, params)
        return known[key]

    def generate(model, prompt, params):
        engine = engine_for(model, prefix_cache=False)
        samples = engine.generate([prompt], SamplingParams(**{**GREEDY, "max_tokens": 9, **params}))[0].samples
        return samples[0].token_ids if len(samples) == 1 else [sample.token_ids for sample in samples]

    return answer


def answers(engine, drain, prompts, **params):
    ids = [engine.submit(prompt, SamplingParams(**{**GREEDY, "max_tokens": 9, **params})) for prompt in prompts]
    drained = drain(engine)
    return [drained.tokens_of(request_id) for request_id in ids]


PROMPTS = [
    [text(13), image(25, 1), text(7, 2)],
    [image(25, 1), text(7, 2)],
    [text(5, 3), image(10, 4)],
    [text(8, 5), text(3, 6), image(5, 7), image(20, 8), text(1, 9)],
]


@pytest.mark.parametrize(
    ("policies", "backend", "model", "step_tokens"),
    covering(POLICIES, ["reference", "cpu"], ["t_model", "g_model"], [7, 8192]),
    indirect=["model"],
)
def test_answers_are_those_of_the_same_tokens(
    model, backend, policies, step_tokens, paged, unsegmented, drain, assert_nothing_held
):
    """Segmented and plain prompts in one batch, whole and in chunks, cold and from the prefix cache."""
    engine = paged(model, page_policies=POLICIES[policies], backend=backend, step_tokens=step_tokens, pool_tokens=800)
    prompts = [*PROMPTS, plain(PROMPTS[0])]
    expected = [unsegmented(model, plain(prompt)) for prompt in PROMPTS]
    for _ in range(2):
        assert answers(engine, drain, prompts) == [*expected, expected[0]]
    assert engine.stats().hit_tokens > 0
    assert_nothing_held(engine)


@pytest.mark.parametrize("step_tokens", [7, 8192])
def test_answers_of_a_model_whose_layers_all_see_a_window(step_tokens, w_model, paged, unsegmented, drain):
    engine = paged(w_model, step_tokens=step_tokens, host_tokens=400, pool_tokens=200)
    for _ in range(2):
        assert answers(engine, drain, PROMPTS) == [unsegmented(w_model, plain(prompt)) for prompt in PROMPTS]
    assert engine.stats().hit_tokens > 0


class TestHits:
    def test_they_end_at_pages_of_the_segment(self, t_model, paged, unsegmented):
        """Text 13 on pages of 8, sealed with 5; an image of 25 on pages of 12, sealed with 1; text."""
        engine = paged(t_model)
        whole = [text(13), image(25, 1), text(7, 2)]
        engine.generate([whole], SamplingParams(max_tokens=1))
        for prompt, cached in (
            (whole, 38),
            ([text(13), image(25, 1), text(2, 7)], 38),
            ([text(13), TokenSegment("image", [*tokens(24, 1), 9]), text(7, 2)], 37),
            ([text(13), TokenSegment("image", [*tokens(14, 1), 9]), text(7, 2)], 25),
            ([text(13), image(12, 9), text(7, 2)], 13),
            ([TokenSegment("text", [*tokens(13), 9]), image(25, 1)], 8),
            (plain(whole), 8),
            (whole[:2], 37),
            (whole[:1], 8),
            ([image(25, 1), text(7, 2)], 0),
        ):
            completion = engine.generate([prompt], SamplingParams(max_tokens=5, **GREEDY))[0]
            assert completion.cached_tokens == cached, prompt
            ids = prompt if isinstance(prompt[0], int) else plain(prompt)
            assert completion.samples[0].token_ids == unsegmented(t_model, ids, max_tokens=5)
            assert completion.prompt_token_ids == ids
            engine.check()
            engine = paged(t_model)
            engine.generate([whole], SamplingParams(max_tokens=1))

    @pytest.mark.parametrize(
        ("host_tokens", "order", "model"),
        covering([0, 400], [1, -1], ["t_model", "g_model"], together=2),
        indirect=["model"],
    )
    def test_the_same_tokens_on_pages_of_two_sizes(
        self, host_tokens, order, model, paged, unsegmented, drain, give_everything_up, assert_nothing_held
    ):
        """8 tokens fill a page of text, or seal one of an image: their units lie otherwise. A window sees them."""
        as_image, as_text = [image(8), text(3, 1)], [text(8), text(3, 1)]
        engine = paged(model, host_tokens=host_tokens)
        expected = unsegmented(model, plain(as_text))
        for prompt in [as_image, as_text, plain(as_text)][::order] * 2:
            assert answers(engine, drain, [prompt]) == [expected]
            if host_tokens:
                give_everything_up(engine)
        assert_nothing_held(engine)

    def test_from_the_host_tier(self, model, paged, unsegmented, drain, give_everything_up, assert_nothing_held):
        engine = paged(model, host_tokens=400, pool_tokens=400)
        for _ in range(2):
            for prompt in PROMPTS:
                assert answers(engine, drain, [prompt]) == [unsegmented(model, plain(prompt))]
                give_everything_up(engine)
        assert engine._host.restored >= 12 and engine._host.bytes_in > 0
        assert_nothing_held(engine)


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("shape", [(8, 12, 8), (13, 25, 7), (1, 1, 1), (16, 24, 3), (3, 37, 20)])
def test_waste_is_what_was_predicted(policies, shape, t_model, paged):
    policies = POLICIES[policies]
    if isinstance(policies["image"], RowPages) and shape[1] % 5:
        pytest.skip("no whole rows")
    engine = paged(t_model, page_policies=policies)
    prompt = [text(shape[0]), image(shape[1], 1), text(shape[2], 2)]
    engine.submit(prompt, SamplingParams(max_tokens=2, **GREEDY))
    engine.step()
    segments = [Segment(part.kind, len(part.token_ids)) for part in prompt]
    wanted = {kind: FixedPages(size) if isinstance(size, int) else size for kind, size in policies.items()}
    waste = engine.stats().units_held * engine.config.unit_tokens - sum(shape)
    assert waste == predicted_waste(segments, wanted)


def test_waste_of_groups_of_layers(g_model, paged):
    """1 slice keeps every page, 3 slices those that the window of 8 still touches."""
    engine = paged(g_model)
    engine.submit([text(13), image(25, 1), text(7, 2)], SamplingParams(max_tokens=3, **GREEDY))
    engine.step()
    assert engine.stats().units_held == (4 + 9 + 2) * 4
    engine.step()  # the query at 45 sees 38 and later: the last text alone
    assert engine.stats().units_held == (4 + 9 + 2) + 2 * 3


class TestRequests:
    def test_preempted(self, model, t_model, paged, unsegmented, drain, assert_nothing_held):
        engine = paged(model, pool_tokens=120 if model is t_model else 64, host_tokens=400, max_seqs=3)
        prompts = [[text(13, i), image(12 + i, 10 + i), text(5, 20 + i)] for i in range(4)]
        got = answers(engine, drain, prompts, max_tokens=24)
        assert got == [unsegmented(model, plain(prompt), max_tokens=24) for prompt in prompts]
        assert engine.stats().preemptions > 0
        assert_nothing_held(engine)

    def test_samples(self, model, paged, unsegmented, drain, assert_nothing_held):
        engine = paged(model)
        hot = {"n": 3, "temperature": 0.9, "seed": 4}
        for prompt in PROMPTS:
            assert answers(engine, drain, [prompt], **hot) == [unsegmented(model, plain(prompt), **hot)]
        assert engine.stats().copies > 0
        assert_nothing_held(engine)

    def test_scored(self, t_model, paged, engine_for, assert_nothing_held):
        engine, target = paged(t_model), tokens(5, 30)
        for prompt in PROMPTS:
            scores = engine.score(prompt, target)
            assert scores == pytest.approx(engine_for(t_model).score(plain(prompt), target), abs=1e-4)
            engine.check()
        assert_nothing_held(engine)

    def test_a_prompt_longer_than_tables_without_holes(self, t_model, paged, unsegmented, drain, assert_nothing_held):
        """Every image of one token takes a page of 12 slots, so a row has more entries than its tokens need."""
        engine = paged(t_model, pool_tokens=800, max_model_tokens=60)
        prompt = [part for i in range(12) for part in (image(1, i), text(1, 40 + i))]
        beside = tokens(30, 3)
        got = answers(engine, drain, [beside, prompt, beside])
        assert got == [unsegmented(t_model, ids) for ids in (beside, plain(prompt), beside)]
        assert_nothing_held(engine)


class TestSessions:
    @pytest.mark.parametrize("host_tokens", [0, 400])
    def test_that_append_segments_and_fork(
        self, host_tokens, model, paged, unsegmented, give_everything_up, assert_nothing_held
    ):
        engine = paged(model, host_tokens=host_tokens, pool_tokens=600)
        session = engine.session([text(5), image(14, 1)])
        twin = None
        for turn, part in enumerate(([text(3, 2)], [image(7, 3), text(2, 4)], [image(12, 5)], tokens(4, 6))):
            session.append(part)
            history = session.tokens.copy()
            got = session.generate(SamplingParams(max_tokens=4, **GREEDY)).samples[0].token_ids
            assert got == unsegmented(model, history, max_tokens=4)
            engine.check()
            if turn == 1:
                twin = session.fork()
            if turn == 2:
                give_everything_up(engine)
        twin.append([image(9, 7), text(3, 8)])
        history = twin.tokens.copy()
        done = twin.generate(SamplingParams(max_tokens=6, **GREEDY))
        assert done.samples[0].token_ids == unsegmented(model, history, max_tokens=6)
        assert history[:19] == tokens(5) + tokens(14, 1)
        if host_tokens:
            assert done.cached_tokens > 24 and engine._host.restored > 0
        session.close()
        twin.close()
        assert_nothing_held(engine)

    def test_a_bad_segment_leaves_the_session_as_it_was(self, t_model, paged, unsegmented):
        engine = paged(t_model)
        session = engine.session([text(5), image(14, 1)])
        for bad in (
            [TokenSegment("video", [5])],
            [image(3, 2), TokenSegment("image", [])],
            [TokenSegment("image", [500])],
        ):
            with pytest.raises(ValueError):
                session.append(bad)
        session.append([text(2, 2)])
        assert session.tokens == tokens(5) + tokens(14, 1) + tokens(2, 2)
        got = session.generate(SamplingParams(max_tokens=4, **GREEDY)).samples[0].token_ids
        assert got == unsegmented(t_model, tokens(5) + tokens(14, 1) + tokens(2, 2), max_tokens=4)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([TokenSegment("video", [5])], "'video' has no page policy"),
        ([TokenSegment("imgae", [5])], "did you mean 'image'"),
        ([text(3), TokenSegment("image", [])], "is empty"),
        ([TokenSegment("text", [])], "is empty"),
        ([text(3), TokenSegment("image", [5, 128])], "token id 128 is outside the vocabulary of 128"),
        ([text(3), TokenSegment("image", [5, -1])], "token id -1 is outside"),
        ([text(3), TokenSegment("image", [5.0])], "must be an integer, got float"),
        ([text(3), TokenSegment("image", 5)], "must be a list of token ids, got int"),
        ([text(3), TokenSegment("image", None)], "must be a list of token ids, got NoneType"),
        ([TokenSegment(None, [5])], "must be a string, got NoneType"),
        ([TokenSegment(["image"], [5])], "must be a string, got list"),
        ([text(3), 7], "int"),
        ([text(3), "words"], "needs a tokenizer"),
        ([text(3), TokenSegment("image", tokens(7))], "7 tokens are no whole rows of columns=5"),
        ([text(90), TokenSegment("image", tokens(90)), text(90)], "raise max_model_tokens"),
        ([part for i in range(30) for part in (TokenSegment("image", [5]), text(1, i))], "raise pool_tokens"),
    ],
)  # fmt: skip
def test_bad_segments_are_refused(bad, message, t_model, paged, drain, unsegmented, assert_nothing_held):
    """Nothing is held, and the others of the batch and the engine go on."""
    policies = {"text": 4, "image": RowPages(columns=5, grain=4)}
    if "pool_tokens" in message:
        policies["image"] = 12
    engine = paged(t_model, page_policies=policies, pool_tokens=200)
    for call in (engine.submit, engine.session, lambda prompt: engine.score(prompt, [5])):
        before = engine.stats()
        if call == engine.session and "raise" in message:
            continue  # a session may be of any length until it is to answer
        with pytest.raises(ValueError, match=message):
            call(bad)
        assert engine.stats() == before and not engine.has_work()
    good = [text(9), image(10, 1)]
    assert answers(engine, drain, [good]) == [unsegmented(t_model, plain(good))]
    assert_nothing_held(engine)


def test_a_prompt_that_its_holes_make_too_large_is_refused_with_numbers(t_model, paged):
    engine = paged(t_model, pool_tokens=64)
    with pytest.raises(CapacityError, match="raise pool_tokens to at least"):
        engine.submit([image(1), text(1, 1)] * 4, SamplingParams(max_tokens=1))
    assert not engine.has_work()
