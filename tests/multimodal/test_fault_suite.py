"""The fault suite: preempt, chunk, hit and evict at every token of every image, and the answer is that of the
uninterrupted run. Through a real encoder of images, in the engine's thread and beside it.

Requests that are stopped at different tokens run in one batch, each with a salt of its own, so that none finds the
pages of another.
"""

from itertools import product

import numpy as np
import pytest

from octavo.core import Engine, EngineConfig, SamplingParams, TokenSegment
from octavo.multimodal import EncodeWorker

from ..cells import covering
from ..pictures import preempt
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


SETTINGS = ["t_model in thread", "t_model beside", "g_model in thread"]
"""Layers with windows, and an encoder beside the engine, have nothing to do with one another."""

pytestmark = pytest.mark.parametrize(
    ("seen", "setting"),
    covering(product(PROMPTS, ["causal", "bidirectional"]), SETTINGS),
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
    indirect=True,
)


@pytest.fixture
def seen(request):
    """A prompt, and how its images see themselves."""
    return request.param


@pytest.fixture
def setting(request):
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


@pytest.fixture
def both_ways(seen):
    return seen[1] == "bidirectional"


@pytest.fixture
def prompt(seen):
    return PROMPTS[seen[0]]


@pytest.fixture(scope="module")
def build(poison_pool):
    def build(model, encoder, **fields):
        fields = {"page_policies": {"text": 4, "image": 6}, "pool_tokens": 2400, "max_seqs": 32, **fields}
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


def ended(engine, names):
    """The answer of each, with every invariant checked after every step."""
    tokens = {name: [] for name in names}
    while engine.has_work():
        for out in engine.step():
            tokens[out.request_id] += out.new_token_ids
            assert out.finish_reason in (None, "length")
        engine.check()
    assert engine.stats().units_held == 0 and not engine._items._held
    return [tokens[name] for name in names]


def submitted(engine, prompt, stops):
    """A request for each of ``stops``, and its sequence."""
    names = [engine.submit(prompt, params(), salt=str(stop)) for stop in stops]
    waiting = {sequence.request.request_id: sequence for sequence in engine._scheduler.waiting}
    return names, [waiting[name] for name in names]


def compute_to(engine, sequences, stops):
    """Step until of each sequence so many tokens are computed, and no further."""
    for sequence, stop in zip(sequences, stops, strict=True):
        limit = sequence.chunk_limit
        sequence.chunk_limit = lambda s=sequence, limit=limit, stop=stop: min(limit(), stop - s.computed)
    before = None
    while before != (before := [sequence.computed for sequence in sequences]):
        if all(s.layout.unsplit(stop) <= s.computed for s, stop in zip(sequences, stops, strict=True)):
            break  # an image that sees itself whole is computed in one step, or not at all
        engine.step()
        engine.check()
    for sequence, stop in zip(sequences, stops, strict=True):
        assert sequence.computed == sequence.layout.unsplit(stop)
        del sequence.chunk_limit


def give_up(engine):
    """Everything idle leaves the cache."""
    engine._pool.release(engine._pool.allocate(engine._pool.available))
    engine.check()
    assert len(engine._pool.index) == 0


@pytest.mark.parametrize("cache", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["cache", "no_cache"])
def test_preempted(cache, model, encoder, prompt, wanted, build):
    engine, stops = build(model, encoder, prefix_cache=cache), image_tokens(prompt)
    names, sequences = submitted(engine, prompt, stops)
    compute_to(engine, sequences, stops)
    begun = [sequence for sequence in sequences if sequence.computed]
    for sequence in begun:
        preempt(engine, sequence)
    assert ended(engine, names) == [wanted] * len(stops)
    assert engine.stats().preemptions == len(begun) >= len(stops) / 2 - 1


def test_chunked(model, encoder, prompt, wanted, build):
    """Chunks that end at a token, chunks of every size, and steps that have no room for more."""
    engine, stops = build(model, encoder), image_tokens(prompt)
    names, sequences = submitted(engine, prompt, stops)
    compute_to(engine, sequences, stops)
    assert ended(engine, names) == [wanted] * len(stops)

    least = IMAGE if encoder.bidirectional else 1
    sizes = range(least, length(prompt) + 1)
    names, sequences = submitted(engine, prompt, [f"chunks of {size}" for size in sizes])
    for sequence, size in zip(sequences, sizes, strict=True):
        limit = sequence.chunk_limit
        sequence.chunk_limit = lambda limit=limit, size=size: min(limit(), size)
    assert ended(engine, names) == [wanted] * len(sizes)

    for size in (least, IMAGE + 1, 2 * IMAGE):
        engine = build(model, encoder, step_tokens=size)
        assert ended(engine, [engine.submit(prompt, params())]) == [wanted], size


def test_hit(model, encoder, prompt, wanted, build):
    """Pages of one token, so that a hit may end behind any; what lies behind it is computed. Another request computed
    it, and another than the one that is compared."""
    engine, stops = build(model, encoder, page_policies={"text": 1, "image": 1}), image_tokens(prompt)
    engine.finish(submitted(engine, prompt, stops)[0])
    names, sequences = submitted(engine, prompt, stops)
    with pytest.MonkeyPatch.context() as patch:
        for sequence, stop in zip(sequences, stops, strict=True):
            patch.setattr(sequence, "reusable_tokens", lambda stop=stop: stop)
        outputs = []
        while any(sequence in engine._scheduler.waiting for sequence in sequences):
            outputs += engine.step()
            engine.check()
    found = [sequence.layout.unsplit(stop) for sequence, stop in zip(sequences, stops, strict=True)]
    assert [sequence.request.cached_tokens for sequence in sequences] == found
    assert engine.stats().hit_tokens >= sum(found)
    rest = ended(engine, names)
    begun = [[token for out in outputs if out.request_id == name for token in out.new_token_ids] for name in names]
    assert [[*tokens, *more] for tokens, more in zip(begun, rest, strict=True)] == [wanted] * len(stops)


def test_evicted(model, encoder, prompt, wanted, build):
    """While they wait after a preemption, the cache loses everything."""
    engine, stops = build(model, encoder), image_tokens(prompt)
    names, sequences = submitted(engine, prompt, stops)
    compute_to(engine, sequences, stops)
    for sequence in sequences:
        if sequence.computed:
            preempt(engine, sequence)
    give_up(engine)
    assert ended(engine, names) == [wanted] * len(stops)


def test_tail_evicted(model, encoder, prompt, wanted, build):
    """While it waits after a preemption, the cache loses its last page."""
    engine = build(model, encoder)
    for stop in image_tokens(prompt):
        give_up(engine)
        names, sequences = submitted(engine, prompt, [stop])
        compute_to(engine, sequences, [stop])
        if sequences[0].computed:
            preempt(engine, sequences[0])
        cached = len(engine._pool.index)
        if cached:
            engine._pool.release(engine._pool.allocate(engine._pool.free_units + 1))
            engine.check()
            assert len(engine._pool.index) == cached - 1
        assert ended(engine, names) == [wanted], stop


def test_aborted(model, encoder, prompt, wanted, build):
    """Whoever goes leaves nothing, and the next is served as if he had never been there."""
    engine, stops = build(model, encoder), image_tokens(prompt)
    first, sequences = submitted(engine, prompt, stops)
    compute_to(engine, sequences, stops)
    for name in first:
        engine.abort(name)
        engine.check()
    assert not engine._items._held and engine.stats().units_held == 0
    engine.step()  # says how they ended
    assert ended(engine, submitted(engine, prompt, stops)[0]) == [wanted] * len(stops)
