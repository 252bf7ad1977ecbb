"""Which launch settings ``tune=true`` tries, and the races that judge them: kernel -> key -> space.

Kernels, keys and settings are those of ``octavo/kernels/triton/settings/*.json``. A trial sets all keys of a kernel at
once, so the races of a space are those that run its own key and no other. A kernel that is not here keeps what its
table says: ``mass``, which no race runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Space:
    """values: of each setting, in the order in which they are tried. races: by name; the mean of the logarithms of
    their times judges a choice."""

    values: Mapping[str, tuple[int, ...]]
    races: tuple[str, ...]


WARPS = (2, 4, 8)


def _of(kernel: str, shapes: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{kernel}, {shape}" for shape in shapes)


SPLIT = {"programs_per_sm": (1, 2, 3, 4), "min_split_tokens": (128, 256, 512)}
DECODE = {"BLOCK_N": (32, 64, 128), "num_warps": WARPS, "num_stages": (2, 3, 4, 5), **SPLIT}
FEW_ROWS = ("32 x 8k", "8 x 32k", "1 x 1k", "1 x 32k", "8 x 8k", "1 x 128k", "32, ragged 256-32k")
MANY_ROWS = ("128 x 2k", "256 x 1k")
SHORT_CHUNKS = _of("K1 decode", ("8 x 8k, 2 queries", "8 x 8k, 8 queries"))
COMBINE = {"BLOCK_S": (4, 8, 16, 32, 64), "num_warps": (1, 2, 4)}

APPEND = {"SEAL_ELEMENTS": (1024, 2048, 4096), "num_warps": (1, *WARPS)}
FEW_TOKENS = (
    "K9 append, 256 tokens",
    "K9 append_fused, 256 tokens, RoPE",
    "K9 append_fused, 256 tokens, RoPE, digests, 16 full pages",
)
MANY_TOKENS = (
    "K9 append, 8,192 tokens",
    "K9 append_fused, 8,192 tokens, RoPE",
    "K9 append_fused, 8,192 tokens, RoPE, digests",
)

PROMPTS = ("16k causal, page 16", "16k causal, page 64", "4k causal", "512 on 32k", "2048 on 32k", "ragged, 6 chunks")
GROUPS = ("16 x 8k shared, 512 own", "32 x 16k shared, 512 own", "64 x 32k shared, 256 own")
KEYS = tuple(f"{size} MB of keys, {how}" for size in (32, 256) for how in ("in place", "copied"))
SHARED_IMAGES = ("K16 query rotation, decode 8 x 8k, 4 shared images of 576 tokens",)
DRAWS = tuple(
    f"{rows} x 128k bf16, {filters}" for rows in (256, 32, 1) for filters in ("top-p 0.9", "top-k 50, top-p 0.9")
)
SURVEYED = tuple(
    f"{rows} x 128k bf16, {filters}" for rows in (256, 32, 1) for filters in ("temperature", "greedy", "top-p 0.9")
)

SPACES: dict[str, dict[str, Space]] = {
    "decode": {  # on Hopper, too, where Triton's kernel runs while its settings are tried
        "128x2": Space(DECODE, _of("K1 decode", FEW_ROWS)),
        "128x2 many": Space(DECODE, _of("K1 decode", MANY_ROWS)),
    },
    "decode_hopper": {
        "128": Space(
            {"programs_per_sm": (1, 2), "min_split_tokens": (64, 128, 256)}, _of("K1 decode", FEW_ROWS + MANY_ROWS)
        )
    },
    "combine": {
        "one": Space(COMBINE, _of("K1 decode", ("1 x 1k", "1 x 32k", "1 x 128k"))),
        "any": Space(COMBINE, _of("K1 decode", ("8 x 8k", "32 x 8k", "128 x 2k"))),
        "shared": Space(COMBINE, _of("K5 shared", GROUPS)),
        "short": Space(COMBINE, SHORT_CHUNKS),
    },
    "shared": {
        "128x2": Space(
            {"BLOCK_M": (64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4), **SPLIT},
            _of("K5 shared", GROUPS),
        )
    },
    "prefill": {
        "128x2": Space(
            {
                "BLOCK_M": (64, 128),
                "BLOCK_N": (32, 64, 128),
                "num_warps": (4, 8),
                "num_stages": (2, 3, 4),
                "TMA": (0, 1),
            },
            _of("K3 native", PROMPTS),
        )
    },
    "prefill_short": {"128x2": Space({"BLOCK_M": (64,), **DECODE}, SHORT_CHUNKS)},
    "prefill_dense": {
        "any": Space(
            {
                "row_grain": (512, 1024),
                "context_grain": (1024, 2048, 4096),
                "min_rows": (1024, 2048, 4096),
                "min_chunk_rows": (512, 1024, 2048),
            },
            _of("K3 prefill", PROMPTS),
        )
    },
    "gather": {"any": Space({"BLOCK_T": (32, 64, 128), "num_warps": (4, 8)}, _of("K3 prefill", PROMPTS))},
    "page_score": {
        "128x2": Space(
            {
                "BLOCK_P": (16, 32, 64),
                "programs_per_sm": (2, 3, 4, 5),
                "most_tiles": (4, 8, 16),
                "num_warps": WARPS,
                "num_stages": (2, 3, 4, 5),
            },
            _of("K6 score", ("8 x 32k, page 16", "1 x 128k, page 16")),
        )
    },
    "page_topk": {
        "any": Space(
            {"BLOCK": (8192,), "LANES": (256, 512), "COMPARISONS": (1024, 2048, 4096), "num_warps": (1, 2, 4, 8)},
            _of("K7 top-k", ("256 x 8192, 128 pages", "64 x 2048, 128 pages")),
        )
    },
    "append": {
        "few": Space({"BLOCK_T": (1, 2, 4, 8), **APPEND}, FEW_TOKENS),
        "many": Space({"BLOCK_T": (4, 8, 16, 32), **APPEND}, MANY_TOKENS),
    },
    "copy_units": {
        "any": Space(
            {"BLOCK_BYTES": (4096, 8192, 16384, 32768), "num_warps": WARPS},
            _of("K11 copy", ("1 unit of 2 MB", "32 MB", "256 MB")),
        )
    },
    "transfer": {
        "any": Space(
            {"PROGRAMS": (8, 16, 32, 64), "TILE_BYTES": (16384, 32768, 65536), "num_warps": (4, 8)},
            _of("K12 transfer", [f"{size} {way}" for size in ("8 KB", "64 KB") for way in ("to device", "to host")]),
        )
    },
    "sample_survey": {
        "2": Space(
            {
                "BLOCK": (512, 1024, 2048, 4096),
                "CELL": (16, 32, 64),
                "STAGES": (3, 4, 5),
                "maxnreg": (64, 80, 128),
                "num_warps": (2, 4, 8),
                "programs_per_sm": (4, 6, 8, 16),
            },
            _of("K13 sample", SURVEYED),
        )
    },
    "sample_settle": {
        "2": Space(
            {
                "BLOCK": (1024, 2048, 4096, 8192),
                "CAPACITY": (256, 512, 1024, 2048),
                "STAGES": (2, 3, 4),
                "maxnreg": (64, 80, 128),
                "num_warps": (8, 16),
                "programs_per_sm": (2, 3, 4),
            },
            _of("K13 sample", DRAWS),
        )
    },
    "step_decode": {
        "any": Space(
            {"BLOCK_B": (16, 32, 64, 128), "num_warps": (1, 2, 4)},
            _of("K14 step_decode", ("256 rows, 1 slice", "256 rows, 6 slices")),
        )
    },
    "scatter_tokens": {
        "any": Space({"BLOCK_B": (32, 64, 128, 256), "num_warps": (1, 2, 4)}, ("K14 scatter_tokens, 256 rows",))
    },
    "rotate_keys": {
        "any": Space(
            {"BLOCK_BYTES": (4096, 8192, 16384), "TILES": (1, 2, 4), "num_warps": (4, 8)}, _of("K16 rotate", KEYS)
        )
    },
    "rotate_queries": {"any": Space({"BLOCK_HEADS": (4, 8, 16, 32), "num_warps": (1, 2, 4)}, SHARED_IMAGES)},
    "merge_states": {"any": Space({"BLOCK_S": (4, 8, 16), "num_warps": (1, 2, 4)}, SHARED_IMAGES)},
}
