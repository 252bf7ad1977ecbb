"""Tiny models, a scripted one, fake tokenizers, and a way to drive an engine that checks it after every step."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

settings.register_profile(
    "octavo",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("octavo")


@pytest.fixture(scope="session", autouse=True)
def _one_config_store():
    """Hydra copies every type that is registered whenever it composes, which takes longer than composing; what it
    reads from its store, it copies anyway."""
    from hydra.core.config_store import ConfigStore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigStore, "__deepcopy__", lambda self, memo: self, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _packed_once():
    """All engines of a model share the packed copies of its weights, which are packed again where a weight changes."""
    from octavo.kernels.cpu.linear import PackedLinears

    build, known = PackedLinears.__init__, WeakKeyDictionary()

    def shared(self, model):
        build(self, model)
        self._packed = known.setdefault(model, self._packed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedLinears, "__init__", shared)
        yield


def llama(vocab=128, seed=0, initializer_range=0.5, **overrides):
    """Random weights, large enough that the logits of neighbouring tokens are far apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    }
    config = LlamaConfig(
        vocab_size=vocab, bos_token_id=None, eos_token_id=2, pad_token_id=None, initializer_range=initializer_range,
        **{**shape, **overrides},
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def t_model():
    """Llama style: 2 layers, 4 query and 2 KV heads, head size 16, vocabulary 128, fp32, EOS 2."""
    return llama()


@pytest.fixture(scope="session")
def w_model():
    """The T-model with a sliding window of 8."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=8, bos_token_id=None,
        eos_token_id=2, pad_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    return MistralForCausalLM(config).eval()


@pytest.fixture(scope="session")
def g_model():
    """Gemma-3 style: 4 layers, of which the third sees everything and the others a window of 8; vocabulary 128, fp32,
    EOS 2."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=8, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        bos_token_id=None, eos_token_id=2, pad_token_id=None, initializer_range=0.5, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).eval()


def scripted(table, *, eos=None, config_eos=None, max_tokens=256):
    """The S-model: a real Llama whose attention and MLP add nothing, so that the logits after a token are a row of
    ``table [V, V]``. ``eos`` goes into the generation config, ``config_eos`` into the model config."""
    table = torch.as_tensor(table, dtype=torch.float32)
    vocab = len(table)
    model = llama(
        vocab, hidden_size=vocab, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=max_tokens, rms_norm_eps=1e-12,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(table.T / vocab**0.5)
    model.config.eos_token_id = config_eos
    model.generation_config.eos_token_id = eos
    return model


def chain(vocab, **kwargs):
    """An S-model that counts: after token t comes t + 1."""
    return scripted(10.0 * torch.eye(vocab).roll(1, 1), **kwargs)


@pytest.fixture(scope="session")
def make_llama():
    return llama


@pytest.fixture(scope="session")
def make_scripted():
    return scripted


@pytest.fixture(scope="session")
def make_chain():
    return chain


class PieceTokenizer:
    """Token i is the i-th of some byte strings, which may hold several characters or a part of one.

    ``specials`` are ids that decoding leaves out; ``bos`` is put in front of every prompt.
    """

    def __init__(self, pieces, *, specials=(), bos=None, eos=None):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.specials = set(specials)
        self.bos, self.eos_token_id = bos, eos
        self.chat_template = None

    def __call__(self, text, add_special_tokens=True):
        rest, ids = text.encode(), []
        if add_special_tokens and self.bos is not None:
            ids.append(self.bos)
        while rest:
            fits = [i for i, p in enumerate(self.pieces) if p and i not in self.specials and rest.startswith(p)]
            if not fits:
                raise ValueError(f"no piece begins {rest!r}")
            best = max(fits, key=lambda i: (len(self.pieces[i]), -i))
            ids.append(best)
            rest = rest[len(self.pieces[best]) :]
        return {"input_ids": ids}

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=None):
        kept = [i for i in ids if not (skip_special_tokens and i in self.specials)]
        return b"".join(self.pieces[i] for i in kept).decode(errors="replace")


@pytest.fixture(scope="session")
def piece_tokenizer():
    return PieceTokenizer


@pytest.fixture(scope="session")
def byte_tokenizer():
    """One token a byte, 256 begins a text and 257 ends one."""
    pieces = [bytes([i]) for i in range(256)] + [b"<s>", b"</s>"]
    return PieceTokenizer(pieces, specials=(256, 257), bos=256, eos=257)


@pytest.fixture(scope="session")
def engine_for():
    """``engine_for(model, tokenizer, **EngineConfig fields)``: small pages, and a pool full of NaN, so that a read of
    a slot that nobody has written shows."""
    from octavo.core import Engine, EngineConfig

    def build(model, tokenizer=None, *, method=None, **fields):
        config = EngineConfig(**{"page_tokens": 4, "pool_tokens": 400, "max_seqs": 8, "backend": "reference", **fields})
        engine = Engine(model, tokenizer, config, method=method)
        poison(engine)
        return engine

    return build


def poison(engine):
    engine._runner.kv.fill_(float("nan"))


@dataclass
class Drained:
    """What came out of an engine: completions by id, streams by (id, sample), and every step's plan."""

    completions: dict = field(default_factory=dict)
    tokens: dict = field(default_factory=dict)
    text: dict = field(default_factory=dict)
    order: list = field(default_factory=list)
    steps: int = 0

    def take(self, outputs):
        for out in outputs:
            key = out.request_id, out.sample
            self.tokens.setdefault(key, []).extend(out.new_token_ids)
            self.text[key] = self.text.get(key, "") + out.new_text
            if out.completion is not None:
                assert out.request_id not in self.completions, "a request ended twice"
                self.completions[out.request_id] = out.completion
                self.order.append(out.request_id)
        self.steps += 1

    def tokens_of(self, request_id):
        samples = self.completions[request_id].samples
        return samples[0].token_ids if len(samples) == 1 else [sample.token_ids for sample in samples]


@pytest.fixture(scope="session")
def drain():
    """``drain(engine, after_step=None)``: step to the end with ``check()`` after every step; what was streamed must
    be what the completions hold."""

    def run(engine, after_step=None, limit=2000):
        drained = Drained()
        while engine.has_work():
            drained.take(engine.step())
            engine.check()
            if after_step is not None:
                after_step(drained)
            assert drained.steps < limit, "the engine does not come to an end"
        for request_id, completion in drained.completions.items():
            for number, sample in enumerate(completion.samples):
                streamed = drained.tokens[request_id, number]  # since the call, if there were steps before it
                assert sample.token_ids[len(sample.token_ids) - len(streamed) :] == streamed
                assert sample.text.endswith(drained.text[request_id, number])
        return drained

    return run


@pytest.fixture(scope="session")
def assert_idle():
    """The idle invariant: nothing is held, every unit is free or can be found, and nothing of a request is left."""

    def check(engine):
        engine.check()
        stats = engine.stats()
        assert not engine.has_work()
        assert stats.units_held == stats.pages_held == 0
        assert stats.units_free + stats.units_cached == stats.units_total
        if len(engine._plan.groups) == 1:
            assert stats.pages_free + stats.pages_cached == stats.pages_total
        assert (stats.running, stats.waiting) == (0, 0)
        assert not engine._pool.refs.any()
        scheduler = engine._scheduler
        assert not (engine._requests or scheduler.parked or scheduler._computing or engine._undelivered)
        assert sum(engine._pool.size[page] for page in engine._pool.index._of_page) == stats.units_cached

    return check


@pytest.fixture(scope="session")
def poison_pool():
    return poison
