"""LLaVA-NeXT's images as the engine's ``SegmentEncoder``: more tokens for larger images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.multimodal.anyres import TileGrid
from octavo.multimodal.image_encoder import ImageEncoder
from octavo.multimodal.open_clip_encoder import OpenClipEncoder
from octavo.multimodal.projector import Projector


class AnyresEncoder(ImageEncoder):
    """An ``ImageEncoder`` that encodes the tiles of an image, and packs them as ``TileGrid`` draws it.

    Args:
        newline: [D], the embedding behind each row of patches, in the projector's dtype and on its device.
        pinpoints: canvases (height, width) in pixels, of whole tiles as large as the tower's images.
        batch_images: tiles a forward pass; None is 1 on a CPU and 16 elsewhere.

    Raises:
        ValueError: a tower that is not square or keeps its class token, a projector that changes the number of tokens,
            a newline of another width; and as ``ImageEncoder`` and ``TileGrid``.
    """

    def __init__(
        self,
        tower: OpenClipEncoder,
        projector: Projector,
        newline: nn.Parameter,
        pinpoints: Sequence[tuple[int, int]],
        *,
        batch_images: int | None = None,
    ) -> None:
        super().__init__(tower, projector, batch_images=batch_images)
        (side, columns), (patches, _) = tower.image_size, tower.grid
        if side != columns:
            raise ValueError(f"tiles are square, and the tower takes {side} x {columns} pixels")
        if self._n_tokens != patches**2:
            raise ValueError(
                f"tiles are put together from {patches} x {patches} patches, and there are {self._n_tokens} tokens a "
                "tile; drop the class token, and take a projector that keeps the number of tokens"
            )
        if tuple(newline.shape) != (self.hidden,):
            raise ValueError(f"newline must be [{self.hidden}] as the projector's embeddings, got {[*newline.shape]}")
        self.newline = newline
        self.tiles = TileGrid(side, patches, tuple(pinpoints))
        self._preprocessing = json.dumps({"anyres": self.tiles.pinpoints, "tile": tower.preprocessing})
        self._modules.append(nn.ParameterList([newline]))

    def n_tokens(self, item: Any) -> int:
        """Tokens that the item takes in a prompt, by its size; known before it is encoded."""
        image = self.read(item)
        return self.tiles.n_tokens(image.height, image.width)

    @property
    def scores_tokens(self) -> bool:
        """Of tiles, and of newlines between rows, the tower has no common account."""
        return False

    @torch.no_grad()
    def encode(self, items: Sequence[Any]) -> Tensor:
        """Embeddings [I, N, D] of I items of N tokens each, in the projector's dtype and on its device."""
        images = [self.read(item) for item in items]
        tiles = self._embeddings([tile for image in images for tile in self.tiles.cut(image)])
        counts = [self.tiles.n_tiles(image.height, image.width) for image in images]
        rows = [
            self.tiles.pack(own, self.newline, image.height, image.width)
            for own, image in zip(torch.split(tiles, counts), images, strict=True)
        ]
        return torch.stack(rows) if rows else tiles
