"""A vision tower in a few lines: no open_clip, images of any size, some tokens of its own for each."""

import torch
from PIL import Image
from torch import nn

from octavo.multimodal import ImageEncoder, MlpConfig

PATCH = 8


class PatchTower(nn.Module):
    """The image is squashed to the grid; a patch of 8 x 8 pixels becomes a token: its pixels through one matrix."""

    width = 32
    settings, preprocessing = "patches of 8", "squashed"

    def __init__(self, grid, policy=None):
        super().__init__()
        self.grid, self.policy, self.n_tokens = grid, policy, grid[0] * grid[1]
        self.patch = nn.Linear(3 * PATCH * PATCH, self.width)

    def check(self, image):
        pass

    def preprocess(self, images):
        rows, columns = self.grid
        squashed = [Image.fromarray(i.pixels).resize((columns * PATCH, rows * PATCH)) for i in images]
        pixels = torch.stack([torch.frombuffer(bytearray(i.tobytes()), dtype=torch.uint8) for i in squashed])
        cells = pixels.float().div(255).reshape(len(images), rows, PATCH, columns, PATCH, 3).transpose(2, 3)
        return cells.reshape(len(images), self.n_tokens, -1)

    def forward(self, pixels):
        return self.patch(pixels)


def patch_encoder(grid, hidden, *, policy=None, **options):
    """An ``ImageEncoder`` whose tokens differ clearly, the same ones at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tower, projector = PatchTower(grid, policy), MlpConfig().build(PatchTower.width, hidden, grid)
        with torch.no_grad():
            for parameter in [*tower.parameters(), *projector.parameters()]:
                parameter.mul_(4)
    return ImageEncoder(tower, projector, **options)
