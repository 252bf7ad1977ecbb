"""Drawing scenes in torch, on whatever device: a batch of images costs a few dozen kernels, however many they are.

I images, O things in all of them, T pixels a side of the tile that a thing is drawn in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from octavo.multimodal.scenes import CELL, COLOURS, DIGITS, KINDS, SHAPES, SIDE, SIZES, Scene

TILE = CELL

SEGMENTS = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")
"""Which segments of a seven-segment display each digit lights::

         a
       -----
    f |     | b
       --g--
    e |     | c
       -----
         d
"""

BARS = {
    "a": (0.0, -0.86, 0.50, 0.14),
    "b": (0.5, -0.43, 0.14, 0.43),
    "c": (0.5, 0.43, 0.14, 0.43),
    "d": (0.0, 0.86, 0.50, 0.14),
    "e": (-0.5, 0.43, 0.14, 0.43),
    "f": (-0.5, -0.43, 0.14, 0.43),
    "g": (0.0, 0.0, 0.50, 0.14),
}
"""Middle (x, y) and half sides (x, y) of each segment, in radii; y grows downwards."""


def scene_arrays(scenes: Sequence[Scene]) -> tuple[np.ndarray, np.ndarray]:
    """Scenes as numbers, which travel better between processes.

    Returns:
        things int16 [O, 6]: image, kind, colour, radius, x and y of the middle in pixels; and backgrounds int16
        [I, 6]: the fields of ``Background``.
    """
    colours = list(COLOURS)
    things = [
        (
            image,
            KINDS.index(thing.kind),
            colours.index(thing.colour),
            SIZES[thing.size],
            thing.column * CELL + CELL // 2 + thing.dx,
            thing.row * CELL + CELL // 2 + thing.dy,
        )
        for image, scene in enumerate(scenes)
        for thing in scene.things
    ]
    backgrounds = [scene.background for scene in scenes]
    return np.array(things, np.int16).reshape(-1, 6), np.array(backgrounds, np.int16).reshape(-1, 6)


def render(things: Tensor, backgrounds: Tensor) -> Tensor:
    """Pixels uint8 [I, SIDE, SIDE, 3] of ``scene_arrays``, on the device of its tensors."""
    return paint(things, waves(backgrounds))


def waves(backgrounds: Tensor) -> Tensor:
    """fp32 [I, SIDE, SIDE, 3], at most 85, so darker than any thing."""
    colour, (swing, across, down) = backgrounds[:, :3].float(), backgrounds[:, 3:].float().unbind(1)
    at = torch.arange(SIDE, device=backgrounds.device) * (2 * math.pi / SIDE)
    phase = down[:, None, None] * at[:, None] + across[:, None, None] * at
    wave = swing[:, None, None] * torch.sin(phase)
    return (colour[:, None, None] + wave[..., None]).clamp(0, 85)


def paint(things: Tensor, canvas: Tensor) -> Tensor:
    """``things`` on ``canvas`` fp32 [I, SIDE, SIDE, 3], as uint8.

    1. The signed distance d of each pixel's middle from the outline of each thing, negative inside, on a tile of T x T
       pixels around the thing.
    2. A pixel is covered by ``clamp(1/2 - d, 0, 1)``: anti-aliasing one pixel wide.
    3. ``covered * (colour - background)`` is added to the background. Things overlap nowhere, so sums are exact in any
       order; tiles may reach over the border, so the canvas is wider by half a tile on each side until it is done.
    """
    image, kind, colour, radius, x, y = things.long().unbind(1)
    margin = TILE // 2
    wide = nn.functional.pad(canvas, (0, 0, margin, margin, margin, margin))
    offsets = torch.arange(TILE, device=things.device)
    rows = (y[:, None] + offsets)[:, :, None].expand(-1, TILE, TILE)
    columns = (x[:, None] + offsets)[:, None, :].expand(-1, TILE, TILE)
    where = (image[:, None, None].expand(-1, TILE, TILE), rows, columns)
    covered = (0.5 - _distance(kind, radius)).clamp(0, 1)[..., None]
    palette = _table(things.device, tuple(COLOURS.values()))
    wide.index_put_(where, covered * (palette[colour][:, None, None] - wide[where]), accumulate=True)
    return wide[:, margin:-margin, margin:-margin].round().to(torch.uint8)


def draw(scenes: Sequence[Scene]) -> list[np.ndarray]:
    """Images uint8 [SIDE, SIDE, 3], as ``load_image`` takes them; drawn on the CPU."""
    return [*render(*map(torch.from_numpy, scene_arrays(scenes))).numpy()]


@cache
def _table(device: torch.device, rows: tuple[tuple[float, ...], ...]) -> Tensor:
    """fp32, kept on the device: copying it there again would wait for whatever runs."""
    return torch.tensor(rows, device=device, dtype=torch.float32)


def _distance(kind: Tensor, radius: Tensor) -> Tensor:
    """Signed distances fp32 [O, T, T] in pixels. Near corners of unions and intersections they are bounds, which is
    the same for anti-aliasing."""
    at = torch.arange(TILE, device=kind.device) - (TILE - 1) / 2
    x, y = at[None, None, :], at[None, :, None]
    r = radius[:, None, None].float()
    across, along = x.abs(), y.abs()
    from_middle = torch.sqrt(x * x + y * y)
    bar = 0.35 * r
    outlines = {
        "circle": from_middle - r,
        "square": torch.maximum(across, along) - 0.85 * r,
        "triangle": torch.maximum(y - 0.8 * r, (1.8 * across - (y + r)) / math.hypot(1.8, 1)),
        "diamond": (across + along - r) / math.sqrt(2),
        "cross": torch.minimum(torch.maximum(across - r, along - bar), torch.maximum(across - bar, along - r)),
        "ring": torch.maximum(from_middle - r, 0.55 * r - from_middle),
    }
    fields = [outlines[shape].expand(len(kind), TILE, TILE) for shape in SHAPES]
    lit = _table(kind.device, tuple(tuple(name in on for name in BARS) for on in SEGMENTS))
    dark = lit[(kind - len(SHAPES)).clamp(0, len(DIGITS) - 1)] == 0
    digit = torch.full((len(kind), TILE, TILE), math.inf, device=kind.device)
    for number, (bar_x, bar_y, half_x, half_y) in enumerate(BARS.values()):
        box = torch.maximum((x - bar_x * r).abs() - half_x * r, (y - bar_y * r).abs() - half_y * r)
        digit = torch.minimum(digit, box.masked_fill(dark[:, number, None, None], math.inf))
    stacked = torch.stack([*fields, digit])
    return stacked[kind.clamp(max=len(SHAPES)), torch.arange(len(kind), device=kind.device)]
