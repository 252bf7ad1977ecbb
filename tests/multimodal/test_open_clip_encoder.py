"""The open_clip tower: which tokens, which activation, which pixels, and what is refused. Tiny random towers."""

import json
import socket

import numpy as np
import pytest
import torch
from PIL import Image

from octavo.multimodal.image_policy import ImagePolicy
from octavo.multimodal.images import RgbImage
from octavo.multimodal.open_clip_encoder import OpenClipEncoder

try:
    import open_clip
except (ImportError, RuntimeError) as error:
    pytest.skip(f"open_clip cannot be imported: {error}", allow_module_level=True)

CONFIG = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 3, "width": 64, "head_width": 64, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 64, "heads": 1, "layers": 1},
}
GRAY = np.full((32, 32, 3), 128, np.uint8)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"the network was asked for {args}")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def known(monkeypatch):
    """Registers a config under a name, and published tags of it (tag -> whether it needs QuickGELU)."""

    def register(name, tags=(), **changes):
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, name, CONFIG | changes)
        published = {tag: {"url": "https://example.invalid", "quick_gelu": quick} for tag, quick in dict(tags).items()}
        monkeypatch.setitem(open_clip.pretrained._PRETRAINED, name, published)
        return name

    return register


def clip(seed=0, **changes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return open_clip.CLIP(**CONFIG | changes).eval()


def picture(height=32, width=32, seed=0):
    return RgbImage(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def pixels(images=2):
    return torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def tokens(encoder, images=2):
    with torch.no_grad():
        return encoder(pixels(images))


def activation(encoder):
    return type(encoder.tower.transformer.resblocks[0].mlp.gelu).__name__


# Which tokens


@pytest.mark.parametrize("layer", [-3, -2, -1, 0, 1, 2])
@pytest.mark.parametrize("keep_cls", [False, True])
@pytest.mark.parametrize("quick_gelu", [False, True])
def test_tokens_are_hugging_faces_hidden_states(layer, keep_cls, quick_gelu):
    """``hidden_states[0]`` of Hugging Face is what goes into the first block, so block i gives ``[i + 1]``."""
    tower = clip(quick_gelu=quick_gelu).visual
    encoder = OpenClipEncoder(tower, layer=layer, keep_cls=keep_cls)
    hidden = hf_tower(tower, quick_gelu)(pixels(), output_hidden_states=True).hidden_states
    wanted = hidden[layer if layer < 0 else layer + 1][:, 0 if keep_cls else 1 :]
    assert wanted.shape == (2, encoder.n_tokens, encoder.width)
    torch.testing.assert_close(tokens(encoder), wanted, atol=1e-5, rtol=1e-5)


def hf_tower(tower, quick_gelu):
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=1, image_size=32, patch_size=8,
        hidden_act="quick_gelu" if quick_gelu else "gelu", layer_norm_eps=1e-5,
    )  # fmt: skip
    model = CLIPVisionModel(config).eval()
    renamed = {}
    for name, value in tower.state_dict().items():
        for ours, theirs in (
            ("transformer.resblocks.", "encoder.layers."), ("attn.out_proj", "self_attn.out_proj"),
            ("ln_1", "layer_norm1"), ("ln_2", "layer_norm2"), ("mlp.c_fc", "mlp.fc1"), ("mlp.c_proj", "mlp.fc2"),
            ("ln_pre", "pre_layrnorm"), ("ln_post", "post_layernorm"), ("conv1", "embeddings.patch_embedding"),
            ("class_embedding", "embeddings.class_embedding"),
            ("positional_embedding", "embeddings.position_embedding.weight"),
        ):  # fmt: skip
            name = name.replace(ours, theirs)
        if "attn.in_proj_" in name:
            for part, third in zip("qkv", value.chunk(3), strict=True):
                renamed[name.replace("attn.in_proj_", f"self_attn.{part}_proj.")] = third
        elif name != "proj":
            renamed[name] = value
    prefix = "vision_model." if any(key.startswith("vision_model.") for key in model.state_dict()) else ""
    missing, unexpected = model.load_state_dict({prefix + key: value for key, value in renamed.items()}, strict=False)
    assert not unexpected and all("position_ids" in key for key in missing)
    return model


@pytest.mark.parametrize("layer", [-4, 3])
def test_a_layer_that_does_not_exist(layer):
    with pytest.raises(ValueError, match=f"layer={layer}, but the tower has 3 blocks: from -3 to 2"):
        OpenClipEncoder.from_config(CONFIG, layer=layer)


def test_sizes_and_gradients():
    encoder = OpenClipEncoder.from_config(CONFIG, keep_cls=True)
    assert (encoder.grid, encoder.n_tokens, encoder.width) == ((4, 4), 17, 64)
    encoder(pixels()).sum().backward()
    assert encoder.tower.conv1.weight.grad.abs().sum() > 0


def test_random_weights_come_from_their_seed_alone():
    before = torch.get_rng_state()
    one, same, other = (OpenClipEncoder.from_config(CONFIG, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(tokens(one), tokens(same)) and not torch.equal(tokens(one), tokens(other))


def test_dtype_and_device():
    encoder = OpenClipEncoder.from_config(CONFIG, dtype=torch.bfloat16, device="cpu")
    assert tokens(encoder).dtype == torch.bfloat16
    torch.testing.assert_close(tokens(encoder).float(), tokens(OpenClipEncoder.from_config(CONFIG)), atol=0.1, rtol=0.1)


# Weights on this machine, and QuickGELU


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_state_dict_of_a_named_model(known, tmp_path, suffix):
    file = tmp_path / f"weights.{suffix}"
    save(clip(seed=3), file)
    encoder = OpenClipEncoder(known("tiny"), file)
    assert torch.equal(tokens(encoder), tokens(OpenClipEncoder(clip(seed=3).visual)))
    assert len(encoder.tower.transformer.resblocks) == 2, "the last block is not read, and not kept"


def save(model, file):
    if file.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(model.state_dict(), file)
    else:
        torch.save(model.state_dict(), file)


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_a_folder(tmp_path, quick_gelu):
    model = clip(quick_gelu=quick_gelu)
    means = {"mean": [0.1, 0.2, 0.3], "std": [1.0, 2.0, 3.0], "resize_mode": "squash"}
    config = {"model_cfg": CONFIG | {"quick_gelu": quick_gelu}, "preprocess_cfg": means}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    save(model, tmp_path / "open_clip_model.safetensors")
    encoder = OpenClipEncoder(f"local-dir:{tmp_path}")
    assert torch.equal(tokens(encoder), tokens(OpenClipEncoder(model.visual)))
    assert means.items() <= json.loads(encoder.preprocessing)["open_clip"].items()
    with pytest.raises(ValueError, match=f"quick_gelu={not quick_gelu}, but .*open_clip_config.json says otherwise"):
        OpenClipEncoder(f"local-dir:{tmp_path}", quick_gelu=not quick_gelu)
    with pytest.raises(ValueError, match="brings its own weights"):
        OpenClipEncoder(f"local-dir:{tmp_path}", tmp_path / "open_clip_model.safetensors")
    (tmp_path / "open_clip_model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot load"):
        OpenClipEncoder(f"local-dir:{tmp_path}")


@pytest.mark.parametrize(
    ("tags", "named", "asked", "found"),
    [
        ({}, False, None, "GELU"),
        ({}, False, True, "QuickGELU"),
        ({"laion": False}, False, None, "GELU"),
        ({"openai": True}, False, None, None),
        ({"openai": True, "laion": False}, False, None, None),
        ({"openai": True, "laion": False}, False, False, "GELU"),
        ({"openai": True, "laion": False}, False, True, "QuickGELU"),
        ({"openai": True}, True, None, "QuickGELU"),
        ({"openai": True}, True, True, "QuickGELU"),
    ],
)
def test_the_activation_is_certain_or_asked_for(known, tmp_path, tags, named, asked, found):
    name = known("tiny", tags, quick_gelu=named)
    torch.save(clip().state_dict(), tmp_path / "weights.pt")
    if found is None:
        with pytest.raises(ValueError, match=r"QuickGELU \(openai were\).*pass quick_gelu=True or quick_gelu=False"):
            OpenClipEncoder(name, tmp_path / "weights.pt", quick_gelu=asked)
    else:
        assert activation(OpenClipEncoder(name, tmp_path / "weights.pt", quick_gelu=asked)) == found


def test_a_name_with_quick_gelu_means_it(known, tmp_path):
    torch.save(clip().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="'tiny' is a model with QuickGELU"):
        OpenClipEncoder(known("tiny", quick_gelu=True), tmp_path / "weights.pt", quick_gelu=False)


class Archive(torch.nn.Module):
    """The weights that OpenAI's archives hold: all of a CLIP but its text mask."""

    def __init__(self, model):
        super().__init__()
        for name, part in (*model.named_children(), *model.named_parameters(recurse=False)):
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_openais_archive_switches_to_quick_gelu(known, tmp_path):
    """The name is one without QuickGELU, and the file knows better."""
    model, file = clip(quick_gelu=True), tmp_path / "openai.pt"
    torch.jit.script(Archive(model)).save(file)
    name = known("tiny", {"openai": True})
    encoder = OpenClipEncoder(name, file)
    assert activation(encoder) == "QuickGELU"
    torch.testing.assert_close(
        tokens(encoder), tokens(OpenClipEncoder(model.visual)), atol=0.05, rtol=0.05
    )  # fp16 file
    with pytest.raises(ValueError, match=r"quick_gelu=False, but .*openai\.pt is OpenAI's archive"):
        OpenClipEncoder(name, file, quick_gelu=False)
    other = known("other", vision_cfg=CONFIG["vision_cfg"] | {"layers": 2})
    with pytest.raises(ValueError, match=r"'other' has .*'layers': 2.*has .*'layers': 3"):
        OpenClipEncoder(other, file)


def test_any_other_torchscript_is_refused(known, tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "linear.pt")
    with pytest.raises(ValueError, match="TorchScript, but not a CLIP of OpenAI"):
        OpenClipEncoder(known("tiny"), tmp_path / "linear.pt")


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        ("tiny", None, "needs weights=, a file on this machine: octavo downloads none"),
        ("tiny", "openai", "weights='openai' is a tag, which would be downloaded"),
        ("tiny", "no/such/file.pt", "'no/such/file.pt' is no file"),
        ("tinny", None, "no model 'tinny'; did you mean 'tiny'"),
        ("hf-hub:someone/something", None, "would be downloaded; give local-dir:PATH"),
        ("local-dir:no/such/folder", None, "there is no file no/such/folder/open_clip_config.json"),
        ("ViT-B-16-SigLIP", None, "is timm's vit_base_patch16_siglip_224; only open_clip's own ViTs"),
        ("RN50", None, "is a ResNet; only open_clip's own ViTs"),
        ("xlm-roberta-base-ViT-B-32", None, "is xlm-roberta-base, whose config open_clip would download"),
        (torch.nn.Linear(2, 2), None, "must be open_clip's VisionTransformer .*, got Linear"),
        (torch.nn.Linear(2, 2), "weights.pt", "a tower that is in memory has its weights"),
    ],
)
def test_nothing_is_downloaded_and_nothing_is_guessed(known, model, weights, message):
    known("tiny", {"openai": True})
    with pytest.raises(ValueError, match=message):
        OpenClipEncoder(model, weights)


@pytest.mark.parametrize("contents", ["not JSON", "{}", '{"model_cfg": {"embed_dim": 32}}'])
def test_a_folder_whose_config_is_none(tmp_path, contents):
    (tmp_path / "open_clip_config.json").write_text(contents)
    with pytest.raises(ValueError, match=r"Expecting value|is no config of a CLIP: it needs embed_dim"):
        OpenClipEncoder(f"local-dir:{tmp_path}")


BROKEN_ZIP = b"PK\x05\x06" + bytes(4) + b"\x01\x00\x01\x00" + b"\xff\xff\x00\x00" * 2 + bytes(2)


@pytest.mark.parametrize("contents", [b"", b"PK\x03\x04 truncated", BROKEN_ZIP, b"not weights at all"])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_damaged_weights(known, tmp_path, contents, suffix):
    (tmp_path / f"weights.{suffix}").write_bytes(contents)
    with pytest.raises(ValueError, match="open_clip cannot load 'tiny'"):
        OpenClipEncoder(known("tiny"), tmp_path / f"weights.{suffix}")


def test_a_file_that_is_called_like_a_tag_is_the_file(known, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(clip(seed=3).state_dict(), "laion")
    encoder = OpenClipEncoder(known("tiny", {"laion": False}), "laion")
    assert torch.equal(tokens(encoder), tokens(OpenClipEncoder(clip(seed=3).visual)))


def test_weights_of_another_shape_and_pickled_code(known, tmp_path, capsys):
    class Code:
        def __reduce__(self):
            return print, ("this must not run",)

    torch.save(clip(embed_dim=16).state_dict(), tmp_path / "small.pt")
    torch.save({"state_dict": Code()}, tmp_path / "code.pt")
    for name in ("small.pt", "code.pt"):
        with pytest.raises(ValueError, match="open_clip cannot load 'tiny'"):
            OpenClipEncoder(known("tiny"), tmp_path / name)
    assert "this must not run" not in capsys.readouterr().out


# Pixels


@pytest.mark.parametrize(("height", "width"), [(32, 32), (8, 90), (100, 40), (1, 1)])
@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
def test_pixels_are_open_clips_own(height, width, mode):
    tower = clip().visual
    own = {
        "size": 32,
        "mean": (0.5, 0.4, 0.3),
        "std": (0.2, 0.3, 0.4),
        "resize_mode": mode,
        "interpolation": "bilinear",
    }
    open_clip.set_model_preprocess_cfg(tower, own)
    transform = open_clip.image_transform(32, False, **{key: own[key] for key in own if key != "size"})
    image = picture(height, width)
    (made,) = OpenClipEncoder(tower).preprocess([image])
    assert made.shape == (3, 32, 32) and torch.equal(made, transform(Image.fromarray(image.pixels)))


def test_a_bare_tower_has_clips_mean_and_deviation():
    (made,) = OpenClipEncoder(clip().visual).preprocess([RgbImage(GRAY)])
    mean, std = (torch.tensor(of).view(3, 1, 1) for of in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD))
    torch.testing.assert_close(made, ((128 / 255 - mean) / std).expand(3, 32, 32))


def test_a_policy_pads_what_the_tower_would_crop():
    """The left end of a wide image is red: open_clip's own way loses it, "pad" keeps it, between blue borders."""
    wide = np.full((16, 64, 3), 128, np.uint8)
    wide[:, :16] = (255, 0, 0)
    tower = clip().visual
    policy = ImagePolicy(background=(0, 0, 255), resize="pad")
    (cropped,), (padded,) = (
        OpenClipEncoder(tower, policy=given).preprocess([RgbImage(wide)]) for given in (None, policy)
    )
    red, _, blue = 0, 1, 2
    assert cropped[red].max() < padded[red].max()
    assert (padded[blue, :11] == padded[blue].max()).all() and (padded[blue, 13:19] < padded[blue].max()).all()


def test_what_shapes_the_pixels_is_named():
    def described(policy=None, **changes):
        tower = clip().visual
        open_clip.set_model_preprocess_cfg(tower, {"mean": (0.5,) * 3, "std": (0.5,) * 3, **changes})
        return OpenClipEncoder(tower, policy=policy).preprocessing

    names = [described(), described(mean=(0.4,) * 3), described(std=(0.4,) * 3), described(resize_mode="longest"),
             described(interpolation="bilinear"), described(fill_color=3), described(ImagePolicy()),
             described(ImagePolicy(resize="crop")), described(ImagePolicy(background=(1, 2, 3)))]  # fmt: skip
    assert len(set(names)) == len(names)
    assert described() == names[0] and described(ImagePolicy(max_side=99)) == described(ImagePolicy())


def test_ways_of_resizing_that_do_not_work():
    tower = clip(vision_cfg=CONFIG["vision_cfg"] | {"image_size": (32, 16)}).visual
    assert OpenClipEncoder(tower).preprocess([picture()]).shape == (1, 3, 32, 16)
    with pytest.raises(ValueError, match="makes images square, and the tower takes 32 x 16"):
        OpenClipEncoder(tower, policy=ImagePolicy())
    open_clip.set_model_preprocess_cfg(tower, {"mean": (0.5,) * 3, "std": (0.5,) * 3, "resize_mode": "stretch"})
    with pytest.raises(ValueError, match="resize_mode='stretch'"):
        OpenClipEncoder(tower)


@pytest.mark.parametrize("mode", ["shortest", "longest"])
@pytest.mark.parametrize(("height", "width"), [(2, 300), (300, 2), (5, 300)])
def test_an_image_that_would_vanish(mode, height, width):
    tower = clip().visual
    open_clip.set_model_preprocess_cfg(tower, {"mean": (0.5,) * 3, "std": (0.5,) * 3, "resize_mode": mode})
    image = picture(height, width)
    if mode == "longest" and min(height, width) == 2:
        with pytest.raises(ValueError, match=f"{width} x {height} pixels is too narrow to be fitted into 32 x 32"):
            OpenClipEncoder(tower).check(image)
        image_policy = OpenClipEncoder(tower, policy=ImagePolicy())
        image_policy.check(image)
        assert image_policy.preprocess([image]).isfinite().all()
    else:
        OpenClipEncoder(tower).check(image)
        assert OpenClipEncoder(tower).preprocess([image]).isfinite().all()


# What tokens are worth


@pytest.mark.parametrize("layer", [0, -2, -1])
@pytest.mark.parametrize("keep_cls", [False, True])
def test_scores_are_the_attention_of_the_class_token(layer, keep_cls):
    """As torch's own attention gives it, in the block whose tokens are read, which stay what they are."""
    vision = CONFIG["vision_cfg"] | {"head_width": 16}
    encoder = OpenClipEncoder(clip(vision_cfg=vision).visual, layer=layer, keep_cls=keep_cls)
    block, seen = encoder.tower.transformer.resblocks[encoder.layer], []
    hook = block.ln_1.register_forward_hook(lambda module, given, normed: seen.append(normed))
    with torch.no_grad():
        found, scores = encoder.scored(pixels())
        hook.remove()
        _, weights = block.attn(seen[0], seen[0], seen[0], need_weights=True, average_attn_weights=True)
    assert encoder.scores_tokens and torch.equal(found, tokens(encoder))
    torch.testing.assert_close(scores, weights[:, 0, 0 if keep_cls else 1 :], atol=1e-6, rtol=1e-5)
    assert not block.ln_1._forward_hooks


def test_blocks_of_another_attention_give_none():
    encoder = OpenClipEncoder(clip(vision_cfg=CONFIG["vision_cfg"] | {"qk_norm": True}).visual)
    assert not encoder.scores_tokens
