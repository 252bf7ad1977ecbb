"""Which launch settings ``tune=true`` tries, and the races that judge them: kernel -> key -> space.

Kernels, keys and settings are those of ``octavo/kernels/triton/settings/*.json``. A kernel that is not here keeps what
its table says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Space:
    """values: of each setting, in the order in which they are tried. races: by name; the mean of the logarithms of
    their times judges a choice."""

    values: Mapping[str, tuple[int, ...]]
    races: tuple[str, ...]


WARPS = (2, 4, 8)
DECODES = ("32 x 8k", "8 x 32k", "1 x 1k", "1 x 32k", "8 x 8k", "1 x 128k", "32, ragged 256-32k")

SPACES: dict[str, dict[str, Space]] = {
    "decode": {
        "128x2": Space(
            {
                "BLOCK_N": (32, 64, 128),
                "num_warps": WARPS,
                "num_stages": (2, 3, 4, 5),
                "programs_per_sm": (1, 2, 3, 4),
                "rounds": (1, 2, 3, 4),
                "min_split_tokens": (128, 256, 512),
            },
            tuple(f"K1 decode, {shape}" for shape in DECODES),
        )
    },
    "combine": {
        "any": Space(
            {"BLOCK_S": (4, 8, 16, 32), "num_warps": (1, 2, 4)},
            ("K1 decode, 1 x 32k", "K1 decode, 8 x 8k", "K1 decode, 1 x 128k"),
        )
    },
    "append": {
        "any": Space(
            {"BLOCK_T": (1, 2, 4, 8, 16, 32), "num_warps": (1, 2, 4)},
            ("K9 append, 256 tokens", "K9 append, 8,192 tokens"),
        )
    },
    "copy_units": {
        "any": Space(
            {"BLOCK_BYTES": (4096, 8192, 16384, 32768), "num_warps": WARPS},
            ("K11 copy, 1 unit of 2 MB", "K11 copy, 32 MB", "K11 copy, 256 MB"),
        )
    },
    "transfer": {
        "any": Space(
            {"PROGRAMS": (8, 16, 32, 64), "TILE_BYTES": (16384, 32768, 65536), "num_warps": (4, 8)},
            tuple(f"K12 transfer, {size} {way}" for size in ("8 KB", "64 KB") for way in ("to device", "to host")),
        )
    },
}
