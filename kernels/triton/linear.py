"""Linear layers of few rows: the weight is read once, at the rate of the card, in equal shares of all its pieces.

    weight [N, K]        | chunk 0 | chunk 1 | ...              out [rows, N] = x [rows, K] weight^T + bias
    tile 0   BLOCK_N rows| 0     0 | 0     0 | 1 ...
    tile 1               | 1     1 | 2     2 | 2 ...            <- which program multiplies which piece
    ...                            ^ BLOCK_K columns

Program s of S takes the pieces [s T / S, (s + 1) T / S) of the T pieces in the order of memory, tile by tile
(stream-K: Osama et al., arXiv 2301.03598). N is seldom BLOCK_N times the multiprocessors, and whole tiles would leave
some of them idle at the end. The pieces are one loop, whose asynchronous copies do not stop where a tile ends.

A piece of the weight is the left operand of the product and x the right one: the tensor cores want 64 rows on the left,
where the weight has them, and take as few as 8 columns on the right. Rows of x are padded to ``BLOCK_B``.

A tile that lies within one share is finished there. Of one that does not, each program leaves an fp32 part and adds one
to the tile's counter; whoever makes it complete sums all parts in the order of the programs, so that it cannot matter
who that is, and sets the counter back to 0:

    parts    fp32  [2 S, BLOCK_N, BLOCK_B]   2 s: of the tile that share s begins within
                                             2 s + 1: of one that begins in share s and ends in another
    counters int32 [tiles]                   0 between calls

The weight does not depend on the kernel before, and x does: where launches overlap, the first pieces are on their way
to the L2 before a program waits for x.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

from collections.abc import Mapping

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings
from octavo.kernels.triton.plan import multiprocessors, overlaps_launches, program_of, share_begin

LINE = tl.constexpr(64)  # elements of 16 bits in a line of the L2
LEAST_COLUMNS = 8  # of the right operand of a tensor-core product
VECTOR_BYTES = 16  # what a thread copies at once

_counters: dict[tuple[torch.device, int, int], Tensor] = {}


@triton.jit
def _prefetch(weight, tile, first, N, K, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr):
    """Ask for columns ``first + [0, COLUMNS)`` of a tile to be brought into the L2; nothing waits for them."""
    row = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64) * K
    column = tl.minimum(first + tl.arange(0, COLUMNS // LINE) * LINE, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [weight + row[:, None] + column[None, :]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _finish(acc, bias, out, tile, rows, N, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """Store a tile's sums fp32 [BLOCK_N, BLOCK_B] into its columns of the result."""
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.arange(0, BLOCK_B)
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(out + b[None, :] * N + n[:, None], acc, mask=(n < N)[:, None] & (b < rows)[None, :])


