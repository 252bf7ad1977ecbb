"""Tiles of LLaVA-NeXT: which canvas, which patches, how many tokens, in which order."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.multimodal.anyres import TileGrid
from octavo.multimodal.images import RgbImage

REAL = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
TINY = ((2, 4), (4, 2), (4, 4))


@pytest.mark.parametrize(
    ("height", "width", "tokens"),
    [(336, 336, 1176), (672, 672, 2928), (480, 640, 2340), (1080, 1920, 1948), (1, 1000, 576), (1000, 1, 576 + 72)],
)
def test_token_counts_at_336_pixels(height, width, tokens):
    assert TileGrid(336, 24, REAL).n_tokens(height, width) == tokens


SIDES = st.integers(1, 5000)


@settings(deadline=None)  # the first example imports transformers
@given(SIDES, SIDES)
@example(735, 1471)  # where rounding would choose another canvas
@example(1235, 617)  # where exact fractions would
@example(1, 1000)
@example(1000, 1)
def test_sizes_are_hugging_faces(height, width):
    """Canvas, tokens and the shape of what is packed, against the functions of transformers that count them."""
    from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches, unpad_image

    tiles = TileGrid(336, 24, REAL)
    canvas = select_best_resolution((height, width), [*REAL])
    assert tiles.canvas(height, width) == canvas
    assert tiles.n_tiles(height, width) == image_size_to_num_patches((height, width), [*REAL], 336)
    rows, columns = unpad_image(torch.empty(1, canvas[0] // 14, canvas[1] // 14), (height, width)).shape[1:]
    assert tiles.n_tokens(height, width) == 576 + rows * columns + rows
    features = torch.empty(tiles.n_tiles(height, width), 576, 1)
    assert tiles.pack(features, torch.empty(1), height, width).shape == (tiles.n_tokens(height, width), 1)
    pixels = np.empty((3, height, width), np.uint8)
    assert tiles._fitted(height, width) == get_patch_output_size(pixels, canvas, "channels_first")


def test_tokens_are_the_whole_then_rows_with_newlines():
    """2 x 2 patches a tile, two tiles side by side. The image is 8 wide and 2 high, and is shown 4 wide and 1 high, so
    half of the canvas's two rows is padding: as much on both sides is none."""
    tiles = TileGrid(2, 2, TINY)
    assert tiles.canvas(2, 8) == (2, 4)
    whole, left, right = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]
    features = torch.tensor([whole, left, right]).unsqueeze(-1)
    packed = tiles.pack(features, torch.tensor([-1]), 2, 8)
    assert packed.flatten().tolist() == [0, 1, 2, 3, 4, 5, 8, 9, -1, 6, 7, 10, 11, -1]


def test_padding_leaves_as_much_on_both_sides():
    """Canvas of 4 x 4 patches, 2 x 2 tiles; the image is half as wide as high, so the middle columns are left."""
    tiles = TileGrid(2, 2, ((4, 4),))
    features = torch.arange(20).reshape(5, 4, 1)
    packed = tiles.pack(features, torch.tensor([-1]), 8, 4)
    assert packed.flatten().tolist() == [0, 1, 2, 3, 5, 8, -1, 7, 10, -1, 13, 16, -1, 15, 18, -1]


def test_what_is_cut_is_the_image_on_black():
    """An image of one colour on a canvas of the other proportions: black above and below."""
    tiles = TileGrid(4, 2, ((8, 8),))
    image = RgbImage(np.full((2, 4, 3), 200, np.uint8), mode="P")
    whole, *rest = tiles.cut(image)
    assert all(tile.pixels.shape == (4, 4, 3) and tile.mode == "P" for tile in (whole, *rest)) and len(rest) == 4
    assert (whole.pixels == 200).all()
    for tile, rows in zip(rest, ([0, 0, 200, 200],) * 2 + ([200, 200, 0, 0],) * 2, strict=True):
        assert tile.pixels[:, 0, 0].tolist() == rows


@pytest.mark.parametrize(
    ("pinpoints", "message"),
    [
        ((), "image_grid_pinpoints is empty"),
        (((336, 336), (336, 500)), r"\(336, 500\), which is not made of whole tiles of 336 x 336"),
        (((0, 336),), r"\(0, 336\)"),
    ],
)
def test_canvases_that_are_none(pinpoints, message):
    with pytest.raises(ValueError, match=message):
        TileGrid(336, 24, pinpoints)
