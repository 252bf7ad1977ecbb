"""LLaVA checkpoints in Hugging Face's layout against Hugging Face itself: tensors bit by bit, logits within 1e-4. Tiny
random models, made from configs."""

import json
import random

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from octavo.core import Engine, EngineConfig, SamplingParams
from octavo.core.serving.prompts import TokenSegment
from octavo.multimodal.anyres_encoder import AnyresEncoder
from octavo.multimodal.image_encoder import ImageEncoder
from octavo.multimodal.image_policy import ImagePolicy
from octavo.multimodal.image_prompts import image_prompt
from octavo.multimodal.llava import load_llava, save_llava
from octavo.multimodal.open_clip_encoder import OpenClipEncoder
from octavo.multimodal.projector import LinearConfig, MlpConfig

try:
    import open_clip  # noqa: F401
except (ImportError, RuntimeError) as error:
    pytest.skip(f"open_clip cannot be imported: {error}", allow_module_level=True)

VOCAB, IMAGE = 96, 95
SIDE, PATCH = 28, 14
PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]


def tiny(kind, *, act="quick_gelu", seed=0, **changes):
    import transformers as hf

    text = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
        pad_token_id=None, initializer_range=0.3, tie_word_embeddings=changes.pop("tied", False),
    )  # fmt: skip
    vision = hf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=2, image_size=SIDE,
        patch_size=PATCH, hidden_act=act, layer_norm_eps=1e-3, initializer_range=0.3, initializer_factor=5.0,
    )  # fmt: skip
    classes = {
        "llava": (hf.LlavaConfig, hf.LlavaForConditionalGeneration),
        "llava_next": (hf.LlavaNextConfig, hf.LlavaNextForConditionalGeneration),
    }
    make_config, make = classes[kind]
    extra = {"image_grid_pinpoints": PINPOINTS} if kind == "llava_next" else {}
    config = make_config(
        vision_config=vision.to_dict(), text_config=text.to_dict(), image_token_index=IMAGE, initializer_range=0.3,
        tie_word_embeddings=text.tie_word_embeddings, **extra, **changes,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = make(config).eval()
    model.generation_config.eos_token_id = [2, 90]
    with torch.no_grad():  # what is made as zeros and ones would hide a tensor that is lost
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1) * 0.5)
    return model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """``checkpoint(kind, **changes)``: the model, and a folder that it was saved into."""
    known = {}

    def made(kind, **changes):
        key = kind, repr(changes)
        if key not in known:
            folder = tmp_path_factory.mktemp(kind)
            model = tiny(kind, **changes)
            model.save_pretrained(folder)
            known[key] = model, folder
        return known[key]

    return made


def picture(height=40, width=40, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def words(n, seed):
    return TokenSegment("text", random.Random(seed).choices(range(3, VOCAB - 5), k=n))


def pixels(kind, images, **changes):
    """As Hugging Face's processors with Pillow make them."""
    import transformers as hf

    name = {"llava": "LlavaImageProcessor", "llava_next": "LlavaNextImageProcessor"}[kind]
    settings = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}} | changes
    if kind == "llava_next":
        settings["image_grid_pinpoints"] = PINPOINTS
    return (getattr(hf, f"{name}Pil", None) or getattr(hf, name))(**settings)(images, return_tensors="pt")


@torch.no_grad()
def expected(model, prompt, encoder, **changes):
    """Log-probabilities [T, V] of Hugging Face's whole model, for a prompt list."""
    images = [part for part in prompt if not isinstance(part, TokenSegment)]
    ids = []
    for part in prompt:
        ids += part.token_ids if isinstance(part, TokenSegment) else [IMAGE] * encoder.n_tokens(part)
    inputs = pixels(model.config.model_type, images, **changes) if images else {}
    return model(input_ids=torch.tensor([ids]), **inputs).logits[0].log_softmax(-1)


def served(llava, prompt, **settings):
    """What an engine gives for the same: a dict by position of text behind the first."""
    engine = Engine(llava.model, None, EngineConfig(pool_tokens=2048, **settings), encoders={"image": llava.encoder})
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=1, logprobs=VOCAB, prompt_logprobs=VOCAB))
    engine.check()
    return [*done.prompt_logprobs, done.samples[0].logprobs[0]]


