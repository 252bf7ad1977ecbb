"""Which models that see a setting gives: the demo model, a folder of one, a LLaVA checkpoint, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core import Engine, EngineConfig, SamplingParams
from octavo.scripts.experiments.image_benchmarks import prompt_of
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema_multimodal import VisionModelSettings
from octavo.scripts.tasks.image_items import PLACEHOLDER, ImageItem
from octavo.scripts.vision_models import load_vision_model


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory, tiny_demo: Path) -> Path:
    """Random weights in Hugging Face's layout: 4 tokens an image, and the demo model's tokenizer of 110 words."""
    import transformers as hf

    from octavo.multimodal.demo_tokenizer import IMAGE, VOCABULARY, build_tokenizer

    text = hf.LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    )  # fmt: skip
    vision = hf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = hf.LlavaConfig(
        vision_config=vision.to_dict(), text_config=text.to_dict(), image_token_index=VOCABULARY[IMAGE]
    )
    folder = tmp_path_factory.mktemp("llava") / "model"
    torch.manual_seed(0)
    hf.LlavaForConditionalGeneration(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def item(images: int) -> ImageItem:
    pixels = tuple(np.full((40, 40, 3), shade, np.uint8) for shade in range(images))
    context = " ".join([PLACEHOLDER] * images)
    return ImageItem("x", "x", context, pixels, ("what is there ?",), "nothing", lambda outputs: {"accuracy": 0.0})


def answered(vision: Any) -> Any:
    engine = Engine(vision.model, vision.tokenizer, EngineConfig(pool_tokens=512), encoders={"image": vision.encoder})
    prompt = prompt_of(item(2), "what is there ?", vision)
    [completion] = engine.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.check()
    return completion


def test_a_folder_of_the_demo_model(tiny_demo: Path) -> None:
    vision = load_vision_model(VisionModelSettings(str(tiny_demo), device="cpu"))
    assert vision.demo and vision.encoder.n_tokens(None) == 16
    assert next(vision.model.parameters()).dtype == torch.float32
    assert len(answered(vision).prompt_token_ids) == 1 + 2 * 16 + 4 + 4  # <s>, images, the question, its frame
    half = load_vision_model(VisionModelSettings(str(tiny_demo), dtype="bf16", device="cpu"))
    assert next(half.model.parameters()).dtype == torch.bfloat16


def test_a_llava_checkpoint(llava: Path) -> None:
    vision = load_vision_model(VisionModelSettings(str(llava), device="cpu"))
    assert not vision.demo and vision.encoder.n_tokens(None) == 4
    plain = answered(vision)
    assert len(plain.prompt_token_ids) == 1 + 2 * 4 + 4
    vision.tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}"
        "{% endif %}{% endfor %}{% endfor %} answer :"
    )
    assert len(answered(vision).prompt_token_ids) == len(plain.prompt_token_ids) + 2


def test_the_models_of_a_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no demo model, it has no config.json"):
        load_vision_model(VisionModelSettings(str(tmp_path), device="cpu"))
    (tmp_path / "config.json").write_text('{"model_type": "llava"')
    with pytest.raises(ConfigError, match=r"it has no projector\.safetensors"):
        load_vision_model(VisionModelSettings(str(tmp_path), device="cpu"))


def test_open_clip_is_asked_for_by_name(tiny_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ConfigError, match="open_clip"):
        load_vision_model(VisionModelSettings(str(tiny_demo), device="cpu"))