@triton.jit(do_not_specialize=["rows", "tiles"])
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    parts,
    counters,
    rows,
    tiles,
    x_row,
    N,
    K,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    RELEASE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """MOST_PARTS: parts of a tile at most; 0 if every share is made of whole tiles. PREFETCH: chunks of the weight that
    are asked for before the wait. RELEASE: the next kernel may start when the weight has been read."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    chunks = tl.cdiv(K, BLOCK_K)
    begin = share_begin(program, tiles * chunks, programs)
    end = share_begin(program + 1, tiles * chunks, programs)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    b = tl.arange(0, BLOCK_B)

    if OVERLAP:
        if PREFETCH > 0:
            _prefetch(weight, begin // chunks, begin % chunks * BLOCK_K, N, K, BLOCK_N, PREFETCH * BLOCK_K)
        tl.extra.cuda.gdc_wait()

    from_x = x + tl.minimum(b, rows - 1)[:, None] * x_row + k[None, :]  # what padding rows hold is not stored
    acc = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    for piece in tl.range(begin, end, num_stages=STAGES):
        tile = piece // chunks
        first = piece % chunks * BLOCK_K
        row = tl.minimum(n, N - 1 - tile * BLOCK_N) * K
        from_weight = weight + (tile * BLOCK_N).to(tl.int64) * K + first + row[:, None] + k[None, :]
        if EVEN_K:
            w_piece = tl.load(from_weight)
            x_piece = tl.load(from_x + first)
        else:
            inside = (first + k < K)[None, :]
            w_piece = tl.load(from_weight, mask=inside, other=0.0)
            x_piece = tl.load(from_x + first, mask=inside, other=0.0)
        acc = tl.dot(w_piece, x_piece.T, acc)
        if (piece + 1 == end) | (first + BLOCK_K >= K):
            begins = tile * chunks >= begin
            whole = begins & (first + BLOCK_K >= K)
            if MOST_PARTS == 0:
                whole = True
            if whole:
                _finish(acc, bias, out, tile, rows, N, BIAS, BLOCK_N, BLOCK_B)
            else:
                place = parts + (2 * program + begins.to(tl.int32)) * (BLOCK_N * BLOCK_B)
                tl.store(place + n[:, None] * BLOCK_B + b[None, :], acc)
            acc = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    if OVERLAP and RELEASE:
        tl.extra.cuda.gdc_launch_dependents()

    if MOST_PARTS > 0:
        tl.debug_barrier()  # what all threads have stored is there when the atomic is
        first_tile = begin // chunks
        last_tile = (end - 1) // chunks
        for tile in range(first_tile, last_tile + 1, tl.maximum(last_tile - first_tile, 1)):
            owner = program_of(tile * chunks, tiles * chunks, programs)
            sharers = program_of((tile + 1) * chunks - 1, tiles * chunks, programs) - owner + 1
            arrived = 0
            if sharers > 1:
                arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel") + 1
            if arrived == sharers:
                tl.store(counters + tile, 0)
                joined = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
                for sharer in tl.static_range(MOST_PARTS):  # unrolled, so that all parts are fetched at once
                    place = parts + (2 * (owner + sharer) + (sharer == 0)) * (BLOCK_N * BLOCK_B)
                    from_part = place + n[:, None] * BLOCK_B + b[None, :]
                    joined += tl.load(from_part, mask=sharer < sharers, other=0.0, cache_modifier=".cg")
                _finish(joined, bias, out, tile, rows, N, BIAS, BLOCK_N, BLOCK_B)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See ``reference.linear``. Many rows, fp32, and rows that are no whole number of 16-byte pieces are torch's."""
    N, K = weight.shape
    rows = x.numel() // K
    limits = settings.launch("linear", "any", x.device)
    if (
        not 0 < rows <= limits["most_rows"]
        or x.dtype not in (torch.float16, torch.bfloat16)
        or K * x.element_size() % VECTOR_BYTES
        or not weight.is_contiguous()
    ):
        return F.linear(x, weight, bias)
    x_rows = x.reshape(rows, K)
    if x_rows.stride(1) != 1:
        x_rows = x_rows.contiguous()
    block_b = max(triton.next_power_of_2(rows), LEAST_COLUMNS)
    small = " small" if weight.nbytes <= limits["small_bytes"] else ""
    tuned = settings.launch("linear", f"{block_b}{small}", x.device)
    tiles, chunks = triton.cdiv(N, tuned["BLOCK_N"]), triton.cdiv(K, tuned["BLOCK_K"])
    programs, most_parts = _shares(tiles, chunks, multiprocessors(x.device), tuned)
    out = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    parts, counters = out, out
    if most_parts:
        shape = (2 * programs, tuned["BLOCK_N"], block_b)
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
        counters = _counters_of(weight, tiles)
    overlap = overlaps_launches(x.device)
    _linear_kernel[(programs,)](
        x_rows,
        weight,
        weight if bias is None else bias,
        out,
        parts,
        counters,
        rows,
        tiles,
        x_rows.stride(0),
        N,
        K,
        BIAS=bias is not None,
        EVEN_K=K % tuned["BLOCK_K"] == 0,
        MOST_PARTS=most_parts,
        BLOCK_N=tuned["BLOCK_N"],
        BLOCK_K=tuned["BLOCK_K"],
        BLOCK_B=block_b,
        STAGES=tuned["STAGES"],
        PREFETCH=tuned["PREFETCH"],
        RELEASE=tuned["RELEASE"],
        OVERLAP=overlap,
        num_warps=tuned["num_warps"],
        launch_pdl=overlap,
    )
    return out


def _shares(tiles: int, chunks: int, multiprocessors: int, tuned: Mapping[str, int]) -> tuple[int, int]:
    """Programs, and parts of a tile at most (0: all shares are whole tiles), from shapes alone.

    All programs run at once. A tile is split only where tiles are too few to go round, into shares of ``min_chunks`` at
    least, or where the tiles of a share would not come out even.
    """
    wave = tuned["programs_per_sm"] * multiprocessors
    programs = min(wave, tiles * max(chunks // tuned["min_chunks"], 1))
    if tiles % programs == 0:
        return programs, 0
    least_share = tiles * chunks // programs
    return programs, min(triton.cdiv(chunks - 1, least_share) + 1, programs)


def _counters_of(weight: Tensor, tiles: int) -> Tensor:
    """Zeros int32 [tiles] for the products by one weight, which no two streams may compute at the same time.

    A weight has its own, because different layers may well run on different streams. They are zeros between calls, so
    it does no harm if another weight comes to lie where this one was.
    """
    key = weight.device, weight.data_ptr(), tiles
    if key in _counters:
        return _counters[key]
    counters = torch.zeros(tiles, dtype=torch.int32, device=weight.device)
    # What is made during a capture is zeroed by that graph alone, and only when it is replayed.
    if weight.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _counters[key] = counters
    return counters
