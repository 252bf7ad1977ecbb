"""Images that tests need no pixels for: a ``Picture`` is a seed from which the fake encoder draws its embeddings, and
how many tokens it has; and what tests do to requests that hold them."""

import random
from dataclasses import dataclass
from hashlib import blake2b

import torch

from octavo.core import Engine, EngineConfig
from octavo.core.serving.prompts import TokenSegment

VOCAB = 128


@dataclass(frozen=True)
class Picture:
    seed: int
    tokens: int = 9


BROKEN = Picture(666)


class FakeEncoder:
    """Embeddings of width 64, as large as those of words, of every picture but ``BROKEN``; notes every call."""

    def __init__(self, bidirectional=False, width=64):
        self.bidirectional = bidirectional
        self.width = width
        self.calls = []

    def identity(self, item):
        return blake2b(repr(item).encode(), digest_size=32).digest()

    def n_tokens(self, item):
        return item.tokens

    def encode(self, items):
        self.calls.append(list(items))
        if BROKEN in items:
            raise ValueError("no such picture")
        return torch.stack([self.rows(item) for item in items])

    def rows(self, item):
        generator = torch.Generator().manual_seed(item.seed)
        return torch.randn(item.tokens, self.width, generator=generator) / 2


def ids(n, seed=0):
    return random.Random(seed).choices(range(3, VOCAB), k=n)


def text(n, seed=0):
    return TokenSegment("text", ids(n, seed))


A, B, C = Picture(1), Picture(2, 13), Picture(3, 4)


def preempt(engine, sequence):
    """As the scheduler does while it plans: the engine lets go of embeddings when the step ends."""
    engine._scheduler.preempt(sequence)
    engine._items.keep()
    engine.check()


def image_engine(model, poison_pool, encoder=None, tokenizer=None, reuse=None, **fields):
    """An engine on pages of 4 for text and 6 for images, whose unused memory is NaN."""
    fields = {"page_policies": {"text": 4, "image": 6}, "pool_tokens": 400, "max_seqs": 8, **fields}
    config = EngineConfig(**{"backend": "reference", **fields})
    engine = Engine(model, tokenizer, config, encoders={"image": encoder or FakeEncoder()}, reuse=reuse)
    poison_pool(engine)
    return engine
