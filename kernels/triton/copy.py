"""Copy units: one launch copies (source, destination) pairs over all layers, for copy-on-write and for compaction.

    pool    [units, layers, 2, kv_heads, unit_tokens, head_dim]; a unit is one contiguous piece
    pairs   int32 [n, 2]   no destination is a source, so the order of the programs does not matter

A program moves one block of one unit; ``(0, 0)`` pairs (scratch onto itself) are harmless padding.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings


@triton.jit(do_not_specialize=["blocks"])
def _copy_kernel(pool, pairs, blocks, unit_stride, BLOCK: tl.constexpr):
    pair = pairs + 2 * (tl.program_id(0) // blocks)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(pair).to(tl.int64) * unit_stride
    target = tl.load(pair + 1).to(tl.int64) * unit_stride
    inside = at < unit_stride
    tl.store(pool + target + at, tl.load(pool + source + at, mask=inside), mask=inside)


def copy_units(pool: Tensor, pairs: Tensor) -> None:
    """See ``reference.copy_units``."""
    assert pool.is_contiguous() and pairs.is_contiguous()
    tuned = settings.launch("copy_units", "any", pool.device)
    block = tuned["BLOCK_BYTES"] // pool.element_size()
    blocks = triton.cdiv(pool.stride(0), block)
    _copy_kernel[(len(pairs) * blocks,)](pool, pairs, blocks, pool.stride(0), BLOCK=block, num_warps=tuned["num_warps"])
