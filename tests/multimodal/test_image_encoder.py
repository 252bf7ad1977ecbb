"""Tower and projector as a ``SegmentEncoder``. The tower is a stand-in of a few lines, so that no open_clip is needed;
the last test takes the real one."""

import io
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from octavo.multimodal.encode_worker import EncodeWorker
from octavo.multimodal.errors import ImageError
from octavo.multimodal.image_encoder import ImageEncoder
from octavo.multimodal.image_policy import ImagePolicy
from octavo.multimodal.images import RgbImage
from octavo.multimodal.projector import LinearConfig, MlpConfig, PixelShuffleConfig


class Tower(nn.Module):
    """Patches of 4 x 4 pixels, times one matrix; what it is asked to do is noted."""

    grid, width = (2, 4), 5

    def __init__(self, keep_cls=False, policy=None, preprocessing="none", settings="plain"):
        super().__init__()
        self.embed = nn.Linear(48, 5)
        self.keep_cls, self.policy, self.preprocessing, self.settings = keep_cls, policy, preprocessing, settings
        self.n_tokens = 8 + keep_cls
        self.batches = []

    def check(self, image):
        if image.pixels.shape[0] == 7:
            raise ValueError("seven rows vanish")

    def preprocess(self, images):
        self.batches.append(len(images))
        return torch.stack([torch.from_numpy(image.pixels[:8, :16].copy()).permute(2, 0, 1) for image in images]) / 255

    def forward(self, pixels):
        patches = nn.functional.unfold(pixels, 4, stride=4).transpose(1, 2)
        tokens = self.embed(patches.to(self.embed.weight))
        return torch.cat([tokens[:, :1], tokens], 1) if self.keep_cls else tokens


def encoder(config=None, seed=0, **options):
    own = {key: options.pop(key) for key in ("keep_cls", "policy", "preprocessing", "settings") if key in options}
    torch.manual_seed(seed)
    tower = Tower(**own)
    return ImageEncoder(tower, (config or MlpConfig()).build(5, 6, (2, 4)), **options)


def picture(seed=0, height=8, width=16):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


class ScoringTower(Tower):
    """Says of its tokens what their numbers are, in a batch of any size."""

    scores_tokens = True

    def scored(self, pixels):
        tokens = self(pixels)
        return tokens, torch.arange(tokens.shape[1]).expand(len(tokens), -1).float()


@pytest.mark.parametrize(
    ("config", "scores"), [(MlpConfig(), [*range(8)]), (PixelShuffleConfig(), [2.5, 4.5])], ids=["mlp", "pixel shuffle"]
)
def test_a_tower_s_scores_travel_with_the_embeddings(config, scores):
    torch.manual_seed(0)
    made = ImageEncoder(ScoringTower(), config.build(5, 6, (2, 4)), batch_images=2)
    items = [picture(seed) for seed in range(3)]
    found = made.encode_scored(items)
    assert made.scores_tokens and torch.equal(found.embeddings, made.encode(items))
    assert found.scores.tolist() == [scores] * 3
    assert made.encode_scored([]).scores.shape == (0, len(scores))
    with EncodeWorker(made, max_images=1) as worker:
        scored, plain = worker.submit(items, scored=True), worker.submit(items)
        assert [future.result().scores.tolist() for future in scored] == [scores] * 3
        for one, other in zip(scored, plain, strict=True):
            assert torch.equal(one.result().embeddings, other.result())
    assert not encoder().scores_tokens


@pytest.mark.parametrize(
    ("config", "keep_cls", "tokens"),
    [(LinearConfig(), False, 8), (MlpConfig(), True, 9), (PixelShuffleConfig(), False, 2)],
)
@pytest.mark.parametrize("images", [0, 1, 3])
def test_shapes_are_known_before_encoding(config, keep_cls, tokens, images):
    made = encoder(config, keep_cls=keep_cls)
    assert made.n_tokens(picture()) == tokens and not made.tower.batches
    embeddings = made.encode([picture(seed) for seed in range(images)])
    assert embeddings.shape == (images, tokens, 6) and not embeddings.requires_grad
    assert made.hidden == 6 and not made.bidirectional and encoder(bidirectional=True).bidirectional


def test_a_cpu_encodes_one_by_one_and_so_exactly():
    items = [picture(seed) for seed in range(5)]
    made = encoder()
    together = made.encode(items)
    assert made.tower.batches == [1] * 5
    assert torch.equal(together, torch.cat([made.encode([item]) for item in items]))


def test_batches_on_request():
    items = [picture(seed) for seed in range(5)]
    made = encoder(batch_images=2)
    torch.testing.assert_close(made.encode(items), encoder().encode(items), atol=1e-6, rtol=1e-5)
    assert made.tower.batches == [2, 2, 1]


def test_dropout_and_the_like_are_off():
    made = encoder()
    assert not made.tower.training and not made.projector.training


def test_embeddings_have_the_projectors_dtype():
    made = encoder()
    made.projector.to(torch.bfloat16)
    assert made.encode([picture()]).dtype == torch.bfloat16
    assert made.encode([]).dtype == torch.bfloat16


# Identity