def require_close(entries, wanted):
    """``entries[t]`` is the distribution behind t tokens, so it stands in row t - 1."""
    compared = 0
    for at, entry in enumerate(entries):
        if entry is not None:
            row = torch.tensor([entry[token] for token in range(VOCAB)])
            torch.testing.assert_close(row, wanted[at - 1], atol=1e-4, rtol=0)
            compared += 1
    return compared


PROMPTS = {
    "llava": [
        [words(5, 0), picture(), words(4, 1), picture(50, 31, 1), words(3, 2)],
        [picture(28, 28, 2), picture(), words(2, 3)],
        [words(9, 4)],
    ],
    "llava_next": [
        [words(5, 0), picture(40, 90), words(4, 1), picture(91, 33, 1), words(3, 2)],
        [picture(28, 28, 2), words(1, 5), picture(17, 61, 3), words(2, 3)],
        [words(2, 4), picture(100, 99, 4), picture(140, 20, 5), words(2, 6)],
    ],
}


@pytest.mark.parity
@pytest.mark.parametrize("step_tokens", [512, 3])
@pytest.mark.parametrize(("kind", "number"), [(kind, number) for kind in PROMPTS for number in range(3)])
def test_logits_are_hugging_faces(checkpoint, kind, number, step_tokens):
    model, folder = checkpoint(kind)
    llava, prompt = load_llava(folder), PROMPTS[kind][number]
    wanted = expected(model, prompt, llava.encoder)
    assert wanted.std() > 0.5, "logits that are all alike would agree whatever happened"
    texts = sum(len(part.token_ids) for part in prompt if isinstance(part, TokenSegment))
    compared = require_close(served(llava, prompt, step_tokens=step_tokens), wanted)
    assert compared == texts + 1 - isinstance(prompt[0], TokenSegment)


@pytest.mark.parity
@pytest.mark.parametrize("kind", PROMPTS)
def test_prefix_hits_give_the_same(checkpoint, kind):
    """The second run finds what the first one wrote, ends of images and of pages included."""
    model, folder = checkpoint(kind)
    llava, target = load_llava(folder), [7, 11, 3]
    for prompt in PROMPTS[kind][:2]:
        wanted = expected(model, [*prompt, TokenSegment("text", target)], llava.encoder)
        due = [float(wanted[at - 4, token]) for at, token in enumerate(target)]
        config = EngineConfig(pool_tokens=2048, step_tokens=5, page_policies={"text": 4, "image": 4})
        engine = Engine(llava.model, None, config, encoders={"image": llava.encoder})
        first = engine.score(prompt, target)
        before = engine.stats().hit_tokens
        assert first == pytest.approx(due, abs=1e-4)
        assert engine.score(prompt, target) == pytest.approx(due, abs=1e-4)
        assert engine.stats().hit_tokens - before >= 8
        engine.check()


VARIANTS = [
    {"act": "gelu"},
    {"vision_feature_layer": -1},
    {"vision_feature_layer": 2},
    {"vision_feature_layer": -3, "tied": True},
    {"multimodal_projector_bias": False},
    {"vision_feature_select_strategy": "full"},
]


@pytest.mark.parity
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", PROMPTS)
def test_what_a_config_may_say(checkpoint, kind, changes, tmp_path):
    model, folder = checkpoint(kind, **changes)
    if kind == "llava_next" and "vision_feature_select_strategy" in changes:
        with pytest.raises(ValueError, match="5 tokens a tile; drop the class token"):
            load_llava(folder)
        return
    llava, prompt = load_llava(folder), PROMPTS[kind][0]
    assert require_close(served(llava, prompt), expected(model, prompt, llava.encoder))
    save_llava(tmp_path, llava.model, llava.encoder, image_token_id=IMAGE)
    require_same_model(type(model).from_pretrained(tmp_path), model)
    assert again_config(tmp_path) == again_config(folder)


