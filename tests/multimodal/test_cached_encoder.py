"""Embeddings that outlive their requests: encoded once, verified, within the budget, in an engine and beside one."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

from octavo.core import Engine, EngineConfig, SamplingParams
from octavo.core.serving.prompts import TokenSegment
from octavo.multimodal import CachedEncoder, EncodeWorker
from octavo.multimodal.reuse import EncoderOnlyReuse

ROWS = 3 * 64 * 4
"""Bytes of an image of 3 tokens."""


@dataclass(frozen=True)
class Picture:
    seed: int


def pictures(*seeds):
    return [*map(Picture, seeds)]


class Drawn:
    """Embeddings are drawn from the seed without its sign, so 2 and -2 have one identity; -1 cannot be encoded. Notes
    the seeds of every call."""

    bidirectional = False

    def __init__(self):
        self.calls = []

    def identity(self, item):
        return abs(item.seed).to_bytes(32, "little")

    def witness(self, item):
        return repr(item).encode()

    def n_tokens(self, item):
        return 3

    def encode(self, items):
        self.calls.append([item.seed for item in items])
        if Picture(-1) in items:
            raise ValueError("no such picture")
        rows = [torch.randn(3, 64, generator=torch.Generator().manual_seed(abs(item.seed))) / 2 for item in items]
        return torch.stack(rows) if rows else torch.empty(0, 3, 64)


def test_equal_images_are_encoded_once():
    encoder = Drawn()
    cached = CachedEncoder(encoder, 2 * ROWS)
    for items in (pictures(1, 2, 1), pictures(2), pictures(1, 2)):
        assert torch.equal(cached.encode(items), Drawn().encode(items))
    assert encoder.calls == [[1, 2]]
    assert cached.encode([]).shape == (0, 3, 64)
    assert (cached.cache.bytes_used, cached.cache.bytes_pinned, cached.cache.hits) == (2 * ROWS, 0, 3)
    cached.cache.check()


def test_what_a_call_needs_is_not_evicted_by_what_it_brings():
    """With room for two, 1 and 2 stay while 3 and 4 come beside them, which are not kept; alone they are."""
    encoder = Drawn()
    cached = CachedEncoder(encoder, 2 * ROWS)
    cached.encode(pictures(1, 2))
    assert torch.equal(cached.encode(pictures(1, 3, 2, 4)), Drawn().encode(pictures(1, 3, 2, 4)))
    cached.encode(pictures(1, 2))
    assert encoder.calls == [[1, 2], [3, 4]] and (cached.cache.refusals, cached.cache.evictions) == (2, 0)
    cached.encode(pictures(3))
    cached.encode(pictures(2))
    assert encoder.calls[2:] == [[3]] and cached.cache.evictions == 1
    cached.cache.check()


def test_a_hit_is_verified():
    encoder = Drawn()
    cached = CachedEncoder(encoder, 8 * ROWS)
    for items in (pictures(2), pictures(-2), pictures(-2, 2)):
        assert torch.equal(cached.encode(items), Drawn().encode(items))
    assert encoder.calls == [[2], [-2], [-2]] and cached.cache.collisions == 2


def test_a_failure_leaves_nothing_pinned():
    cached = CachedEncoder(Drawn(), 8 * ROWS)
    cached.encode(pictures(3))
    with pytest.raises(ValueError, match="no such picture"):
        cached.encode(pictures(3, 4, -1))
    assert cached.cache.bytes_pinned == 0 and len(cached.cache) == 1
    cached.cache.check()


def test_no_witness_no_cache():
    class Blind(Drawn):
        witness = None

    with pytest.raises(ValueError, match="has no witness"):
        CachedEncoder(Blind(), 8)


@pytest.mark.parametrize("beside", [False, True], ids=["in the step", "in a worker"])
def test_an_engine_computes_again_and_encodes_no_more(beside, t_model):
    """Under ``encoder_only`` a second request computes every token of its images, from rows that were kept."""
    encoder, asked = Drawn(), Drawn()
    cached = CachedEncoder(encoder, 4 * ROWS)
    prompts = [[TokenSegment("text", [5 + i, 9, 7]), *pictures(1, 2), TokenSegment("text", [4])] for i in range(2)]
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=4)
    with EncodeWorker(cached) if beside else nullcontext(cached) as given:
        config = EngineConfig(pool_tokens=256)
        engine = Engine(t_model, None, config, encoders={"image": given}, reuse=EncoderOnlyReuse())
        found = [engine.generate([prompt], params)[0] for prompt in prompts]
        engine.check()
    plain = Engine(t_model, None, config, encoders={"image": asked}, reuse=EncoderOnlyReuse())
    for own, prompt in zip(found, prompts, strict=True):
        its = plain.generate([prompt], params)[0].samples[0]
        assert (own.samples[0].token_ids, own.samples[0].logprobs) == (its.token_ids, its.logprobs)
        assert own.cached_tokens == 0
    encoded, asked_for = ([seed for call in each.calls for seed in call] for each in (encoder, asked))
    assert sorted(encoded) == [1, 2] and sorted(asked_for) == [1, 1, 2, 2]
    assert cached.cache.bytes_pinned == 0 and cached.cache.hits == 2
