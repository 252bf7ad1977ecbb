"""What users get wrong: a ValueError with the offending value and the limit, before anything is held."""

import os
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from octavo.core import BatchError, Engine, EngineConfig, SamplingParams
from octavo.core.policies import EVICTIONS, FixedPages
from octavo.core.policies.lru_k import LruK
from octavo.core.policies.page_divisors import WholePages

NAN = float("nan")


class Forgetful:
    """Ranks, and does not say how many uses of a page it reads."""

    def rank(self, pages, facts):
        return np.zeros(len(pages))

    def __repr__(self):
        return "Forgetful"


class TestEngineConfig:
    def test_defaults_of_the_contract(self):
        config = EngineConfig()
        assert config.text_page_tokens == 16 and config.unit_tokens == 16
        assert (config.max_seqs, config.step_tokens, config.memory_fraction, config.seed) == (256, 8192, 0.9, 0)
        assert (config.prefix_cache, config.allocator, config.eviction, config.host_tokens) == (True, "stack", "lru", 0)
        assert (config.kv_dtype, config.backend, config.execution) == ("auto", "auto", "auto")
        assert config.pool_tokens is config.max_model_tokens is config.page_policies is None

    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"page_tokens": 0}, r"page_tokens must be an integer of at least 1, got 0"),
            ({"page_tokens": -4}, r"page_tokens .* got -4"),
            ({"page_tokens": 16.0}, r"page_tokens .* got 16.0"),
            ({"page_tokens": "16"}, r"page_tokens .* got '16'"),
            ({"page_tokens": True}, r"page_tokens .* got True"),
            ({"pool_tokens": 0}, r"pool_tokens .* got 0"),
            ({"max_seqs": 0}, r"max_seqs .* got 0"),
            ({"max_seqs": None}, r"max_seqs .* got None"),
            ({"step_tokens": 0}, r"step_tokens .* got 0"),
            ({"max_model_tokens": -1}, r"max_model_tokens .* got -1"),
            ({"memory_fraction": 0.0}, r"memory_fraction must be in \(0, 1\], got 0.0"),
            ({"memory_fraction": 1.5}, r"memory_fraction .* got 1.5"),
            ({"memory_fraction": NAN}, r"memory_fraction .* got nan"),
            ({"memory_fraction": "half"}, r"memory_fraction .* got 'half'"),
            ({"allocator": "stak"}, r"allocator='stak' is unknown; did you mean 'stack'"),
            ({"allocator": 4}, r"allocator=4 is unknown"),
            ({"layer_groups": 1}, r"layer_groups must be True or False, got 1"),
            ({"eviction": "lur"}, r"eviction='lur' is unknown; did you mean 'lru'"),
            ({"eviction": "belady"}, r"eviction='belady' is unknown"),
            ({"eviction": 4}, r"eviction must be a name or an EvictionPolicy, got 4"),
            ({"eviction": LruK}, r"eviction=LruK is a class; give LruK\(\.\.\.\)"),
            ({"eviction": Forgetful()}, r"history of the eviction policy Forgetful must be an integer .* got None"),
            ({"kv_dtype": "fp8"}, r"kv_dtype='fp8' is not built yet; use one of: auto, fp16, bf16, fp32"),
            ({"kv_dtype": "int4"}, r"kv_dtype='int4' is not built yet"),
            ({"kv_dtype": "float32"}, r"kv_dtype='float32' is unknown"),
            ({"backend": "cuda"}, r"backend='cuda' is unknown; .*reference, cpu, triton"),
            ({"host_tokens": -1}, r"host_tokens must be an integer of at least 0, got -1"),
            ({"host_tokens": 64, "prefix_cache": False}, r"host_tokens=64 needs prefix_cache=True"),
            ({"seed": "x"}, r"seed must be an integer, got 'x'"),
            ({"seed": 0.5}, r"seed must be an integer, got 0.5"),
            ({"page_policies": {"audio": 8}}, r"unknown segment kind 'audio'"),
            ({"page_policies": {1: 8}}, r"unknown segment kind 1; known: text, image"),
            ({"page_policies": {"image": WholePages}}, r"\['image'\]=WholePages is a class"),
            ({"page_policies": {"image": 0}}, r"page_policies\['image'\] .* got 0"),
            ({"page_policies": {"text": WholePages()}}, r"'text'\]=WholePages\(grain=8\): text grows while it is"),
            ({"page_tokens": 8, "page_policies": {"text": 16}}, r"page_tokens=8 and page_policies"),
        ],
        ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
    )  # fmt: skip
    def test_refuses(self, fields, message):
        with pytest.raises(ValueError, match=message):
            EngineConfig(**fields)

    @pytest.mark.parametrize(
        "fields, text, unit",
        [
            ({"page_tokens": 1}, 1, 1),
            ({"page_tokens": 48}, 48, 16),
            ({"page_tokens": 256}, 256, 64),
            ({"page_policies": {"text": 32}}, 32, 32),
            ({"page_policies": {"image": 24}}, 16, 8),
            ({"page_policies": {"text": FixedPages(20), "image": 30}}, 20, 2),
        ],
    )
    def test_page_sizes(self, fields, text, unit):
        config = EngineConfig(**fields)
        assert (config.text_page_tokens, config.unit_tokens) == (text, unit)

    @pytest.mark.parametrize(
        "field, names",
        [
            ("allocator", "stack first_fit next_fit best_fit buddy linear"),
            ("eviction", "lru lru_k fifo lfu priority cost"),
        ],
    )
    def test_policies_of_the_contract_go_by_name(self, field, names):
        for name in names.split():
            assert getattr(EngineConfig(**{field: name}), field) == name

    def test_each_config_makes_a_policy_of_its_own_unless_it_is_given_one(self):
        config, own = EngineConfig(eviction="lfu"), EVICTIONS["lru"]()
        assert type(config.eviction_policy) is type(EVICTIONS["lfu"]())
        assert EngineConfig(eviction=own).eviction_policy is own

    def test_is_frozen(self):
        with pytest.raises(FrozenInstanceError):
            EngineConfig().page_tokens = 3
        with pytest.raises(TypeError, match="page_tokns"):
            EngineConfig(page_tokns=3)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"host_tokens": 10**12}, r"takes \d{15} bytes of host memory, and \d+ are available; lower host_tokens"),
        ({"host_tokens": 10**30}, r"takes \d{33} bytes of host memory, and \d+ are available; lower host_tokens"),
        (
            {"max_seqs": 10**9},
            r"=1000000000 sequences of 64 entries take 256000000000 bytes, and \d+ are available",
        ),
        ({"max_seqs": 10**30}, r"take \d{33} bytes, and \d+ are available; lower max_seqs or max_model_tokens"),
        ({"base_share": 0.5, "growth_tokens": 10**9}, r"holds 400 tokens; lower it \(growth_tokens of an engine\)"),
    ],
)
def test_more_than_there_is_memory_for(fields, message, t_model, engine_for):
    with pytest.raises(ValueError, match=message):
        engine_for(t_model, **fields)