def test_the_same_image_is_the_same_whatever_it_came_as():
    made, image = encoder(), picture()
    png = io.BytesIO()
    image.save(png, "PNG")
    forms = [image, image.copy(), np.asarray(image), png.getvalue(), made.read(image)]
    assert len({made.identity(form) for form in forms}) == 1 and len(made.identity(image)) == 32
    assert len({made.witness(form) for form in forms}) == 1 and made.witness(image) != made.identity(image)
    assert torch.equal(*(made.encode([form]) for form in forms[-2:]))


@pytest.mark.parametrize("name", ["identity", "witness"])
def test_whatever_shapes_the_embeddings_is_in_the_identity(name):
    def of(image=None, dtype=torch.float32, **options):
        made = encoder(**options)
        made.projector.to(dtype)
        return getattr(made, name)(image or picture())

    names = [
        of(),
        of(picture(seed=1)),
        of(picture(height=16, width=8)),
        of(preprocessing="crop"),
        of(settings="cls"),
        of(seed=1),
        of(dtype=torch.bfloat16),
        of(config=LinearConfig()),
        of(config=PixelShuffleConfig()),
    ]
    assert len(set(names)) == len(names)
    assert of() == names[0]


def test_a_projectors_config_is_in_the_identity():
    """Two that differ in nothing else: what a config says need not show in modules and weights."""

    @dataclass(frozen=True)
    class Scaled(LinearConfig):
        scale: float = 1.0

    def of(config):
        torch.manual_seed(0)
        return ImageEncoder(Tower(), config.build(5, 6, (2, 4))).identity(picture())

    assert of(Scaled()) == of(Scaled(scale=1.0)) != of(Scaled(scale=2.0))


@pytest.mark.parametrize("part", ["tower", "projector"])
def test_trained_weights_have_another_identity(part):
    made = encoder()
    before = made.identity(picture())
    with torch.no_grad():
        next(getattr(made, part).parameters()).add_(1)
    assert made.identity(picture()) != before


# What is refused


@pytest.mark.parametrize("call", ["identity", "witness", "read"])
def test_bad_images_are_refused_before_anything_is_encoded(call):
    made = encoder(policy=ImagePolicy(max_side=64))
    for item, error in (
        (b"not an image", ImageError),
        (picture(width=65), ImageError),
        (picture(height=7), ValueError),
    ):
        with pytest.raises(error):
            getattr(made, call)(item)
    assert not made.tower.batches


def test_one_bad_image_stops_its_whole_call():
    made = encoder()
    with pytest.raises(ImageError):
        made.encode([picture(), b"not an image"])
    assert not made.tower.batches


@pytest.mark.parametrize("max_images", [1, 2, 4])
def test_in_a_worker_a_bad_image_fails_alone_and_the_rest_are_exact(max_images):
    made = encoder()
    items = [picture(0), b"not an image", picture(1), picture(2)]
    with EncodeWorker(made, max_images=max_images) as worker:
        good, bad, *others = worker.submit(items)
    assert isinstance(bad.exception(), ImageError)
    for future, item in zip((good, *others), (items[0], *items[2:]), strict=True):
        assert torch.equal(future.result(), made.encode([item])[0]) and not future.result().requires_grad


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: encoder(batch_images=0), "batch_images must be at least 1, got 0"),
        (lambda: encoder(PixelShuffleConfig(), keep_cls=True), "got 9 tokens; drop CLS"),
        (lambda: ImageEncoder(Tower(), LinearConfig().build(4, 6, (2, 4))), "width 4, the tower gives 5"),
    ],
)
def test_parts_that_do_not_fit(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_with_open_clips_tower():
    """Identities tell QuickGELU from GELU, layers and class tokens apart, though the weights are the same."""
    try:
        from octavo.multimodal.open_clip_encoder import OpenClipEncoder

        config = {"embed_dim": 32, "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8}}
        OpenClipEncoder.from_config(config)
    except ImportError as error:
        pytest.skip(str(error))

    def made(quick_gelu=False, **options):
        tower = OpenClipEncoder.from_config(config | {"quick_gelu": quick_gelu}, **options)
        torch.manual_seed(0)
        return ImageEncoder(tower, MlpConfig().build(tower.width, 6, tower.grid))

    image = RgbImage(np.asarray(picture(height=40, width=30)))
    plain = made()
    assert plain.encode([image, image]).shape == (2, 16, 6) == (2, plain.n_tokens(image), plain.hidden)
    assert torch.equal(*plain.encode([image, image]))
    others = [made(quick_gelu=True), made(layer=-1), made(keep_cls=True), made(policy=ImagePolicy()), made(seed=1)]
    assert len({one.identity(image) for one in (plain, *others)}) == 6
    assert made().identity(image) == plain.identity(image)


def test_a_cache_of_embeddings_hands_on_the_question_for_scores():
    from octavo.multimodal import CachedEncoder

    torch.manual_seed(0)
    made = ImageEncoder(ScoringTower(), MlpConfig().build(5, 6, (2, 4)))
    cached = CachedEncoder(made, 1 << 20)
    found = cached.encode_scored([picture()])
    assert cached.scores_tokens and torch.equal(found.embeddings, cached.encode([picture()]))
    assert not CachedEncoder(encoder(), 1 << 20).scores_tokens
