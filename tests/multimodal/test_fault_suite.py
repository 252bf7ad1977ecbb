"""The fault suite: preempt, chunk, hit and evict at every token of every image, and the answer is that of the
uninterrupted run. Through a real encoder of images, in the engine's thread and beside it."""

import numpy as np
import pytest

from octavo.core import Engine, EngineConfig, SamplingParams, TokenSegment
from octavo.multimodal import EncodeWorker

from .patch_tower import patch_encoder

HIDDEN = 64
GRID = (2, 3)


def picture(seed):
    return np.random.default_rng(seed).integers(0, 256, (16, 24, 3), dtype=np.uint8)


A, B = picture(1), picture(2)


def text(n, seed=0):
    return TokenSegment("text", np.random.default_rng(seed).integers(3, 128, n).tolist())


PROMPTS = {
    "two images": [text(5), A, text(3, 1), B, text(2, 2)],
    "the same twice, back to back": [A, A],
    "one among others": [text(4), A, text(1, 3), B, A, text(1, 4)],
}
IMAGE = GRID[0] * GRID[1]
NEW = 4


def length(prompt):
    return sum(IMAGE if isinstance(part, np.ndarray) else len(part.token_ids) for part in prompt)


def image_tokens(prompt):
    """Every token of every image, and the one behind it: where computing may stop."""
    at, found = 0, []
    for part in prompt:
        n = length([part])
        found += range(at, at + n + 1) if isinstance(part, np.ndarray) else []
        at += n
    return sorted({stop for stop in found if 0 < stop < length(prompt)})


def params(**more):
    return SamplingParams(max_tokens=NEW, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def encoders():
    """By whether images see themselves whole; weights are the same."""
    return {both_ways: patch_encoder(GRID, HIDDEN, bidirectional=both_ways) for both_ways in (False, True)}


@pytest.fixture(params=["t_model in thread", "t_model beside", "g_model in thread"])
def setting(request):
    """Layers with windows, and an encoder beside the engine, have nothing to do with one another."""
    return request.param.split(" ", 1)


@pytest.fixture
def model(request, setting):
    return request.getfixturevalue(setting[0])


@pytest.fixture
def encoder(setting, encoders, both_ways):
    if setting[1] != "beside":
        yield encoders[both_ways]
        return
    with EncodeWorker(encoders[both_ways]) as worker:
        yield worker


@pytest.fixture(params=[False, True], ids=["causal", "bidirectional"])
def both_ways(request):
    return request.param


@pytest.fixture(params=list(PROMPTS))
def prompt(request):
    return PROMPTS[request.param]


@pytest.fixture(scope="module")
def build(poison_pool):
    def build(model, encoder, **fields):
        fields = {"page_policies": {"text": 4, "image": 6}, "pool_tokens": 200, "max_seqs": 4, **fields}
        engine = Engine(model, None, EngineConfig(**{"backend": "reference", **fields}), encoders={"image": encoder})
        poison_pool(engine)
        return engine

    return build


@pytest.fixture(scope="module")
def uninterrupted():
    return {}


@pytest.fixture
def wanted(uninterrupted, build, model, encoders, both_ways, prompt):
    """Of one engine that computes the prompt whole, in one step, once."""
    key = id(model), both_ways, id(prompt)
    if key not in uninterrupted:
        done = build(model, encoders[both_ways]).generate([prompt], params())[0]
        uninterrupted[key] = done.samples[0].token_ids
    return uninterrupted[key]


def ended(engine, name):
    """The answer, with every invariant checked after every step."""
    tokens = []
    while engine.has_work():
        for out in engine.step():
            if out.request_id == name:
                tokens += out.new_token_ids
                assert out.finish_reason in (None, "length")
        engine.check()
    assert engine.stats().units_held == 0 and not engine._items._held
    return tokens


def compute_to(engine, stop):
    """Step until ``stop`` tokens of the one request are computed, and no further; says how many are."""
    (sequence,) = [*engine._scheduler.waiting, *engine._scheduler.running]
    limit, sequence.chunk_limit = sequence.chunk_limit, lambda: min(limit(), stop - sequence.computed)
    before = -1
    while sequence.computed != before:  # an image that sees itself whole is computed in one step, or not at all
        before = sequence.computed
        if sequence.layout.unsplit(stop) <= before:
            break
        engine.step()
        engine.check()
    del sequence.chunk_limit
    return sequence


@pytest.mark.parametrize("cache", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["cache", "no_cache"])
def test_preempted(cache, model, encoder, prompt, wanted, build):
    engine = build(model, encoder, prefix_cache=cache)
    for stop in image_tokens(prompt):
        name = engine.submit(prompt, params(), salt=str(stop))
        sequence = compute_to(engine, stop)
        if sequence.computed:
            engine._scheduler.preempt(sequence)
            engine._items.keep()
            engine.check()
        assert ended(engine, name) == wanted, stop
    assert engine.stats().preemptions >= len(image_tokens(prompt)) / 2 - 1


def test_chunked(model, encoder, prompt, wanted, build):
    """Steps that end at a token, and steps of every size."""
    engine = build(model, encoder)
    for stop in image_tokens(prompt):
        name = engine.submit(prompt, params(), salt=str(stop))
        compute_to(engine, stop)
        assert ended(engine, name) == wanted, stop
    for size in range(IMAGE if encoder.bidirectional else 1, length(prompt) + 1):
        engine = build(model, encoder, step_tokens=size)
        assert ended(engine, engine.submit(prompt, params())) == wanted, size


def test_hit(model, encoder, prompt, wanted, build, monkeypatch):
    """Pages of one token, so that a hit may end behind any; what lies behind it is computed. Another request computed
    it, and another than the one that is compared."""
    engine = build(model, encoder, page_policies={"text": 1, "image": 1})
    for stop in image_tokens(prompt):
        engine.finish([engine.submit(prompt, params(), salt=str(stop))])
        name = engine.submit(prompt, params(), salt=str(stop))
        (sequence,) = engine._scheduler.waiting
        monkeypatch.setattr(sequence, "reusable_tokens", lambda stop=stop: stop)
        engine.step()
        found = sequence.layout.unsplit(stop)
        assert sequence.request.cached_tokens == found, stop
        assert engine.stats().hit_tokens >= found
        if engine.has_work():
            monkeypatch.undo()
        tokens = sequence.tokens[length(prompt) :]
        assert [*tokens, *ended(engine, name)] == wanted, stop


def test_evicted(model, encoder, prompt, wanted, build):
    """While it waits after a preemption, the cache loses everything, or all but the pages in front of a token."""
    for everything in (True, False):
        engine = build(model, encoder)
        for stop in image_tokens(prompt):
            name = engine.submit(prompt, params(), salt=str(stop))
            sequence = compute_to(engine, stop)
            if sequence.computed:
                engine._scheduler.preempt(sequence)
            room = engine._pool.available if everything else engine._pool.free_units + 1
            engine._pool.release(engine._pool.allocate(min(room, engine._pool.available)))
            engine._items.keep()
            engine.check()
            assert ended(engine, name) == wanted, stop


def test_aborted(model, encoder, prompt, wanted, build):
    """Whoever goes leaves nothing, and the next is served as if he had never been there."""
    engine = build(model, encoder)
    for stop in image_tokens(prompt):
        first = engine.submit(prompt, params(), salt=str(stop))
        compute_to(engine, stop)
        engine.abort(first)
        engine.check()
        assert not engine._items._held and engine.stats().units_held == 0
        name = engine.submit(prompt, params(), salt=str(stop))
        assert ended(engine, name) == wanted, stop
