"""How a batch's tiles are shared out over programs. Every program works the same plan out on the device, from lengths.

    item    one row of the table, (sequence, table head); its tiles are those that its query sees anything of
    lane    the KV heads that share an item run side by side with the same plan: lanes = Hkv / Ht

    tiles of all items, end to end    | item 0                | item 1   | item 2                      |
    programs of a lane                |    0    |    1    |    2    |    3    |    4    |    5    |  6 |
                                                          ^ ends one item and begins the next

Program s of S takes tiles [s T / S, (s + 1) T / S): equal shares, whatever the lengths (stream-K as in LeanAttention,
arXiv 2405.10480). An item that lies within one program is finished there; of one that does not, each program leaves a
part, and the combine kernel joins them. A program begins at most one part and ends at most one, so parts have fixed
places: ``2 s`` for the item that the program begins with, ``2 s + 1`` for a later one that it does not finish.

The grid holds ``most`` programs a lane, from shapes alone; those beyond ``programs_used`` exit at once, so that a
captured graph serves any lengths.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def span(length, q_pos, skip, WINDOW: tl.constexpr, ORDERED: tl.constexpr, BLOCK_N: tl.constexpr):
    """First slot, end and tiles of what a query may see from slot ``skip`` on; an ordered table ends at the query's
    position."""
    first = length * 0 + skip
    end = length
    if ORDERED:
        end = tl.maximum(tl.minimum(length, q_pos + 1), 0)
        if WINDOW > 0:
            first = tl.maximum(q_pos + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    return first, end, tl.maximum(tl.cdiv(end - first, BLOCK_N), 0)


@triton.jit
def skipped(shared, RUN_TILE: tl.constexpr):
    """Of ``shared`` leading slots those that shared.py attends to: whole tiles of RUN_TILE."""
    return shared // RUN_TILE * RUN_TILE


@triton.jit
def item_tiles(
    lengths,
    l_batch,
    l_head,
    q_pos,
    skips,
    items,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
    RUN_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Tiles of each item, int32 [BLOCK_I]; 0 past ``items``. HEADS: heads of ``lengths``."""
    i = tl.arange(0, BLOCK_I)
    length = tl.load(lengths + i // HEADS * l_batch + i % HEADS * l_head, mask=i < items, other=0)
    position = tl.load(q_pos + i // HEADS, mask=i < items, other=-1)
    skip = tl.zeros([BLOCK_I], tl.int32)
    if RUN_TILE > 0:
        skip = skipped(tl.load(skips + i // HEADS, mask=i < items, other=0), RUN_TILE)
    _, _, tiles = span(length, position, skip, WINDOW, ORDERED, BLOCK_N)
    return tl.where(i < items, tiles, 0)


@triton.jit
def programs_used(total, most, min_tiles):
    """Programs of a lane for ``total`` tiles: all of them, or fewer, so that no share falls below ``min_tiles``."""
    return tl.minimum(tl.maximum(total // min_tiles, 1), most)


@triton.jit
def share_begin(program, total, used):
    """First tile of a program's share, int32."""
    return (program.to(tl.int64) * total // used).to(tl.int32)


@triton.jit
def program_of(tile, total, used):
    """The program whose share holds a tile, int32."""
    return (((tile + 1).to(tl.int64) * used - 1) // total).to(tl.int32)


def programs_a_lane(
    items: int, lanes: int, slots: int, multiprocessors: int, tuned: Mapping[str, int]
) -> tuple[int, int]:
    """Programs of a lane (0: a program an item, because no item is worth splitting), and the tiles of the least share.

    From shapes alone, never from lengths; ``slots`` is the capacity of a table row. All lanes together fill the
    multiprocessors once: a second round costs more in start-up and in parts than it wins by a more even end.
    """
    splits = triton.cdiv(slots, tuned["min_split_tokens"])
    wave = max(tuned["programs_per_sm"] * multiprocessors // lanes, 1)
    return min(wave, items * splits) if splits > 1 else 0, max(tuned["min_split_tokens"] // tuned["BLOCK_N"], 1)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it runs (programmatic dependent launch, since Hopper).

    A kernel that may be launched early waits (``gdc_wait``) before it reads what its predecessor wrote, and in every
    program before it ends, so that "the kernel before has ended" means that all before it have. A kernel whose next one
    is small lets it start (``gdc_launch_dependents``) once it runs itself. It must not where the next one fills the
    multiprocessors in one wave: programs that start while others still run come to lie three on one and none on
    another, which cost decoding up to a quarter.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
