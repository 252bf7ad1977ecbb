"""What tests of the engine and its memory share: a model with two groups of layers, pools that are empty or given up,
and what prompts with images, and traffic, are to be answered."""

import pytest
import torch

from octavo.core import SamplingParams

from ..pictures import image_engine
from .image_cases import logits_of
from .memory_traffic import GREEDY, TRAFFIC


@pytest.fixture(scope="session")
def g_model():
    """Gemma-3 style: 3 layers with a window of 8 and a full one, so two groups of layers in units of one layer."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=8, query_pre_attn_scalar=1,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], initializer_range=0.5, eos_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def host_tier_for(engine_for):
    """``engine_for``, with a host tier full of NaN whose pages are ``restored`` always, or (False) never kept.

    The bus is not measured, which takes longer than a test; ``test_transfer_costs`` does it.
    """
    from octavo.core.memory import transfer_costs

    def build(model, *, restored=True, **fields):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer_costs, "measure_bytes_per_s", lambda *_: 1e9)
            engine = engine_for(model, **fields)
        if engine._host is not None:
            engine._host.kv.fill_(torch.nan)
        engine.costs.restore_is_cheaper = lambda *_: restored
        return engine

    return build


@pytest.fixture(scope="module")
def as_if_beside():
    """Engines plan as if the device went on computing while the host plans, which a CPU does not."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("octavo.core.execution.step_runner.computes_beside", lambda device: True)
        yield


@pytest.fixture(scope="session")
def give_everything_up():
    """Reclaim an engine's idle sessions and have every idle page evicted, and what the host tier keeps of them
    copied."""

    def give_up(engine):
        while engine._scheduler.parked:
            engine._scheduler._reclaim()
        pages = engine._pool.allocate(engine._pool.available)
        engine._pool.release(pages)
        if engine._host is not None:
            engine._host.copy_out(engine._runner.kv)
        engine.check()

    return give_up


@pytest.fixture(scope="session")
def assert_nothing_held():
    """The idle invariant, for pages of any sizes: nothing runs, nothing is held, no restore waits."""

    def check(engine):
        engine.check()
        stats = engine.stats()
        assert not engine.has_work() and stats.units_held == 0 and not engine._pool.refs.any()
        assert stats.units_free + stats.units_cached == stats.units_total
        assert engine._host is None or not engine._host._in, "a restore is queued for ever"

    return check


@pytest.fixture(scope="session")
def expected():
    """``expected(model, prompt, bidirectional, n)``: the n tokens that plain transformers answers, greedily."""
    known = {}

    def answer(model, prompt, bidirectional=False, n=6):
        key = id(model), repr(prompt), bidirectional, n
        if key not in known:
            new = []
            for _ in range(n):
                new.append(int(logits_of(model, prompt, bidirectional, new)[-1].argmax()))
            known[key] = new
        return known[key]

    return answer


@pytest.fixture(scope="session")
def served(poison_pool):
    """``served(model, encoder, **fields)``: an engine on pages of 4 for text and 6 for images."""

    def build(model, encoder=None, tokenizer=None, **fields):
        return image_engine(model, poison_pool, encoder, tokenizer, **fields)

    return build


@pytest.fixture(scope="session")
def traffic_of():
    """What a roomy engine makes of TRAFFIC."""
    known = {}

    def expected(model, engine_for):
        if id(model) not in known:
            roomy = engine_for(model, pool_tokens=4000, prefix_cache=False)
            completions = roomy.generate(TRAFFIC, SamplingParams(max_tokens=7, **GREEDY))
            known[id(model)] = [completion.samples[0].token_ids for completion in completions]
        return known[id(model)]

    return expected