def again_config(folder):
    """All of a config that the model is made of. A positive layer comes back as a negative one."""
    config = json.loads((folder / "config.json").read_text())
    layer = config["vision_feature_layer"]
    config["vision_feature_layer"] = layer if layer < 0 else layer - 4
    free = ("projection_dim", "initializer_range", "initializer_factor", "image_seq_length", "architectures", "dtype")
    for part in (config, config["vision_config"], config["text_config"]):
        for name in free:
            part.pop(name, None)
    return config


def require_same_model(one, other):
    mine, yours = one.state_dict(), other.state_dict()
    assert mine.keys() == yours.keys()
    assert [name for name in mine if not torch.equal(mine[name], yours[name])] == []


# Both ways


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", PROMPTS)
def test_there_and_back_is_lossless(checkpoint, kind, dtype, tmp_path):
    model, folder = checkpoint(kind)
    once = load_llava(folder, dtype=dtype)
    before = {name: tensor.clone() for name, tensor in once.model.state_dict().items()}
    save_llava(tmp_path / "made", once.model, once.encoder, image_token_id=IMAGE)
    made, original = (type(model).from_pretrained(path, dtype=dtype) for path in (tmp_path / "made", folder))
    require_same_model(made, original)
    again = load_llava(tmp_path / "made", dtype=dtype)
    assert again.model.generation_config.to_dict() == original.generation_config.to_dict()
    for part in (once, again):
        assert {tensor.dtype for tensor in part.model.state_dict().values()} == {dtype}
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.model.state_dict().items())
    image = picture(50, 90)
    assert once.encoder.identity(image) == again.encoder.identity(image)
    assert torch.equal(once.encoder.encode([image]), again.encoder.encode([image]))


def test_loading_draws_no_random_numbers_and_leaves_nothing_without_data(checkpoint):
    state = torch.get_rng_state()
    llava = load_llava(checkpoint("llava_next")[1])
    assert torch.equal(state, torch.get_rng_state())
    modules = (llava.model, llava.encoder.tower, llava.encoder.projector)
    assert not any(t.is_meta for m in modules for t in (*m.parameters(), *m.buffers()))
    assert not any(m.training for m in modules) and llava.tokenizer is None


@pytest.mark.parity
def test_a_tower_from_elsewhere(checkpoint, tmp_path):
    """A checkpoint whose tower is cut out of its files, and an open_clip tower that was cut behind its layer."""
    model, folder = checkpoint("llava")
    llava = load_llava(folder)
    weights = {k: v for k, v in load_file(folder / "model.safetensors").items() if not k.startswith("vision_tower")}
    (tmp_path / "part").mkdir()
    save_file(weights, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "part" / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"missing \(model\.vision_tower\..*class_embedding, .* more\)"):
        load_llava(tmp_path / "part")
    tower = llava.encoder.tower
    tower.tower.prune_intermediate_layers([tower.layer], prune_norm=True, prune_head=True)
    tower = OpenClipEncoder(tower.tower, layer=-1)
    with pytest.raises(ValueError, match="a given tower has its own, None"):
        load_llava(tmp_path / "part", tower=tower, policy=RED)
    other = load_llava(tmp_path / "part", tower=tower)
    prompt = PROMPTS["llava"][0]
    wanted = expected(model, prompt, llava.encoder)
    assert require_close(served(other, prompt), wanted)
    save_llava(tmp_path / "made", other.model, other.encoder, image_token_id=IMAGE)
    made = type(model).from_pretrained(tmp_path / "made").eval()
    assert made.config.vision_config.num_hidden_layers == 2 and made.config.vision_feature_layer == -1
    torch.testing.assert_close(expected(made, prompt, llava.encoder), wanted, atol=1e-5, rtol=0)


# The encoder of tiles


def test_tiles_of_several_images_are_encoded_together(checkpoint):
    """Images of one number of tokens, on canvases of other shapes."""
    folder = checkpoint("llava_next")[1]
    encoder = load_llava(folder).encoder
    images = [picture(56, 56), picture(112, 112, 1), picture(57, 57, 2)]
    together = encoder.encode(images)
    assert together.shape == (3, encoder.n_tokens(images[0]), 32) and not together.requires_grad
    assert torch.equal(together, torch.cat([encoder.encode([image]) for image in images]))
    batched = load_llava(folder, batch_images=4).encoder
    torch.testing.assert_close(batched.encode(images), together, atol=1e-5, rtol=0)
    assert encoder.encode([]).shape == (0, 4, 32)


