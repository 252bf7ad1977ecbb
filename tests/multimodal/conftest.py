"""What tests of images that are reused share: engines, what they are to answer, and that they are left empty."""

import pytest

from ..pictures import Picture, image_engine
from .reuse_cases import head_of, logits_of


@pytest.fixture(scope="module")
def expected(t_model):
    """``expected(prompt, mode, n)``: the n tokens that plain transformers answers, greedily."""
    known = {}

    def answer(prompt, mode, n=5):
        key = repr(prompt), [head_of(mode, part) for part in prompt if isinstance(part, Picture)].__repr__(), n
        if key not in known:
            new = []
            for _ in range(n):
                new.append(int(logits_of(t_model, prompt, mode, new)[0][-1].argmax()))
            known[key] = new
        return known[key]

    return answer


@pytest.fixture(scope="module")
def served(poison_pool):
    """``served(model, mode, encoder, **fields)``: an engine on pages of 4 for text and 6 for images."""

    def build(model, mode=None, encoder=None, **fields):
        return image_engine(model, poison_pool, encoder, reuse=mode, **fields)

    return build


@pytest.fixture(scope="module")
def assert_nothing_held():
    def check(engine):
        engine.check()
        stats, scheduler = engine.stats(), engine._scheduler
        assert not engine.has_work() and stats.units_held == 0 and not engine._pool.refs.any()
        assert not (scheduler.waiting or scheduler.running or scheduler.parked or engine._items._held)
        assert not engine._runner.copies.pending

    return check
