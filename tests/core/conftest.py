"""What tests of the memory system share: a model with two groups of layers, and pools that are empty or given up."""

import pytest
import torch


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
