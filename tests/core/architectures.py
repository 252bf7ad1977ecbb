"""Tiny random models of many architectures, as transformers makes them."""

import pytest
import torch
import transformers

VOCAB = 128
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "gemma2": ("Gemma2", {**MIXED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", {**MIXED, "query_pre_attn_scalar": 256, "_config": "Gemma3TextConfig"}),
    "phi3": ("Phi3", {"sliding_window": 8, "head_dim": None}),
    "gpt_oss": ("GptOss", {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2", {"head_dim": None}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8, "head_dim": None}),
    "cohere2": ("Cohere2", {**MIXED, "logit_scale": 1.0}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": None, "head_dim": None}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "head_dim": None}),
    "glm": ("Glm", {}),
    "glm4": ("Glm4", {}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": None, "head_dim": None}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "head_dim": None}),
    "gpt2": ("GPT2", {"num_key_value_heads": None, "head_dim": None}),
}

NO_KEYWORDS = {"gpt2": "transformers 5.0 does not pass keyword arguments on to the attention of gpt2"}


def refusal(name):
    """Why the installed transformers has a model that cannot be served; None if it can."""
    return NO_KEYWORDS.get(name) if transformers.__version__.startswith("5.0.") else None


def build(name, **overrides):
    family, extra = MODELS[name]
    extra = {**extra, **overrides}
    model_class = getattr(transformers, f"{family}LMHeadModel" if name == "gpt2" else f"{family}ForCausalLM", None)
    config_class = getattr(transformers, extra.pop("_config", f"{family}Config"), None)
    if model_class is None or config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    fields = {key: value for key, value in {**SHAPE, **extra}.items() if value is not None or "token_id" in key}
    torch.manual_seed(0)
    model = model_class(config_class(**fields, attn_implementation="eager")).eval()  # sdpa drops caps in 5.0
    with torch.no_grad():  # sinks, biases and norms begin as 0 or 1: make them matter
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = None
    return model