class TestSamplingParams:
    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"n": 0}, "n must be an integer of at least 1, got 0"),
            ({"n": 1.5}, "n must be an integer of at least 1, got 1.5"),
            ({"max_tokens": 0}, "max_tokens .* got 0"),
            ({"max_tokens": None}, "max_tokens .* got None"),
            ({"min_tokens": -1}, "min_tokens must be an integer of at least 0, got -1"),
            ({"min_tokens": 17}, "min_tokens=17 is above max_tokens=16"),
            ({"temperature": -0.1}, "temperature .* got -0.1"),
            ({"temperature": NAN}, "temperature .* got nan"),
            ({"temperature": float("inf")}, "temperature .* got inf"),
            ({"temperature": "hot"}, "temperature .* got 'hot'"),
            ({"top_k": -1}, "top_k .* got -1"),
            ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
            ({"top_p": 1.1}, "top_p .* got 1.1"),
            ({"top_p": NAN}, "top_p .* got nan"),
            ({"min_p": -0.1}, "min_p .* got -0.1"),
            ({"min_p": 1.1}, "min_p .* got 1.1"),
            ({"repetition_penalty": 0}, "repetition_penalty .* got 0"),
            ({"repetition_penalty": -1.0}, "repetition_penalty .* got -1.0"),
            ({"seed": 1.5}, "seed .* got 1.5"),
            ({"seed": True}, "seed .* got True"),
            ({"stop": [""]}, r"stop must hold non-empty strings, got \[''\]"),
            ({"stop": ""}, "stop must hold non-empty strings, got ''"),
            ({"stop": [3]}, r"stop must hold non-empty strings, got \[3\]"),
            ({"stop": 3}, "stop must hold non-empty strings, got 3"),
            ({"stop": None}, "stop must hold non-empty strings, got None"),
            ({"stop_token_ids": [-1]}, r"stop_token_ids .* got \[-1\]"),
            ({"stop_token_ids": ["a"]}, r"stop_token_ids .* got \['a'\]"),
            ({"stop_token_ids": 3}, "stop_token_ids .* got 3"),
            ({"logprobs": -1}, "logprobs .* got -1"),
            ({"prompt_logprobs": 1.0}, "prompt_logprobs .* got 1.0"),
        ],
        ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
    )
    def test_refuses(self, fields, message):
        with pytest.raises(ValueError, match=message):
            SamplingParams(**fields)

    def test_accepts_one_string_or_lists(self):
        assert SamplingParams(stop="ab").stop == ("ab",)
        assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]).stop == ("a", "b")
        assert SamplingParams(seed=None, logprobs=0, prompt_logprobs=0, top_k=10**9).logprobs == 0