@pytest.mark.parametrize("name", ["identity", "witness"])
def test_newline_and_canvases_are_in_the_identity(checkpoint, name):
    llava = load_llava(checkpoint("llava_next")[1])
    encoder, image = llava.encoder, picture()
    canvases = encoder.tiles.pinpoints

    def of(newline=encoder.newline, canvases=canvases):
        return getattr(AnyresEncoder(encoder.tower, encoder.projector, newline, canvases), name)(image)

    moved = torch.nn.Parameter(encoder.newline.detach() + 1)
    plain = getattr(ImageEncoder(encoder.tower, encoder.projector), name)(image)
    names = {of(), of(moved), of(canvases=canvases[:1]), plain}
    assert len(names) == 4 and of() == getattr(encoder, name)(image)


def test_a_newline_of_another_width(checkpoint):
    encoder = load_llava(checkpoint("llava_next")[1]).encoder
    with pytest.raises(ValueError, match=r"newline must be \[32\] as the projector's embeddings, got \[31\]"):
        AnyresEncoder(encoder.tower, encoder.projector, torch.nn.Parameter(torch.ones(31)), PINPOINTS)


# Pixels


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llava", {}),
        ("llava", {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}),
        ("llava", {"size": {"height": SIDE, "width": SIDE}}),
        ("llava_next", {}),
        ("llava_next", {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_pixels_are_hugging_faces(checkpoint, kind, config, nested, tmp_path):
    llava = load_llava(with_processor(checkpoint(kind)[1], tmp_path, config, nested))
    for height, width in ((40, 40), (28, 28), (33, 90), (120, 41), (9, 12)):
        image = picture(height, width)
        (wanted,) = pixels(kind, [image], **config)["pixel_values"]
        read = [llava.encoder.read(image)]
        tiles = llava.encoder.tiles.cut(read[0]) if kind == "llava_next" else read
        made = llava.encoder.tower.preprocess(tiles)
        torch.testing.assert_close(made, wanted.reshape(made.shape), atol=1e-5, rtol=0)


def with_processor(folder, to, config, nested=False):
    """A copy of a checkpoint with an image processor's settings."""
    for file in folder.iterdir():
        (to / file.name).symlink_to(file)
    content = {"image_processor": config} if nested else config
    (to / ("processor_config.json" if nested else "preprocessor_config.json")).write_text(json.dumps(content))
    return to


def test_padding_is_read_and_written(checkpoint, tmp_path):
    llava = load_llava(with_processor(checkpoint("llava")[1], tmp_path, {"do_pad": True}))
    assert llava.encoder.policy == ImagePolicy(resize="pad", background=(122, 116, 104))
    save_llava(tmp_path / "made", llava.model, llava.encoder, image_token_id=IMAGE)
    again = load_llava(tmp_path / "made")
    assert again.encoder.identity(picture(30, 50)) == llava.encoder.identity(picture(30, 50))
    mine = load_llava(tmp_path / "made", policy=ImagePolicy(resize="squash"))
    assert mine.encoder.policy.resize == "squash"
    assert mine.encoder.identity(picture(30, 50)) != llava.encoder.identity(picture(30, 50))


def test_a_checkpoint_without_an_image_processor_is_cropped_as_clip_does(checkpoint):
    encoder = load_llava(checkpoint("llava")[1]).encoder
    assert encoder.tower.policy is None and '"resize_mode": "shortest"' in encoder.tower.preprocessing


@pytest.mark.parity
@pytest.mark.parametrize("kind", PROMPTS)
def test_a_saved_folder_is_whole(checkpoint, kind, tmp_path):
    """Hugging Face's processor of it writes the token ids that octavo has."""
    from transformers import AutoProcessor

    llava, made = load_llava(checkpoint(kind)[1]), word_tokenizer()
    made.chat_template = "{{ messages[0].content[0].text }}"
    save_llava(tmp_path, llava.model, llava.encoder, tokenizer=made)
    again = load_llava(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["image_token_index"] == IMAGE
    assert again.tokenizer.chat_template == made.chat_template
    images, text = [picture(40, 90), picture(100, 99)], "w0 <image> w1 <image> w2"
    prompt = image_prompt(again.tokenizer, text, images)
    ids = []
    for part in prompt:
        ids += part.token_ids if isinstance(part, TokenSegment) else [IMAGE] * again.encoder.n_tokens(part)
    inputs = AutoProcessor.from_pretrained(tmp_path)(images=images, text=text, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == ids


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: id_ for id_, word in enumerate(["<s>", "</s>", "<unk>", *(f"w{id_}" for id_ in range(IMAGE - 3))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return made


def test_templates_of_older_folders(checkpoint, tmp_path):
    folder = with_processor(checkpoint("llava")[1], tmp_path, {})
    word_tokenizer().save_pretrained(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'w1' }}"}))
    assert load_llava(folder).tokenizer.chat_template == "{{ 'w1' }}"


# What cannot be loaded


def broken(folder, to, change, config=None):
    """A copy of a checkpoint whose tensors were changed, and fields of its config replaced."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text()) | (config or {})
    (to / "config.json").write_text(json.dumps(content))
    return to


NORM = "language_model.model.norm.weight"
Q = "encoder.layers.1.self_attn.q_proj.weight"


def q_name(weights):
    """Whether the tower's names have one level more depends on the release."""
    return next(name for name in weights if name.endswith(Q))


@pytest.mark.parity
@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (lambda w: w.pop(q_name(w)), [r"1 missing \(model\.vision_tower\..*layers\.1\.self_attn\.q_proj\.weight\)"]),
        (lambda w: w.pop("multi_modal_projector.linear_2.bias"), [r"missing \(.*linear_2\.bias\)"]),
        (lambda w: w.update(odd=torch.ones(1)), [r"1 unexpected \(odd\)"]),
        (lambda w: w.update({NORM: torch.ones(33)}), [r"norm\.weight is 33 and must be 32"]),
        (
            lambda w: w.update({q_name(w): torch.ones(32, 2), NORM: torch.ones(1, 1)}),
            ["32 x 2 and must be 32 x 32", "1 x 1 and"],
        ),
        (
            lambda w: (w.pop(NORM), w.update(odd=torch.ones(1))),
            [r"1 missing \(model\.language_model\.norm\.weight\); 1 unexpected"],
        ),
    ],
)
def test_every_tensor_is_accounted_for(checkpoint, change, messages, tmp_path):
    folder = broken(checkpoint("llava")[1], tmp_path, change)
    for message in messages:
        with pytest.raises(ValueError, match=message):
            load_llava(folder)


@pytest.mark.parity
def test_positions_that_older_releases_saved_are_no_surprise(checkpoint, tmp_path):
    ids = {"vision_tower.embeddings.position_ids": torch.arange(5)[None]}
    load_llava(broken(checkpoint("llava")[1], tmp_path, lambda weights: weights.update(ids)))


@pytest.mark.parity
def test_names_of_older_releases(checkpoint, tmp_path):
    """Names on the hub: the tower one level deeper."""
    model, folder = checkpoint("llava_next")

    def older(weights):
        for name in [name for name in weights if name.startswith("vision_tower.")]:
            inner = name.removeprefix("vision_tower.").removeprefix("vision_model.")
            weights[f"vision_tower.vision_model.{inner}"] = weights.pop(name)

    llava, prompt = load_llava(broken(folder, tmp_path, older)), PROMPTS["llava_next"][0]
    assert require_close(served(llava, prompt), expected(model, prompt, llava.encoder))


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("llava", {"projector_hidden_act": "relu"}, "projector_hidden_act='relu'"),
        ("llava", {"vision_feature_layer": [-2, -1]}, r"vision_feature_layer=\[-2, -1\]; a tower is read at one layer"),
        (
            "llava",
            {"vision_feature_layer": 0},
            "vision_feature_layer=0; its tower has 3 blocks, so -3 to -1 and 1 to 3",
        ),
        ("llava", {"vision_feature_layer": -4}, "vision_feature_layer=-4"),
        ("llava_next", {"image_grid_pinpoints": [[28, 57]]}, r"\(28, 57\), which is not made of whole tiles of 28"),
        ("llava_next", {"model_type": "llava_onevision"}, "'llava_onevision'; only 'llava' and 'llava_next'"),
    ],
)
def test_configs_that_octavo_has_no_parts_for(checkpoint, kind, config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_llava(broken(checkpoint(kind)[1], tmp_path, lambda weights: None, config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu'; known: 'gelu', 'quick_gelu'"),
        ({"model_type": "siglip_vision_model"}, "'siglip_vision_model'; only 'clip_vision_model'"),
    ],
)
def test_towers_that_open_clip_has_not(checkpoint, changes, message, tmp_path):
    folder = checkpoint("llava")[1]
    vision = json.loads((folder / "config.json").read_text())["vision_config"] | changes
    with pytest.raises(ValueError, match=message):
        load_llava(broken(folder, tmp_path, lambda weights: None, {"vision_config": vision}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"size": {"shortest_edge": 30}}, r"images of \[28, 30\], the tower takes 28"),
        ({"crop_size": 14}, r"images of \[14, 28\], the tower takes 28"),
        ({"resample": 2}, "resample=2; only 3"),
        ({"do_normalize": False}, "do_normalize=False; only True"),
    ],
)
def test_image_processors_that_octavo_has_not(checkpoint, config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_llava(with_processor(checkpoint("llava")[1], tmp_path, config))


@pytest.mark.parametrize("content", [None, "nothing", "half"])
def test_folders_that_are_none(checkpoint, content, tmp_path):
    folder = checkpoint("llava")[1]
    if content is not None:
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    if content == "half":
        (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:2000])
    message = "no folder with a config.json" if content is None else "transformers cannot load"
    with pytest.raises(ValueError, match=message):
        load_llava(tmp_path)
    with pytest.raises(ValueError, match="'llava-hf/llava' is no folder"):
        load_llava("llava-hf/llava")


