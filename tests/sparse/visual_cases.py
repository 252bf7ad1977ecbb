"""The table of the methods that drop tokens of images, made small, and prompts for them."""

import pytest
import torch

from octavo.core import Engine, EngineConfig, SamplingParams
from octavo.core.interfaces import Encoded
from octavo.scripts.build import method

from ..pictures import A, B, FakeEncoder, ids, text
from .method_cases import VISUAL

FEW = ("cls_attention", "fastv", "pyramid_drop", "vl_cache")
"""One of each kind: the encoder's scores, those of another layer, kept sets within kept sets, shares by attention."""
every = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in VISUAL]
)
"""A test of every method; those that are none of ``FEW`` with ``-m slow``."""
SMALL = {
    "fastv": {"scorer": {"layer": 0}, "dense_layers": [0]},
    "look_m": {"scorer": {"window": 12}},
    "pyramid_drop": {"scorer": {"stages": 3}, "budget": {"stages": 3}},
}
"""What a model of 3 layers and prompts of some 40 tokens need besides."""
PROMPT = [text(5), A, text(3, 1), B, text(7, 2)]
"""Images of 9 and 13 tokens on pages of 6, text on pages of 4, so that some units have holes: 37 tokens."""
SPANS = ((5, 14), (17, 30))
TOKENS = 37
QUESTION = ids(6, 9)


class ScoringEncoder(FakeEncoder):
    """Says of the tokens of an image that every third is worth most; notes when it is asked."""

    scores_tokens = True

    def __init__(self, **options):
        super().__init__(**options)
        self.scored = []

    def encode_scored(self, items):
        self.scored.append(list(items))
        scores = [torch.tensor([float(at % 3 == 1) + at / 100 for at in range(item.tokens)]) for item in items]
        return Encoded(torch.stack([self.rows(item) for item in items]), torch.stack(scores))


_made = {}


def visual(name, share=0.5, **parts):
    """A method for the small model."""
    small = SMALL.get(name, {})
    parts = {**small, **parts, "budget": {"share": share, **small.get("budget", {}), **parts.get("budget", {})}}
    key = repr((name, parts))
    if key not in _made:
        _made[key] = method(name, **parts)
    return _made[key]


def seeing(model, encoder=None, **fields):
    """An engine with small pages and a pool full of NaN."""
    config = EngineConfig(**{"page_tokens": 4, "pool_tokens": 400, "max_seqs": 8, "backend": "reference", **fields})
    engine = Engine(model, None, config, encoders={"image": encoder or ScoringEncoder()})
    engine._runner.kv.fill_(float("nan"))
    return engine


def params(**kwargs):
    return SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "seed": 1, "logprobs": 0, **kwargs})


def idle(engine):
    """Nothing is held, and nothing of a request is left."""
    engine.check()
    assert not (engine.has_work() or engine._scheduler.parked or len(engine._compaction.split.units))
    assert engine.stats().units_held == 0
