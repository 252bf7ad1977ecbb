"""Streams: plain reads and copies of large memory, by which a card's rates are measured.

They do nothing but move bytes, so what they reach is what a kernel that moves as many can reach::

    read          [ block | block | ... ]             program i takes blocks i, i + programs, ...
    read_pieces   [piece 7 | piece 2 | piece 9 ...]   the same over pieces in the order of a list, as a decode finds
                                                      the pages of a sequence
    copy          as read, and every block is written elsewhere

Elements are 4 bytes and fewer than 2^31, so that 32-bit offsets do.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read_kernel(x, out, blocks, BLOCK: tl.constexpr):
    seen = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        seen |= tl.load(x + at, eviction_policy="evict_first")
    tl.store(out + tl.program_id(0), tl.max(seen))


@triton.jit
def _read_pieces_kernel(x, order, out, blocks, PIECE: tl.constexpr, PIECES: tl.constexpr):
    seen = tl.zeros([PIECES, PIECE], tl.int32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        piece = tl.load(order + block * PIECES + tl.arange(0, PIECES)) * PIECE
        at = piece[:, None] + tl.arange(0, PIECE)[None, :]
        seen |= tl.load(x + at, eviction_policy="evict_first")
    tl.store(out + tl.program_id(0), tl.max(seen))


@triton.jit
def _copy_kernel(x, out, blocks, BLOCK: tl.constexpr):
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at))


def read(x: Tensor, out: Tensor, block: int, num_warps: int) -> None:
    """Read all of ``x`` int32 [n] in blocks of ``block`` elements; ``out`` int32 [programs] keeps the reads alive."""
    assert x.is_contiguous() and len(x) % block == 0
    _read_kernel[(len(out),)](x, out, len(x) // block, BLOCK=block, num_warps=num_warps)


def read_pieces(x: Tensor, order: Tensor, out: Tensor, pieces: int, num_warps: int) -> None:
    """Read the rows of ``x`` int32 [n, piece] in the order of ``order`` int32 [n], ``pieces`` of them at a time."""
    assert x.is_contiguous() and len(order) % pieces == 0
    piece = x.shape[1]
    _read_pieces_kernel[(len(out),)](
        x, order, out, len(order) // pieces, PIECE=piece, PIECES=pieces, num_warps=num_warps
    )


def copy(x: Tensor, out: Tensor, block: int, programs: int, num_warps: int) -> None:
    """Copy ``x`` int32 [n] to ``out``, which is as long."""
    assert x.is_contiguous() and out.is_contiguous() and len(x) == len(out) and len(x) % block == 0
    _copy_kernel[(programs,)](x, out, len(x) // block, BLOCK=block, num_warps=num_warps)
