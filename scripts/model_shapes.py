"""Models of random weights in the shape of known ones: for speed, which depends on shapes alone, never for quality."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.scripts.refusal import ConfigError

if TYPE_CHECKING:
    from octavo.scripts.schema_groups import ShapedModelSettings

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
}
"""Name -> fields of ``LlamaConfig``."""


def configuration(settings: ShapedModelSettings) -> Any:
    """The transformers configuration of the model that settings describe.

    Raises:
        ConfigError: none is at the path, or the model has layers with a sliding window.
    """
    from transformers import AutoConfig, LlamaConfig

    if settings.path is None:
        shape = SHAPES[settings.shape or default_shape(device_type(settings))]
        return LlamaConfig(**shape, architectures=["LlamaForCausalLM"])  # which vLLM asks for
    try:
        config = AutoConfig.from_pretrained(settings.path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={settings.path}: {error}") from error
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if "sliding_attention" in kinds if kinds else getattr(text, "sliding_window", None):
        raise ConfigError(
            f"model.path={settings.path}: layers with a sliding window of {text.sliding_window} tokens read less than "
            "the floor counts; take a model without them, for instance model=random"
        )
    return config


def dtype(settings: ShapedModelSettings) -> str:
    """Name of the weights' type in torch; "auto" is a checkpoint's own, and for random weights bf16, or on a CPU what
    it computes with."""
    from octavo.kernels.cpu import processor
    from octavo.scripts.build import DTYPES

    if settings.dtype != "auto" or settings.path is not None:
        return DTYPES[settings.dtype]
    return "bfloat16" if device_type(settings) == "cuda" or processor.multiplies_bf16() else "float32"


def make(settings: ShapedModelSettings) -> Any:
    """The model itself, in eval mode on its device: loaded, or of random weights that are made on the device.

    Raises:
        ConfigError: nothing can be loaded from the path.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from octavo.scripts import build

    if settings.path is not None:
        return build.load_model(settings)[0]
    with torch.device(device_type(settings) if settings.device == "auto" else settings.device):
        model = AutoModelForCausalLM.from_config(configuration(settings), dtype=getattr(torch, dtype(settings)))
    return model.eval()


def default_shape(device: str) -> str:
    """What is served where nobody asks for a model: the customary size on a GPU, one that is bearable elsewhere."""
    return "llama-8b" if device == "cuda" else "smollm2-135m"


def device_type(settings: ShapedModelSettings) -> str:
    """Kind of the device: cuda or cpu."""
    import torch

    if settings.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(settings.device).type