# What cannot be saved


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda e: ImageEncoder(e.tower, MlpConfig(inner=8).build(32, 32, (2, 2))),
            "an inner width of 32; got MlpConfig",
        ),
        (lambda e: ImageEncoder(e.tower, LinearConfig().build(32, 32, (2, 2))), "got LinearConfig"),
        (lambda e: ImageEncoder(e.tower, e.projector, bidirectional=True), "this encoder is bidirectional"),
        (
            lambda e: ImageEncoder(e.tower, MlpConfig().build(32, 16, (2, 2))),
            "embeddings are 16 wide, the language model's 32",
        ),
        (lambda e: ImageEncoder(scaled_tower(), e.projector), r"unexpected \(transformer\.resblocks\.0\.ls_1\.gamma"),
        (lambda e: ImageEncoder(OpenClipEncoder(e.tower.tower, policy=RED), e.projector), r"pad with the mean colour"),
    ],
)
def test_parts_that_llava_has_not(checkpoint, change, message, tmp_path):
    llava = load_llava(checkpoint("llava")[1])
    with pytest.raises(ValueError, match=message):
        save_llava(tmp_path / "made", llava.model, change(llava.encoder), image_token_id=IMAGE)
    with pytest.raises(ValueError, match="give image_token_id or a tokenizer"):
        save_llava(tmp_path / "made", llava.model, llava.encoder)
    assert not (tmp_path / "made").exists()


RED = ImagePolicy(background=(255, 0, 0))


def scaled_tower():
    """With a scale for each layer, as CoCa has and Hugging Face's CLIP has not."""
    shape = {"image_size": SIDE, "patch_size": PATCH, "layers": 2, "width": 32, "head_width": 16, "ls_init_value": 0.1}
    return OpenClipEncoder.from_config({"embed_dim": 32, "vision_cfg": shape})
