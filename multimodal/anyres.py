"""How LLaVA-NeXT looks at an image closely: in tiles, as many as its size and proportions are worth.

Liu et al. 2024, "LLaVA-NeXT: Improved reasoning, OCR, and world knowledge"; sizes are rounded as in Hugging Face's
``llava_next``, since every token is counted by them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.multimodal.images import RgbImage


@dataclass(frozen=True)
class TileGrid:
    """An image is seen once as a whole, squashed into one tile, and once on a *canvas* of tiles::

        canvas of 2 x 3 tiles, P = 4 patches a side      tokens, in this order

        - - - - | - - - - | - - - -                      P * P     the whole image
        - - - - | - - - - | - - - -     padding
        x x x x | x x x x | x x x x     the image        12 + 1    a row of its patches, and the newline
        x x x x | x x x x | x x x x                      12 + 1
        --------+---------+--------
        x x x x | x x x x | x x x x                      12 + 1
        x x x x | x x x x | x x x x                      12 + 1
        - - - - | - - - - | - - - -     padding
        - - - - | - - - - | - - - -

    Args:
        side: pixels along a tile.
        patches: P, patches along a tile.
        pinpoints: canvases (height, width) in pixels.

    Raises:
        ValueError: no canvas, or one that is not made of whole tiles.
    """

    side: int
    patches: int
    pinpoints: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.pinpoints:
            raise ValueError("image_grid_pinpoints is empty; at least one (height, width) is needed")
        for height, width in self.pinpoints:
            if height < 1 or width < 1 or height % self.side or width % self.side:
                raise ValueError(
                    f"image_grid_pinpoints has ({height}, {width}), which is not made of whole tiles of {self.side} x "
                    f"{self.side} pixels"
                )

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """The pinpoint for an image: it shows most of the image's pixels, and among those wastes least; the first one.

        Pixels are counted in floating point and cut off, which decides between canvases now and then.
        """

        def worth(pinpoint: tuple[int, int]) -> tuple[int, int]:
            scale = min(pinpoint[1] / width, pinpoint[0] / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            return shown, shown - pinpoint[0] * pinpoint[1]

        return max(self.pinpoints, key=worth)

    def n_tiles(self, height: int, width: int) -> int:
        """Tiles of an image, the whole included: I of the tower."""
        rows, columns = self._tiles(height, width)
        return 1 + rows * columns

    def n_tokens(self, height: int, width: int) -> int:
        """Tokens of an image of ``height`` x ``width`` pixels."""
        rows, columns = self._kept(height, width)
        return self.patches**2 + rows * (columns + 1)

    def cut(self, image: RgbImage) -> list[RgbImage]:
        """The tiles, ``[side, side, 3]`` each: the whole, then those of the canvas row by row, which is black
        around the image."""
        height, width = self.canvas(image.height, image.width)
        fitted = self._fitted(image.height, image.width)
        top, left = (height - fitted[0]) // 2, (width - fitted[1]) // 2
        canvas = np.zeros((height, width, 3), np.uint8)
        canvas[top : top + fitted[0], left : left + fitted[1]] = _resized(image, *fitted)
        tiles = [_resized(image, self.side, self.side)]
        for row in range(0, height, self.side):
            tiles += [canvas[row : row + self.side, at : at + self.side] for at in range(0, width, self.side)]
        return [RgbImage(tile, image.mode) for tile in tiles]

    def pack(self, tiles: Tensor, newline: Tensor, height: int, width: int) -> Tensor:
        """Tokens [N, D] of an image of ``height`` x ``width`` pixels.

        Args:
            tiles: [I, P * P, D] of its tiles, as ``cut`` orders them.
            newline: [D].
        """
        (rows, columns), side = self._tiles(height, width), self.patches
        canvas = tiles[1:].reshape(rows, columns, side, side, -1).transpose(1, 2)
        canvas = canvas.reshape(rows * side, columns * side, -1)
        kept = self._kept(height, width)
        top, left = ((all_ - some) // 2 for all_, some in zip(canvas.shape, kept, strict=False))
        lines = canvas[top : top + kept[0], left : left + kept[1]]
        lines = torch.cat([lines, newline.expand(kept[0], 1, -1)], 1)
        return torch.cat([tiles[0], lines.flatten(0, 1)])

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        canvas = self.canvas(height, width)
        return canvas[0] // self.side, canvas[1] // self.side

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Pixels that the image has on its canvas, in proportion."""
        tall, wide = self.canvas(height, width)
        if wide / width < tall / height:
            return min(math.ceil(height * (wide / width)), tall), wide
        return tall, min(math.ceil(width * (tall / height)), wide)

    def _kept(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches that are left without the padding, of which as much goes on both sides. So a row
        more may be left, which is padding in part."""
        rows, columns = (count * self.patches for count in self._tiles(height, width))
        if width * rows > height * columns:
            return rows - (rows - height * columns // width) // 2 * 2, columns
        return rows, columns - (columns - width * rows // height) // 2 * 2


def _resized(image: RgbImage, height: int, width: int) -> NDArray[np.uint8]:
    from PIL import Image

    source = Image.fromarray(image.pixels)
    return np.asarray(source.resize((width, height), Image.Resampling.BICUBIC))