class TestPrompts:
    @pytest.mark.parametrize(
        "prompt, message",
        [
            ([], "prompt is empty"),
            ((), "prompt is empty"),
            ([128], "token id 128 is outside the vocabulary of 128 tokens"),
            ([5, -1], "token id -1 is outside"),
            ([5, 1.0], "must be an integer, got float: 1.0"),
            ([5, True], "must be an integer, got bool: True"),
            ([5, None], "must be an integer, got NoneType"),
            (7, "a string or a list of token ids, got int: 7"),
            (None, "a string or a list of token ids, got NoneType"),
            ({"a": 1}, "a string or a list of token ids, got dict"),
            (b"hi", "a string or a list of token ids, got bytes"),
            ("hi", "needs a tokenizer, and the engine has none"),
            (["hi", "ho"], "needs a tokenizer"),
            (["hi", 3], "part of type int"),
            ([np.int64(3)], "must be an integer, got int64"),
            (torch.tensor([3]), "got Tensor"),
        ],
        ids=lambda value: repr(value)[:20] if not isinstance(value, str) or len(value) < 8 else "",
    )
    def test_br61_bad_prompts_fail_alone(self, t_model, engine_for, assert_idle, prompt, message):
        engine = engine_for(t_model)
        with pytest.raises(ValueError, match=message):
            engine.submit(prompt)
        assert not engine.has_work()
        with pytest.raises(BatchError, match=r"1 of 3 prompts were refused, .* prompt 1: ") as refused:
            engine.generate([[5], prompt, [6]], SamplingParams(max_tokens=2))
        good, bad, other = refused.value.completions
        assert bad is None and list(refused.value.errors) == [1]
        assert good.prompt_token_ids == [5] and other.prompt_token_ids == [6]
        assert len(good.samples[0].token_ids) == len(other.samples[0].token_ids) == 2
        assert_idle(engine)

    @pytest.mark.parametrize("bos, ok", [(None, False), (256, True)], ids=["no_bos", "bos_start"])
    def test_br61_empty_text(self, make_llama, engine_for, piece_tokenizer, assert_idle, bos, ok):
        tokenizer = piece_tokenizer([bytes([i]) for i in range(256)] + [b"<s>"], specials=[256], bos=bos)
        engine = engine_for(make_llama(257), tokenizer)
        if ok:
            assert engine.generate([""], SamplingParams(max_tokens=1))[0].prompt_token_ids == [256]
        else:
            with pytest.raises(BatchError, match="prompt 0: the prompt is empty: ''") as refused:
                engine.generate(["", "hi", " "], SamplingParams(max_tokens=1))
            assert [c and c.prompt_token_ids for c in refused.value.completions] == [None, [104, 105], [32]]
        assert_idle(engine)

    def test_a_tokenizer_larger_than_the_model_is_found_out(self, t_model, engine_for, byte_tokenizer):
        with pytest.raises(ValueError, match="token id 256 is outside the vocabulary of 128"):
            engine_for(t_model, byte_tokenizer).submit("hi")


