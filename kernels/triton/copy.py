"""Copy units: one launch copies (source, destination) pairs over all layers, for copy-on-write and for compaction.

    pool    [units, layers, 2, kv_heads, unit_tokens, head_dim]; a unit is one contiguous piece of UNIT elements
    pairs   int32 [n, 2]   no destination is a source, so the order of the programs does not matter

A program moves one block of one unit, and the blocks of a unit are neighbours in the grid::

    program   | 0        1        2        | 3        4        5        | ...
    unit      | [ block ][ block ][ blo    | [ block ][ block ][ blo    |        pair 0 | pair 1 | ...

UNIT is a property of the pool and therefore compiled in: the compiler then knows that a block begins at a multiple of
16 bytes in source and destination and that a whole vector lies inside of the unit or outside of it, which is what
16-byte accesses need. Only a unit's base takes 64 bits. ``(0, 0)`` pairs (scratch onto itself) are harmless padding.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings


@triton.jit
def _copy_kernel(pool, pairs, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = (UNIT + BLOCK - 1) // BLOCK
    pair = pairs + 2 * (tl.program_id(0) // blocks)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    source = pool + tl.load(pair).to(tl.int64) * UNIT
    target = pool + tl.load(pair + 1).to(tl.int64) * UNIT
    inside = at < UNIT
    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def copy_units(pool: Tensor, pairs: Tensor) -> None:
    """See ``reference.copy_units``."""
    assert pool.is_contiguous() and pairs.is_contiguous()
    tuned = settings.launch("copy_units", "any", pool.device)
    unit = pool.stride(0)
    block = tuned["BLOCK_BYTES"] // pool.element_size()
    _copy_kernel[(len(pairs) * triton.cdiv(unit, block),)](
        pool, pairs, UNIT=unit, BLOCK=block, num_warps=tuned["num_warps"]
    )
