"""Images that see themselves whole, as in Gemma 3: an engine against ``Gemma3ForConditionalGeneration``. Tiny, random.

The encoder is Hugging Face's own SigLIP tower and projector behind octavo's ``ImageEncoder``.
"""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from octavo.core import Engine, EngineConfig, SamplingParams
from octavo.core.serving.prompts import TokenSegment
from octavo.multimodal.fitting import fit
from octavo.multimodal.image_encoder import ImageEncoder
from octavo.multimodal.projector import Projector

VOCAB, IMAGE, SIDE, PATCH, TOKENS = 96, 95, 56, 14, 4
WINDOW = 6


@pytest.fixture(scope="module")
def gemma():
    import transformers as hf

    text = hf.Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, sliding_window=WINDOW,
        query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    vision = hf.SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE,
        patch_size=PATCH,
    )  # fmt: skip
    config = hf.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=TOKENS, image_token_index=IMAGE,
        boi_token_index=93, eoi_token_index=94,
    )  # fmt: skip
    config.image_token_id = IMAGE
    torch.manual_seed(0)
    model = hf.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return model


class SiglipTower(nn.Module):
    """A ``VisionTower`` around Hugging Face's: the last layer's tokens, of which none is a class token."""

    width, image_size, grid, n_tokens = 32, (SIDE, SIDE), (SIDE // PATCH, SIDE // PATCH), (SIDE // PATCH) ** 2
    policy, settings, preprocessing = None, "siglip layer=-1", f"pad {SIDE} / 127.5 - 1"

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def check(self, image):
        pass

    def preprocess(self, images):
        return torch.stack([torch.tensor(fit(image, SIDE).pixels).permute(2, 0, 1) / 127.5 - 1 for image in images])

    def forward(self, pixels):
        return self.inner(pixels).last_hidden_state


class GemmaProjector(Projector):
    def __init__(self, inner):
        super().__init__("gemma3 pooling", 32, 32)
        self.inner = inner

    def n_tokens(self, tokens):
        return TOKENS

    def forward(self, tokens):
        return self.inner(tokens)


@pytest.fixture(scope="module")
def parts(gemma):
    """The language model alone, and the encoder."""
    import transformers as hf

    model = hf.Gemma3ForCausalLM(gemma.config.text_config).eval()
    model.model, model.lm_head = gemma.model.language_model, gemma.lm_head
    tower, projector = SiglipTower(gemma.model.vision_tower), GemmaProjector(gemma.model.multi_modal_projector)
    return model, ImageEncoder(tower, projector, bidirectional=True)


def picture(seed, height=40, width=50):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def words(n, seed):
    return TokenSegment("text", random.Random(seed).choices(range(3, 90), k=n))


@torch.no_grad()
def expected(gemma, encoder, prompt, causal=False):
    """Log-probabilities [T, V]. ``causal`` takes away the only thing that tells Hugging Face where images are."""
    ids = [id_ for p in prompt for id_ in (p.token_ids if isinstance(p, TokenSegment) else [IMAGE] * TOKENS)]
    images = [encoder.read(part) for part in prompt if not isinstance(part, TokenSegment)]
    ids = torch.tensor([ids])
    kinds = torch.zeros_like(ids) if causal else (ids == IMAGE).long()
    pixels = encoder.tower.preprocess(images)
    return gemma(input_ids=ids, pixel_values=pixels, token_type_ids=kinds).logits[0].log_softmax(-1)


PROMPTS = [
    [words(5, 0), picture(0), words(4, 1), picture(1, 70, 31), words(9, 2)],
    [words(1, 3), picture(2), words(2, 4), picture(0), words(1, 5)],
]


@pytest.mark.parity
@pytest.mark.parametrize("step_tokens", [256, 5, TOKENS])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["long", "short"])
def test_logits_are_hugging_faces(gemma, parts, prompt, step_tokens):
    model, encoder = parts
    wanted = expected(gemma, encoder, prompt)
    assert (wanted - expected(gemma, encoder, prompt, causal=True)).abs().max() > 0.1, "both masks say the same here"
    engine = Engine(model, None, EngineConfig(pool_tokens=512, step_tokens=step_tokens), encoders={"image": encoder})
    params = SamplingParams(max_tokens=1, logprobs=VOCAB, prompt_logprobs=VOCAB)
    (done,) = engine.generate([prompt], params)
    engine.check()
    entries = [*done.prompt_logprobs, done.samples[0].logprobs[0]]
    texts = [at for at, entry in enumerate(entries) if entry is not None]
    assert len(texts) == sum(len(part.token_ids) for part in prompt if isinstance(part, TokenSegment))
    for at in texts:
        row = torch.tensor([entries[at][token] for token in range(VOCAB)])
        torch.testing.assert_close(row, wanted[at - 1], atol=1e-4, rtol=0)


@pytest.mark.parity
@pytest.mark.parametrize("page_tokens", [1, 2, 4, 16])
def test_prefix_hits_give_the_same(gemma, parts, page_tokens):
    model, encoder = parts
    policies = {"text": page_tokens, "image": min(page_tokens, TOKENS)}
    config = EngineConfig(pool_tokens=512, step_tokens=6, page_policies=policies)
    engine = Engine(model, None, config, encoders={"image": encoder})
    start, target = PROMPTS[0], [7, 11, 3]
    for more in ([], [words(3, 6)], [picture(3), words(1, 7)], []):
        prompt = [*start, *more]
        wanted = expected(gemma, encoder, [*prompt, TokenSegment("text", target)])
        due = [float(wanted[at - 4, token]) for at, token in enumerate(target)]
        assert engine.score(prompt, target) == pytest.approx(due, abs=1e-4)
        engine.check()
    assert engine.stats().hit_tokens > 20
