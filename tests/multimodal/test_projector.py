"""Projectors: shapes, which patches meet, and what is refused."""

import pytest
import torch

from octavo.multimodal.projector import LinearConfig, MlpConfig, PixelShuffleConfig

CONFIGS = [
    LinearConfig(),
    LinearConfig(bias=False),
    MlpConfig(),
    MlpConfig(inner=7, bias=False),
    PixelShuffleConfig(n=1, then=LinearConfig()),
    PixelShuffleConfig(),
    PixelShuffleConfig(n=2, then=MlpConfig(inner=5)),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("images", [0, 1, 3])
def test_shapes_and_counts(config, images):
    projector = config.build(width=6, hidden=10, grid=(4, 6))
    tokens = torch.randn(images, 24, 6)
    merged = getattr(config, "n", 1) ** 2
    assert projector(tokens).shape == (images, 24 // merged, 10)
    assert projector.n_tokens(24) == 24 // merged
    assert (projector.width, projector.hidden, projector.config) == (6, 10, config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_images_do_not_meet_and_gradients_reach_every_weight(config):
    projector = config.build(width=6, hidden=10, grid=(4, 6)).double()
    tokens = torch.randn(3, 24, 6, dtype=torch.float64)
    together = projector(tokens)
    torch.testing.assert_close(together, torch.cat([projector(one[None]) for one in tokens]))
    together.square().sum().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in projector.parameters())


def test_linear_is_one_matrix():
    projector = LinearConfig().build(width=3, hidden=2, grid=(1, 1))
    tokens = torch.randn(1, 4, 3)
    assert torch.equal(
        projector(tokens), torch.nn.functional.linear(tokens, projector.linear.weight, projector.linear.bias)
    )


def test_the_mlp_is_llavas():
    """The same names and the same maths as Hugging Face's projector."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

    config = LlavaConfig(vision_config=CLIPVisionConfig(hidden_size=12), text_config=LlamaConfig(hidden_size=32))
    theirs = LlavaMultiModalProjector(config)
    ours = MlpConfig().build(width=12, hidden=32, grid=(4, 6))
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randn(2, 24, 12)
    torch.testing.assert_close(ours(tokens), theirs(tokens))


def test_pixel_shuffle_joins_neighbours():
    """Number the patches of a grid of 4 x 6; token (r, c) must hold the patches of its own 2 x 2 square."""
    projector = PixelShuffleConfig(n=2, then=LinearConfig(bias=False)).build(width=1, hidden=4, grid=(4, 6))
    torch.nn.init.eye_(projector.then.linear.weight)
    grid = torch.arange(24.0).view(1, 24, 1)
    assert projector(grid)[0].tolist() == [
        [0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11],
        [12, 13, 18, 19], [14, 15, 20, 21], [16, 17, 22, 23],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PixelShuffleConfig(n=0), "n must be at least 1, got 0"),
        (lambda: MlpConfig(inner=0), "inner must be at least 1, got 0"),
        (lambda: PixelShuffleConfig(n=4).build(6, 10, (4, 6)), "n=4 does not divide the grid of 4 x 6 patches"),
        (lambda: PixelShuffleConfig().build(6, 10, (4, 6)).n_tokens(25), "got 25 tokens; drop CLS"),
        (lambda: PixelShuffleConfig().build(6, 10, (4, 6))(torch.zeros(1, 20, 6)), "patches alone, got 20 tokens"),
    ],
)  # fmt: skip
def test_refusals(build, message):
    with pytest.raises(ValueError, match=message):
        build()
