"""How a model's keys turn: found for models of several families, and refused by name where they do not just turn."""

import pytest
import torch

from octavo.core.errors import UnsupportedModelError
from octavo.core.execution.rotary import find_rotary
from octavo.core.hf_model import HFModel

SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip


def make(family, **overrides):
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **overrides})
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    return HFModel(kind(config).eval())


def frequencies(base, pairs):
    return base ** -(torch.arange(pairs).float() / pairs)


FIXED = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
]  # fmt: skip


@pytest.mark.parametrize("rope", FIXED, ids=lambda rope: rope["rope_type"])
def test_fixed_frequencies(rope):
    model = make("Llama", rope_parameters=rope)
    rotary = find_rotary(model)
    assert rotary.rows == (0, 0, 0) and rotary.kinds.tolist() == [0, 0, 0] and not rotary.interleaved
    torch.testing.assert_close(rotary.of_layer(1), model.model.model.rotary_emb.inv_freq)


def test_half_precision():
    model = make("Llama")
    model = HFModel(model.model.to(torch.bfloat16))
    assert find_rotary(model).rows == (0, 0, 0)


def test_two_kinds_of_layers(g_model):
    rotary = find_rotary(HFModel(g_model))
    assert rotary.rows == (0, 0, 0, 1) or rotary.rows == (1, 1, 1, 0)
    torch.testing.assert_close(rotary.of_layer(0), frequencies(1e4, 8))
    torch.testing.assert_close(rotary.of_layer(3), frequencies(1e6, 8))


def test_layers_without_positions():
    rotary = find_rotary(make("SmolLM3", no_rope_layers=[1, 0, 1], pad_token_id=0))
    assert rotary.rows == (0, 1, 0) and not rotary.of_layer(1).any() and rotary.of_layer(0).all()


def test_interleaved_pairs():
    assert find_rotary(make("Cohere", pad_token_id=0, bos_token_id=1, eos_token_id=2)).interleaved


def test_a_part_of_the_head():
    model = make("GPTNeoX", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    assert find_rotary(model).of_layer(0).shape == (4,)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "LlamaForCausalLM has rope_type='dynamic'"),
        (
            {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 128, "factor": 4.0,
            },
            "LlamaForCausalLM has rope_type='longrope'",
        ),
        ({"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}, r"M-RoPE \(mrope_section=\[2"),
    ],
    ids=["dynamic", "longrope", "mrope"],
)  # fmt: skip
def test_refused_by_name(rope, message):
    with pytest.raises(UnsupportedModelError, match=message):
        find_rotary(make("Llama", rope_parameters=rope))


def test_learned_positions():
    model = make("GPT2", n_embd=64, n_head=4, n_layer=3, n_positions=512)
    with pytest.raises(UnsupportedModelError, match=r"the keys of GPT2LMHeadModel .*\(learned positions"):
        find_rotary(model)


def test_what_the_model_says_is_not_believed():
    """A buffer of other frequencies than the keys turn by."""
    model = make("Llama")
    rotary = model.model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(x, position_ids * 3)
    with pytest.raises(UnsupportedModelError, match="more than a turn"):
        find_rotary(model)