class TestRequests:
    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"params": SamplingParams(stop="x")}, r"stop strings \('x',\) need a tokenizer"),
            ({"params": SamplingParams(stop_token_ids=[3, 128])}, r"stop_token_ids \[128\] .* 128"),
            ({"params": {"max_tokens": 3}}, "must be SamplingParams, got dict"),
            ({"priority": "high"}, "priority must be an integer, got 'high'"),
            ({"salt": 5}, "salt must be a string, got 5"),
            ({"request_id": 5}, "request_id must be a string, got 5"),
        ],
        ids=["stop", "stop_token_ids", "params", "priority", "salt", "request_id"],
    )
    def test_refuses(self, t_model, engine_for, assert_idle, fields, message):
        engine = engine_for(t_model)
        with pytest.raises(ValueError, match=message):
            engine.submit([5], **fields)
        assert_idle(engine)

    def test_parameters_for_each_prompt(self, t_model, engine_for):
        engine = engine_for(t_model)
        each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 3)]
        assert [len(c.samples[0].token_ids) for c in engine.generate([[5], [6]], each)] == [1, 3]
        with pytest.raises(ValueError, match="1 prompts came with 2"):
            engine.generate([[5]], each)

    def test_no_prompts(self, t_model, engine_for):
        assert engine_for(t_model).generate([]) == []

    def test_step_without_work(self, t_model, engine_for):
        engine = engine_for(t_model)
        assert not engine.has_work() and engine.step() == []


class TestEngine:
    def test_model_in_training_mode(self, make_llama):
        with pytest.raises(ValueError, match=r"model.eval\(\)"):
            Engine(make_llama().train())

    def test_triton_needs_a_device(self, t_model, engine_for, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(ValueError, match="backend='triton' needs a CUDA device"):
            engine_for(t_model, backend="triton")

    @pytest.mark.parametrize(
        ("head_dim", "dtype", "says"),
        [
            (272, torch.float32, "at most 256 elements, and those of LlamaForCausalLM have 272; use backend="),
            (16, torch.float64, "keeps its keys in torch.float64; set kv_dtype"),
        ],
    )
    def test_models_without_triton_kernels(self, head_dim, dtype, says, make_llama, engine_for, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # a device is not what is missing
        model = make_llama(head_dim=head_dim, num_hidden_layers=1).to(dtype)
        with pytest.raises(ValueError, match=says):
            engine_for(model, backend="triton")
        engine_for(model, backend="reference")

    def test_nothing_at_the_path(self, tmp_path):
        with pytest.raises(ValueError, match=str(tmp_path / "nowhere")):
            Engine.from_pretrained(tmp_path / "nowhere")
        with pytest.raises(ValueError, match=str(tmp_path)):
            Engine.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        "name, dtype", [("auto", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
    )
    def test_element_type_of_the_pool(self, t_model, engine_for, name, dtype):
        engine = engine_for(t_model, kv_dtype=name)
        assert engine._runner.kv.dtype == dtype
        expected = engine_for(t_model).score([5] * 9, [7, 8])
        assert engine.score([5] * 9, [7, 8]) == pytest.approx(expected, abs=1e-5 if name == "auto" else 0.2)

    def test_pool_from_memory_is_bounded(self, t_model, monkeypatch):
        monkeypatch.setattr(os, "sysconf", lambda name: {"SC_AVPHYS_PAGES": 100, "SC_PAGE_SIZE": 4096}[name])
        engine = Engine(t_model, config=EngineConfig(memory_fraction=0.5, backend="reference"))
        page_bytes = 16 * 2 * 2 * 2 * 16 * 4
        assert engine.stats().pages_total == 204800 // page_bytes
        with pytest.raises(ValueError, match=r"memory_fraction=0\.01"):
            Engine(t_model, config=EngineConfig(memory_fraction=0.01))

    def test_pool_from_memory_is_no_larger_than_the_sequences(self, t_model):
        engine = Engine(t_model, config=EngineConfig(max_seqs=2, max_model_tokens=100, backend="reference"))
        assert engine.stats().pages_total == 2 * 7
